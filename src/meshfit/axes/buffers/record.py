"""One call of a module recorded whole, and the update of its buffers found in several of them: see find.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.buffers.trace import (
    MAX,
    MEAN,
    MIN,
    SUM,
    Argument,
    BufferUpdate,
    Made,
    Number,
    Opaque,
    Setting,
    Statistic,
    View,
    name_of,
    storage,
    without_dropout,
    written,
)
from meshfit.data import tree
from meshfit.torch_private import tree_flatten, tree_leaves

EXTREMES = {"aten.amax": MAX, "aten.max": MAX, "aten.any": MAX, "aten.amin": MIN, "aten.min": MIN, "aten.all": MIN}
NEW = ("aten.new_", "aten.lift_fresh")
"""Operations that take no more of a tensor than its type and device; or a constant."""


class Uncombined(Exception):
    """Why buffers cannot be updated from parts of a batch."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An argument that is a tensor."""

    value: int


@dataclass(slots=True)
class _Op:
    func: Any
    leaves: list[Any]
    """Arguments; tensors as ``_Tensor``."""
    writes: list[int]
    outs: list[int]
    """Values, -1 for what is no tensor."""


@dataclass(slots=True)
class _Called:
    """A module that was not looked into has returned these."""

    outs: list[int]


class Record(Opaque):
    """``pure`` and ``samples``: memory that is known not to, or to, depend on samples. Results of the operations
    ``keep`` are kept, and what they were given."""

    def __init__(self, states: Mapping[str, Tensor], pure: set[int], samples: set[int], *, keep: set[int] | None):
        super().__init__()
        self.states = {storage(t): name for name, t in states.items()}
        self.pure, self.samples, self.keep = pure, samples, keep
        self.events: list[_Op | _Called] = []
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...] | None] = []
        self.kept: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}
        """By operation: its first result, and its arguments as they were."""
        self.tensors: list[Tensor] = list(states.values())  # held: else memory is used anew, and known as another
        self._others: list[Tensor] = []
        self._numbers: dict[int, int] = {id(t): i for i, t in enumerate(self.tensors)}
        self.external: set[int] = set(range(len(self.tensors)))
        """Values that no operation of the call made."""
        self.geometry = [_geometry(t) for t in self.tensors]
        self.storages = [storage(t) for t in self.tensors]
        self.finals: dict[str, Tensor] = {}
        self.final_values: dict[str, int] = {}
        self.outputs: list[int] = []

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        at, name = len(self.names), name_of(func)
        flat, _ = tree_flatten((args, kwargs))
        if name.startswith("c10d.") or name.startswith("_c10d_functional."):
            raise Uncombined("it talks to other ranks by itself")
        leaves = [_Tensor(self._value(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        writes = [self._value(t) for t in written(func, args, kwargs)]
        given = {}
        if self.keep is not None and at in self.keep:
            given = {i: leaf.detach().clone() for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
        out = without_dropout(name, func, args, kwargs)
        made = tree_leaves(out)
        outs = [self._value(t, made=True) if isinstance(t, Tensor) else -1 for t in made]
        self.events.append(_Op(func, leaves, writes, outs))
        self.names.append(name)
        first = made[0] if made and isinstance(made[0], Tensor) else None
        self.shapes.append(None if first is None else tuple(first.shape))
        if self.keep is not None and at in self.keep and first is not None:
            self.kept[at] = (first.detach().clone(), given)
        return out

    def same(self, tensor: Tensor, other: Tensor) -> None:
        self._numbers[id(other)] = self._value(tensor)
        self._others.append(other)

    def called(self, result: Any) -> None:
        self.events.append(_Called([self._value(t, made=True) for t in tree.tensors(result)]))

    def finish(self, states: Mapping[str, Tensor], outputs: Any) -> None:
        """``states`` as they are after the call."""
        for name, tensor in states.items():
            self.finals[name] = tensor.detach().clone()
            self.final_values[name] = self._value(tensor, known=True)
        self.outputs = [storage(t) for t in tree.tensors(outputs)]

    def _value(self, tensor: Tensor, *, known: bool = False, made: bool = False) -> int:
        number = self._numbers.get(id(tensor))
        if number is None and known:  # another name for it: a Parameter made of it, say
            alike = [i for i, s in enumerate(self.storages) if s == storage(tensor)]
            same = [i for i in alike if self.geometry[i] == _geometry(tensor)]
            if same:
                return same[-1]
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.storages.append(storage(tensor))
            self.geometry.append(_geometry(tensor))
            if not made:
                self.external.add(number)
        return number


def _geometry(tensor: Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


Group = tuple[Record, Sequence[Record], Sequence[int]]
"""A call on all samples, on parts of them, and the samples of each part."""


def update_of(groups: Sequence[Group], limit: float) -> BufferUpdate:
    """The update that all these calls make; ``Uncombined`` if there is none."""
    found = _Analysis(groups, limit)
    found.forward()
    update = found.sliced()
    found.check_outputs(update)
    return update


@dataclass
class _Analysis:
    groups: Sequence[Group]
    limit: float
    batch: set[int] = field(default_factory=set)
    """Memory that depends on samples, other than through statistics."""
    tainted: set[int] = field(default_factory=set)
    """Memory that depends on statistics."""
    statistics: dict[int, Statistic] = field(default_factory=dict)
    decides: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.whole = self.groups[0][0]
        every = [record for whole, parts, _ in self.groups for record in (whole, *parts)]
        self.every = every
        form = [_form(event) for event in self.whole.events]
        if any([_form(event) for event in other.events] != form for other in every):
            raise Uncombined("what it does depends on the samples")
        self.batch |= self.whole.samples
        for number in self.whole.external:
            at = self.whole.storages[number]
            if at not in self.whole.pure and at not in self.whole.states and at not in self.whole.samples:
                self.batch.add(at)

    def _storage(self, value: int) -> int:
        return self.whole.storages[value]

    def forward(self) -> None:
        """What depends on samples, and where that is summed up."""
        known = {self._storage(i) for i in self.whole.external}
        at = -1
        for event in self.whole.events:
            if isinstance(event, _Called):
                self.batch |= {self._storage(v) for v in event.outs}
                known |= {self._storage(v) for v in event.outs}
                continue
            at += 1
            name = self.whole.names[at]
            ins = [leaf.value for leaf in event.leaves if isinstance(leaf, _Tensor)]
            if name.startswith(NEW):
                ins = []
                self.batch -= {self._storage(v) for v in event.outs if v >= 0}
            fresh = [v for v in event.outs if v >= 0 and self._storage(v) not in known]
            known |= {self._storage(v) for v in event.outs if v >= 0}
            changed = {self._storage(v) for v in (*fresh, *event.writes)}
            if any(self._storage(v) in self.tainted for v in ins):
                self.tainted |= changed
                if "local_scalar_dense" in name:
                    self.decides.add(at)
            if not any(self._storage(v) in self.batch for v in ins):
                continue
            statistic = self._statistic(at, event, fresh)
            if statistic is None:
                self.batch |= changed
            else:
                self.statistics[at] = statistic
                self.tainted |= changed
                self.batch |= {self._storage(v) for v in fresh[1:]}

    def _statistic(self, at: int, op: _Op, fresh: list[int]) -> Statistic | None:
        """How the results for the parts make that for the whole, if they do."""
        if at not in self.whole.kept or any(at not in record.kept for record in self.every):
            return None
        name = self.whole.names[at]
        in_place = bool(op.writes)
        if in_place and (len(op.writes) > 1 or self._storage(op.writes[0]) in self.batch):
            return None
        if not in_place and (not fresh or fresh[0] != op.outs[0]):
            return None
        if not in_place:
            kind = self._kind(name, lambda record: record.kept[at][0])
            if kind is not None:
                return Statistic(kind)
        for place, leaf in enumerate(op.leaves):
            if not isinstance(leaf, _Tensor) or self._storage(leaf.value) in self.batch:
                continue
            if in_place and leaf.value != op.writes[0]:
                continue
            like = [(r.kept[at][0], r.kept[at][1][place]) for r in self.every]
            if any(a.shape != b.shape or a.dtype != b.dtype or a.dtype is torch.bool for a, b in like):
                continue
            kind = self._kind("", lambda record, place=place: record.kept[at][0] - record.kept[at][1][place])
            if kind is not None:
                return Statistic(kind, place, in_place)
        return None

    def _kind(self, name: str, result: Callable[[Record], Tensor]) -> str | None:
        extreme = EXTREMES.get(name.rpartition(".")[0])
        kinds = [extreme] if extreme else [SUM, MEAN]
        for whole, parts, sizes in self.groups:
            want, made = result(whole), [result(part) for part in parts]
            if want.dtype is torch.bool and not extreme:
                return None
            kinds = [kind for kind in kinds if kind and self._makes(kind, want, made, sizes)]
        if len(kinds) == 2:  # all zero: either is right; the operation tells which is meant
            kinds = [MEAN] if ".mean." in name else [SUM] if ".sum." in name else []
        return kinds[0] if kinds else None

    def _makes(self, kind: str, want: Tensor, parts: list[Tensor], sizes: Sequence[int]) -> bool:
        exact = not want.is_floating_point()
        if exact and kind == MEAN:
            return False
        got = combined(kind, parts, sizes)
        if exact or kind in (MAX, MIN):
            return torch.equal(got.to(want.dtype), want)
        scale = max((t.double().abs().amax().item() for t in (want, *parts) if t.numel()), default=0.0)
        return not want.numel() or (got.double() - want.double()).abs().amax().item() <= self.limit * scale

    def sliced(self) -> BufferUpdate:
        """The operations that follow the statistics and lead to the buffers."""
        whole, values, memory = self.whole, set(), set()
        results: dict[str, View | Made] = {}
        for name, value in whole.final_values.items():
            at = self._storage(value)
            if at in self.batch:
                raise Uncombined(f"{name} is neither a sum nor a mean over samples, nor made of such")
            values.add(value)
            memory.add(at)
            results[name] = self._where(value)  # type: ignore[assignment]
        steps: dict[int, tuple[Argument, ...]] = {}
        makes: dict[int, tuple[int, ...]] = {}
        at = len(whole.names)
        for event in reversed(whole.events):
            if isinstance(event, _Called):
                continue
            at -= 1
            if not (values & set(event.outs) or memory & {self._storage(v) for v in event.writes}):
                continue
            makes[at] = tuple(event.outs)
            statistic = self.statistics.get(at)
            if statistic is not None and statistic.base is None:
                continue
            if torch.Tag.nondeterministic_seeded in event.func.tags:
                raise Uncombined("random numbers are drawn for it")
            needed = [leaf.value for leaf in event.leaves if isinstance(leaf, _Tensor)]
            if statistic is not None:
                assert statistic.base is not None
                needed = [event.leaves[statistic.base].value]
            elif not whole.names[at].startswith(NEW):
                for value in needed:
                    if self._storage(value) in self.batch:
                        raise Uncombined(f"{whole.names[at]} takes samples that are neither summed nor averaged")
            values |= set(needed)
            memory |= {self._storage(v) for v in needed}
            steps[at] = self._arguments(at, event, statistic)
        statistics = {i: s for i, s in self.statistics.items() if i in makes}
        if statistics and self.decides:
            raise Uncombined("what it does depends on values that it has just written")
        return BufferUpdate(names=tuple(whole.names), steps=steps, makes=makes, statistics=statistics, results=results)

    def _where(self, value: int) -> Argument:
        at = self._storage(value)
        if value not in self.whole.external:
            return Made(value)
        if at in self.whole.states:
            _, size, stride, offset = self.whole.geometry[value]
            return View(self.whole.states[at], size, stride, offset)
        return Setting()

    def _arguments(self, at: int, op: _Op, statistic: Statistic | None) -> tuple[Argument, ...]:
        found: list[Argument] = []
        for place, leaf in enumerate(op.leaves):
            if statistic is not None and place != statistic.base:
                found.append(Setting())  # it is not made again
            elif isinstance(leaf, _Tensor):
                found.append(self._where(leaf.value))
            elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
                found.append(self._number(at, place))
            else:
                found.append(Setting())
        return tuple(found)

    def _number(self, at: int, place: int) -> Argument:
        counts = False
        for whole, parts, _ in self.groups:
            want, *made = (_ops(record)[at].leaves[place] for record in (whole, *parts))
            if all(one == want for one in made):
                continue
            if abs(sum(made) - want) > self.limit * abs(want):
                raise Uncombined(f"{self.whole.names[at]} takes a number that is no sum over samples ({want})")
            counts = True
        return Number() if counts else Setting()

    def check_outputs(self, update: BufferUpdate) -> None:
        """What the module returns must not be made of what it has just written."""
        if not update.exchanged:
            return
        flagged: set[int] = set()
        at, tainted = -1, set()
        for event in self.whole.events:
            if isinstance(event, _Called):
                continue
            at += 1
            ins = {self._storage(leaf.value) for leaf in event.leaves if isinstance(leaf, _Tensor)}
            outs = {self._storage(v) for v in (*event.outs, *event.writes) if v >= 0}
            changed = {self._storage(v) for v in event.writes} | (outs - ins)
            if at in update.statistics:
                tainted |= changed
            follows = at in update.steps and bool(ins & tainted or (event.writes and at in update.statistics))
            if follows or (ins & flagged and not self.whole.names[at].startswith(NEW)):
                flagged |= changed
        if flagged & set(self.whole.outputs):
            raise Uncombined("what it returns is computed from what it has just written")


def _ops(record: Record) -> list[_Op]:
    return [event for event in record.events if isinstance(event, _Op)]


def _form(event: _Op | _Called) -> Any:
    if isinstance(event, _Called):
        return tuple(event.outs)
    return tuple(leaf.value if isinstance(leaf, _Tensor) else None for leaf in event.leaves), tuple(event.outs)


def combined(kind: str, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if kind in (MAX, MIN):
        stacked = torch.stack([part.to(torch.uint8) if part.dtype is torch.bool else part for part in parts])
        return stacked.amax(0) if kind == MAX else stacked.amin(0)
    if kind == SUM:
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    weights = [size / sum(sizes) for size in sizes]
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
