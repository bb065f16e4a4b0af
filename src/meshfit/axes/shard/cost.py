"""What sharding costs on one rank: bytes held, gathers and scatters, from a trace. What ``Shards`` and ``Scatter`` do,
done with numbers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import torch

from meshfit.anatomy.trace import Event, Trace
from meshfit.axes.shard.units import Unit, entrance_of
from meshfit.comm.flat import part_of, starts_of
from meshfit.cost import CollectiveCall, Cost, tallied

if TYPE_CHECKING:
    from meshfit.axes.shard.axis import Shard

STEP_SCALARS = 4  # summed with the gradients: loss, count, stop, squared norm; then two slots a rank, one a parameter
LOOKUPS = ("Embedding", "EmbeddingBag", "embedding", "embedding_bag")
CUT = ("float", "bfloat", "complex")
"""Beginnings of the dtypes that are cut."""


@dataclass(frozen=True, slots=True)
class FlatCost:
    """Parameters of one kind, as one row cut over ranks."""

    sizes: dict[str, int]
    """Elements, by name."""
    trained: bool
    grad_dtype: torch.dtype
    itemsize: int
    gathered: int
    """Bytes of an element while gathered."""
    degree: int

    @property
    def part(self) -> int:
        return _part(tuple(self.sizes.values()), self.degree, self.itemsize)

    @property
    def bytes(self) -> int:
        """Of a rank's part."""
        return self.part * self.itemsize

    @property
    def whole(self) -> int:
        """Bytes of all of it, gathered."""
        return self.part * self.degree * self.gathered

    @property
    def gradients(self) -> int:
        """Bytes of all its gradients."""
        return self.grad_bytes * self.degree

    @property
    def grad_bytes(self) -> int:
        """Of the gradients of a rank's part."""
        return self.part * self.grad_dtype.itemsize

    def slices(self, rank: int) -> dict[str, tuple[int, int]]:
        """Of each parameter the elements that a rank owns: the first, and the one after the last."""
        starts, _ = starts_of(self.sizes.values(), self.itemsize)
        first, found = rank * self.part, {}
        for (name, size), start in zip(self.sizes.items(), starts, strict=True):
            low = min(max(first - start, 0), size)
            found[name] = low, max(low, min(first + self.part - start, size))
        return found


@lru_cache(maxsize=1 << 16)
def _part(sizes: tuple[int, ...], degree: int, itemsize: int) -> int:
    return part_of(starts_of(sizes, itemsize)[1], degree, itemsize)


def rows_of(trace: Trace, unit: Unit, degree: int, gathered: int | None) -> list[FlatCost]:
    """A unit's rows. ``gathered``: bytes of an element of what autocast would round."""
    kinds: dict[tuple[str, bool, int, frozenset[str], str], dict[str, int]] = {}
    for name in unit.parameters:
        p = trace.parameters[name]
        if not p.dtype.startswith(CUT):
            continue
        elements = prod(p.shape)
        size = p.bytes // max(1, elements)
        as_gathered = gathered if gathered and name in unit.rounded and p.dtype == "float32" else size
        kinds.setdefault((p.dtype, p.trained, as_gathered, unit.row(name), p.stepped or p.dtype), {})[name] = elements
    found = []
    for (dtype, trained, as_gathered, _, stepped), sizes in kinds.items():
        own = getattr(torch, dtype).itemsize
        found.append(FlatCost(sizes, trained, getattr(torch, stepped), own, as_gathered, degree))
    return found


def shard_cost(
    shard: "Shard", trace: Trace, *, copies: int, microbatches: int, ahead: bool, accumulate: bool
) -> tuple[Trace, Cost]:
    """See ``Shard.cost``."""
    units, degree, zero, host = shard.units, shard.degree, shard.zero, shard.home == "host"
    once = accumulate or (zero == 1 and microbatches > 1)
    rows = {unit: shard.rows(trace, unit) for unit in units}
    every = [row for many in rows.values() for row in many]
    uses = uses_of(trace, units)
    used = Counter(use.unit for use in uses if use.returns)
    fetched = Counter(units) if zero < 3 else gathers(trace, uses, microbatches)
    uncut = sum(p.bytes for p in trace.parameters.values() if not p.dtype.startswith(CUT))
    parts = {
        "weights": sum(row.bytes for row in every),
        "gradients": sum(row.grad_bytes for row in every if row.trained),
    }
    held = {"weights": uncut, "gradients": 0} if host else {**parts, "weights": parts["weights"] + uncut}
    if zero == 3:
        held["gathered"] = _most(units, {unit: sum(row.whole for row in rows[unit]) for unit in units}, ahead)
    else:  # a part that is gathered as it is lies within the whole
        within = [0 if host or row.gathered != row.itemsize else row.bytes for row in every]
        held["weights"] += sum(row.whole for row in every) - sum(within)
    # Whole gradients wait for later microbatches, or for further uses of their unit in this one.
    waiting = units if once else [unit for unit in units if used[unit] > 1 and (zero < 3 or unit.stays)]
    held["gradients"] += sum(row.gradients for unit in waiting for row in rows[unit] if row.trained)
    calls: list[CollectiveCall] = []
    for unit, many in rows.items():
        scatters = 1 if once else microbatches * (used[unit] if zero == 3 and not unit.stays else 1)
        calls += _scattered(many, scatters if degree > 1 else 0, degree, copies, once=once)
        gathered = {"ahead": ahead, "once": zero < 3}
        if degree > 1:
            calls += _gathered("all_gather", sum(row.whole for row in many), fetched[unit], degree, "shard", **gathered)
        if host:
            size = sum(row.bytes for row in many)
            calls += _gathered("host_to_device", size, fetched[unit], degree, "offload", **gathered)
    if host:
        size = parts["gradients"]
        calls.append(CollectiveCall("device_to_host", size, axis="offload", hidden="backward", once=True))
    if degree * copies > 1:
        size = 8 * (STEP_SCALARS + 2 * degree * copies + sum(len(row.sizes) for row in every if row.trained))
        how = {"axis": "step", "dtype": "float64", "phase": "step", "once": True}
        calls.append(CollectiveCall("all_reduce", size, degree * copies, **how))
    own = {name: stop for row in every for name, (_, stop) in row.slices(0).items()} if degree > 1 else {}
    cut = {
        name: replace(p, shape=(own[name],), bytes=p.bytes // max(1, prod(p.shape)) * own[name])
        for name, p in trace.parameters.items()
        if name in own
    }
    cost = Cost(held=held, host=parts if host else {}, collectives=tallied(call for call in calls if call.bytes))
    return replace(trace, parameters={**trace.parameters, **cut}), cost


def _scattered(rows: list[FlatCost], times: int, degree: int, copies: int, *, once: bool) -> Iterator[CollectiveCall]:
    """Of a unit's gradients, by dtype; ``once``: a step."""
    for dtype in dict.fromkeys(row.grad_dtype for row in rows):
        size = sum(row.gradients for row in rows if row.trained and row.grad_dtype == dtype)
        named = str(dtype).removeprefix("torch.")
        how = partial(CollectiveCall, dtype=named, phase="backward", hidden="backward")
        yield how("reduce_scatter", size, degree, count=times, axis="shard", once=once)
        if copies > 1:
            yield how("all_reduce", size // degree, copies, axis="data", once=True)


def _gathered(
    name: str, size: int, times: int, degree: int, axis: str, *, ahead: bool, once: bool
) -> Iterator[CollectiveCall]:
    """Of a unit's weights: in forward and, unless all are gathered ``once``, in backward."""
    back = 0 if once else times // 2
    for phase, count, lasts in (("forward", times - back, once), ("backward", back, False)):
        how = {"axis": axis, "phase": phase, "hidden": phase if ahead else "", "once": lasts}
        yield CollectiveCall(name, size, degree, count=count, **how)


@dataclass(slots=True)
class Use:
    """One opening of a unit in forward."""

    unit: Unit
    saved: bool = False
    """Whether autograd saves a weight of it there, and so backward needs it again."""
    returns: bool = False
    """Whether backward comes back from it: not from what runs without gradients."""


def uses_of(trace: Trace, units: tuple[Unit, ...]) -> list[Use]:
    """The units as a forward opens them, one after another; the whole's own first."""
    entered: dict[str, list[Unit]] = {}
    for unit in units:
        for path in unit.entrances if unit.parameters else ():
            entered.setdefault(path, []).append(unit)
    whole = [Use(unit) for unit in entered.pop("", [])]
    found, under_way, now, first = [*whole], [], "", ""
    for event in trace.events:
        path = entrance_of(event, entered)
        module = event.name if event.kind == "module" else ""
        if path and (path != now or module == first != ""):  # another module, or the same from its beginning
            under_way, first = [Use(unit) for unit in entered[path]], ""
            found += under_way
        now, first = path, first or module
        for use in (*under_way, *whole) if path else whole:
            use.saved |= _saves_weights(trace, event) and bool({*event.parameters} & {*use.unit.parameters})
            use.returns |= use in whole or any(trace.values[v].needs_grad for v in event.writes)
    return found


def gathers(trace: Trace, uses: list[Use], microbatches: int) -> Counter[Unit]:
    """How often each unit is gathered in a step with zero=3: see ``Shards._unshard``."""
    frozen = {use.unit for use in uses if any(not trace.parameters[name].trained for name in use.unit.parameters)}
    count: Counter[Unit] = Counter()
    here: set[Unit] = set()

    def fetch(unit: Unit, *, forward: bool) -> None:
        if unit not in here:
            count[unit] += 1
            here.intersection_update({u for u in here if u.entrances == ("",) or (u.stays and forward)})
            here.add(unit)

    for _ in range(microbatches):
        left = Counter(use.unit for use in uses)
        for use in uses:
            fetch(use.unit, forward=True)
        for use in reversed(uses):
            if use.saved and use.returns:
                fetch(use.unit, forward=False)
            left[use.unit] -= 1
            if left[use.unit] == 0 and use.unit not in frozen:
                here.discard(use.unit)
    return count


def _saves_weights(trace: Trace, event: Event) -> bool:
    """Whether autograd saves a weight: not where it is only looked up, or multiplies what needs no gradient."""
    kind = trace.kinds.get(event.name, event.name) if event.kind == "module" else event.name
    if kind in LOOKUPS:
        return False
    if any(trace.values[v].needs_grad for v in event.reads):
        return True
    names = {name.rpartition(".")[2] for name in event.parameters if trace.parameters[name].trained}
    return bool(names) and not (kind in ("Linear", "linear") and names <= {"weight", "bias"})


def _most(units: tuple[Unit, ...], wholes: dict[Unit, int], ahead: bool) -> int:
    """Bytes gathered at once: the whole's own, the one that stays, and the largest other unit (with the next one, where
    that is fetched ahead)."""
    always = sum(wholes[unit] for unit in units if unit.entrances == ("",) or unit.stays)
    others = [wholes[unit] for unit in units if unit.entrances != ("",) and not unit.stays]
    pairs = [a + b for a, b in pairwise(others)] if ahead else []
    return always + max([*others, *pairs], default=0)
