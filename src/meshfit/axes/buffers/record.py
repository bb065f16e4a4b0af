"""One call of a module recorded whole, and the update of its buffers found in several of them: see find.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfit.anatomy.aten import SHAPED, Op, OpTrace, StridedView
from meshfit.axes.buffers.trace import (
    MAX,
    MEAN,
    MIN,
    SAME,
    SUM,
    Argument,
    BufferUpdate,
    Number,
    Opaque,
    Setting,
    Statistic,
    UpdateStep,
    name_of,
    without_dropout,
)
from meshfit.data import tree

EXTREMES = {"aten.amax": MAX, "aten.max": MAX, "aten.any": MAX, "aten.amin": MIN, "aten.min": MIN, "aten.all": MIN}


class Uncombined(Exception):
    """Why buffers cannot be updated from parts of a batch."""


class Record(Opaque, OpTrace):
    """The operations of one call. ``pure``: tensors known not to depend on samples."""

    def __init__(self, states: Mapping[str, Tensor], pure: Sequence[Tensor]):
        super().__init__()
        self.states = {name: self.view(t).value for name, t in states.items()}
        self.pure = {*self.states.values(), *(self.view(t).value for t in pure)}
        self.names: list[str] = []
        """Of all operations, views too."""
        self.places: list[int] = []
        """By operation that is no view: its place among those."""
        self.finals: dict[str, StridedView] = {}
        self.outputs: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if not self.looks:
            return func(*args, **(kwargs or {}))
        name, before = name_of(func), len(self.ops)
        if name.startswith(("c10d.", "_c10d_functional.")):
            raise Uncombined("it talks to other ranks by itself")
        if name not in SAME:
            self.names.append(name)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.ops) > before:
            self.places.append(len(self.names) - 1)
        if name.startswith("aten.lift_fresh"):  # a constant of the code
            self.pure.add(self.view(out).value)
        return out

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return without_dropout(name_of(func), func, args, kwargs)

    def called(self, result: Any) -> None:
        for tensor in tree.tensors(result):
            self.new_value(tensor.untyped_storage(), self.view(tensor).geometry)

    def finish(self, states: Mapping[str, Tensor], outputs: Any) -> None:
        """``states`` as they are after the call."""
        self.finals = {name: self.view(tensor) for name, tensor in states.items()}
        self.outputs = {self.view(t).value for t in tree.tensors(outputs)}

    def content(self, view: StridedView) -> Tensor:
        return view.on(self.contents[view.value])

    def final_states(self) -> dict[str, Tensor]:
        return {name: self.content(view).detach() for name, view in self.finals.items()}

    @property
    def form(self) -> Any:
        """What two calls have in common that differ in their samples alone."""
        value = lambda leaf: leaf.value if isinstance(leaf, StridedView) else None
        return self.names, [([*map(value, op.leaves)], [*map(value, op.outs)], op.written) for op in self.ops]


Case = tuple[Record, Sequence[Record], Sequence[int]]
"""A call on all samples, on parts of them, and the samples of each part."""


def update_of(cases: Sequence[Case], limit: float) -> BufferUpdate:
    """The update that all these calls make; ``Uncombined`` if there is none."""
    found = _Analysis(cases, limit)
    found.forward()
    update = found.sliced()
    found.check_outputs(update)
    return update


class _Analysis:
    def __init__(self, cases: Sequence[Case], limit: float):
        self.cases, self.limit, self.whole = cases, limit, cases[0][0]
        self.every = [record for whole, parts, _ in cases for record in (whole, *parts)]
        form = self.whole.form
        if any(other.form != form for other in self.every):
            raise Uncombined("what it does depends on the samples")
        known = self.whole.pure | self.whole.maker.keys()
        self.batch = {value for value in self.whole.contents if value not in known}
        """Values that depend on samples, other than through statistics."""
        self.statistics: dict[int, Statistic] = {}
        self.decides = False
        """Whether Python looks at a value that depends on statistics."""

    def forward(self) -> None:
        """What depends on samples, and where that is summed up."""
        tainted: set[int] = set()  # depends on statistics
        for op in self.whole.ops:
            reads = set() if op.name in SHAPED else {view.value for view in op.reads}
            if reads & tainted:
                tainted.update(op.made)
                self.decides |= op.name == "_local_scalar_dense"
            if not reads & self.batch:
                continue
            statistic = self._statistic(op)
            if statistic is None:
                self.batch.update(op.made)
            else:
                self.statistics[op.index] = statistic
                tainted.update(op.made)
                self.batch.update(op.made[1:])

    def _statistic(self, op: Op) -> Statistic | None:
        """How the results for the parts make that for the whole, if they do."""
        if not op.made or not isinstance(op.outs[0], StridedView) or op.made[0] != op.outs[0].value:
            return None
        if len({record.ops[op.index].outs[0].size for record in self.every}) > 1:
            return None
        if len(op.written) > 1 or any(value in self.batch for value in op.written):
            return None

        def result(record: Record) -> Tensor:
            return record.content(record.ops[op.index].outs[0])

        if not op.written:
            kind = self._kind(self.whole.names[self.whole.places[op.index]], result)
            if kind is not None:
                return Statistic(kind)
        for place, leaf in enumerate(op.leaves):
            if not isinstance(leaf, StridedView) or leaf.value in self.batch:
                continue
            if op.written and leaf.value not in op.written:
                continue

            def base(record: Record, place: int = place) -> Tensor:
                return record.content(record.ops[op.index].leaves[place])

            like = [(result(r), base(r)) for r in self.every]
            if any(a.shape != b.shape or a.dtype != b.dtype or a.dtype is torch.bool for a, b in like):
                continue
            kind = self._kind("", lambda record, base=base: result(record) - base(record))
            if kind is not None:
                return Statistic(kind, place, bool(op.written))
        return None

    def _kind(self, name: str, result: Callable[[Record], Tensor]) -> str | None:
        extreme = EXTREMES.get(name.rpartition(".")[0])
        kinds = [extreme] if extreme else [SUM, MEAN]
        for whole, parts, sizes in self.cases:
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
        whole, needed = self.whole, set()
        for name, view in whole.finals.items():
            if view.value in self.batch or (view.value not in whole.maker and view.value not in whole.states.values()):
                raise Uncombined(f"{name} is neither a sum nor a mean over samples, nor made of such")
            needed.add(view.value)
        steps: dict[int, UpdateStep] = {}
        statistics: dict[int, Statistic] = {}
        for op in reversed(whole.ops):
            if not needed & set(op.made):
                continue
            at, statistic = whole.places[op.index], self.statistics.get(op.index)
            arguments: tuple[Argument, ...] = ()
            if statistic is not None:
                statistics[at] = statistic
            if statistic is None or statistic.base is not None:
                if op.draws:
                    raise Uncombined("random numbers are drawn for it")
                base = None if statistic is None else statistic.base
                arguments = tuple(
                    self._argument(op, place) if base in (None, place) else Setting() for place in range(len(op.leaves))
                )
            needed |= {where.value for where in arguments if isinstance(where, StridedView)}
            outs = tuple(out if isinstance(out, StridedView) else None for out in op.outs)
            steps[at] = UpdateStep(arguments, outs, op.written)
        if statistics and self.decides:
            raise Uncombined("what it does depends on values that it has just written")
        return BufferUpdate(
            names=tuple(whole.names), steps=steps, statistics=statistics, states=whole.states, results=whole.finals
        )

    def _argument(self, op: Op, place: int) -> Argument:
        leaf, whole = op.leaves[place], self.whole
        if isinstance(leaf, StridedView) and op.name not in SHAPED:
            if leaf.value in self.batch:
                name = whole.names[whole.places[op.index]]
                raise Uncombined(f"{name} takes samples that are neither summed nor averaged")
            return leaf if leaf.value in whole.maker or leaf.value in whole.states.values() else Setting()
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            return self._number(op, place)
        return Setting()

    def _number(self, op: Op, place: int) -> Argument:
        counts = False
        for whole, parts, _ in self.cases:
            want, *made = (record.ops[op.index].leaves[place] for record in (whole, *parts))
            if all(one == want for one in made):
                continue
            if abs(sum(made) - want) > self.limit * abs(want):
                name = self.whole.names[self.whole.places[op.index]]
                raise Uncombined(f"{name} takes a number that is no sum over samples ({want})")
            counts = True
        return Number() if counts else Setting()

    def check_outputs(self, update: BufferUpdate) -> None:
        """What the module returns must not be made of what it has just written."""
        if not update.exchanged:
            return
        flagged: set[int] = set()
        tainted: set[int] = set()
        for op in self.whole.ops:
            at, reads = self.whole.places[op.index], {view.value for view in op.reads}
            if at in update.statistics:
                tainted.update(op.made)
            follows = at in update.steps and bool(reads & tainted or (op.written and at in update.statistics))
            if follows or (reads & flagged and op.name not in SHAPED):
                flagged.update(op.made)
        if flagged & self.whole.outputs:
            raise Uncombined("what it returns is computed from what it has just written")


def combined(kind: str, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if kind in (MAX, MIN):
        stacked = torch.stack([part.to(torch.uint8) if part.dtype is torch.bool else part for part in parts])
        return stacked.amax(0) if kind == MAX else stacked.amin(0)
    if kind == SUM:
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    weights = [size / sum(sizes) for size in sizes]
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
