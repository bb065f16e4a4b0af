"""What sharding costs on one rank: bytes held, gathers and scatters, from a trace. What ``Shards`` and ``Scatter`` do,
done with numbers."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from meshfit.anatomy.trace import Event, Trace
from meshfit.cost import Cost
from meshfit.exchange.scatter import RIDERS
from meshfit.layout.units import Unit, entrance_of

LOOKUPS = ("Embedding", "EmbeddingBag", "embedding", "embedding_bag")
CUT = ("float", "bfloat", "complex")
"""Beginnings of the dtypes that are cut."""


@dataclass(frozen=True, slots=True)
class Row:
    """Parameters of one kind, as one row cut over ranks."""

    sizes: dict[str, int]
    """Elements, by name."""
    trained: bool
    itemsize: int
    gathered: int
    """Bytes of an element while gathered."""
    degree: int

    @property
    def part(self) -> int:
        return -(-sum(self.sizes.values()) // self.degree)

    @property
    def bytes(self) -> int:
        """Of a rank's part."""
        return self.part * self.itemsize

    @property
    def whole(self) -> int:
        """Bytes of all of it, gathered."""
        return self.part * self.degree * self.gathered

    def first_slices(self) -> dict[str, int]:
        """Elements of each parameter that the first rank owns."""
        left, found = self.part, {}
        for name, size in self.sizes.items():
            found[name], left = min(size, left), max(0, left - size)
        return found


def rows_of(trace: Trace, unit: Unit, degree: int, gathered: int | None) -> list[Row]:
    """A unit's rows. ``gathered``: bytes of an element of what autocast would round."""
    kinds: dict[tuple[str, bool, int], dict[str, int]] = {}
    for name in unit.parameters:
        p = trace.parameters[name]
        if not p.dtype.startswith(CUT):
            continue
        elements = _elements(p.shape)
        size = p.bytes // max(1, elements)
        as_gathered = gathered if gathered and name in unit.rounded and p.dtype == "float32" else size
        kinds.setdefault((p.dtype, p.trained, as_gathered), {})[name] = elements
    found = []
    for (_, trained, as_gathered), sizes in kinds.items():
        one = trace.parameters[next(iter(sizes))]
        itemsize = one.bytes // max(1, _elements(one.shape))
        found.append(Row(sizes, trained, itemsize, as_gathered, degree))
    return found


def shard_cost(
    trace: Trace,
    units: tuple[Unit, ...],
    *,
    degree: int,
    copies: int,
    zero: int,
    microbatches: int,
    gathered: int | None,
    ahead: bool,
    host: bool,
) -> tuple[Trace, Cost]:
    """See ``Shard.cost``."""
    rows = {unit: rows_of(trace, unit, degree, gathered) for unit in units}
    every = [row for many in rows.values() for row in many]
    wholes = {unit: sum(row.whole for row in many) for unit, many in rows.items()}
    uses = uses_of(trace, units)
    accumulate = zero == 1 and microbatches > 1
    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()

    def call(name: str, times: int, size: int) -> None:
        if times and size:
            calls[name] += times
            moved[name] += times * size

    fetched = Counter(units) if zero < 3 else gathers(trace, uses, microbatches)
    if degree > 1:
        for unit, times in fetched.items():
            for row in rows[unit]:
                call("all_gather", times, row.whole)
        used = Counter(use.unit for use in uses if use.returns)
        for unit, many in rows.items():
            for row in many:
                times = used[unit] if zero == 3 else 1
                times *= 1 if accumulate else microbatches
                call("reduce_scatter", times * row.trained, row.part * degree * row.itemsize)
    if copies > 1:
        for row in every:
            call("all_reduce", int(row.trained), row.bytes)
    if degree * copies > 1:
        parameters = sum(len(row.sizes) for row in every if row.trained)
        call("all_reduce", 1, 8 * (RIDERS + 2 * degree * copies + parameters))
    uncut = sum(p.bytes for p in trace.parameters.values() if not p.dtype.startswith(CUT))
    parts, gradients = sum(row.bytes for row in every), sum(row.bytes for row in every if row.trained)
    held = {"weights": parts, "gradients": gradients}
    if accumulate:
        held["gradients"] += gradients * degree
    elif zero < 3:  # what is used several times in a pass is summed whole before it is scattered
        again = {unit for unit, times in Counter(use.unit for use in uses if use.returns).items() if times > 1}
        held["gradients"] += sum(row.bytes * degree for unit in again for row in rows[unit] if row.trained)
    if zero == 3:
        held["gathered"] = _most(units, wholes, ahead)
    elif gathered or host:
        held["weights"] += sum(row.whole for row in every if host or row.gathered != row.itemsize)
        held["weights"] += sum(row.whole - row.bytes for row in every if not host and row.gathered == row.itemsize)
    else:
        held["weights"] = sum(row.whole for row in every)
    held["weights"] += uncut
    away: dict[str, int] = {}
    if host:
        away = {"weights": parts, "gradients": gradients}
        held["weights"] -= parts
        held["gradients"] -= gradients
        for unit, times in fetched.items():
            call("host_to_device", times, sum(row.bytes for row in rows[unit]))
        call("device_to_host", 1, gradients)
    slices = {name: n for row in every for name, n in row.first_slices().items()}
    cut = {
        name: replace(p, shape=(slices[name],), bytes=p.bytes // max(1, _elements(p.shape)) * slices[name])
        for name, p in trace.parameters.items()
        if name in slices
    }
    cost = Cost(held=held, host=away, calls=dict(calls), moved=dict(moved))
    return replace(trace, parameters={**trace.parameters, **(cut if degree > 1 else {})}), cost


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
    """How often each unit is gathered in a step with zero=3: see ``Shards._fetch``."""
    frozen = {use.unit for use in uses if any(not trace.parameters[name].trained for name in use.unit.parameters)}
    count: Counter[Unit] = Counter()
    here: set[Unit] = set()

    def fetch(unit: Unit) -> None:
        if unit not in here:
            count[unit] += 1
            here.intersection_update({other for other in here if other.entrances == ("",)})
            here.add(unit)

    for _ in range(microbatches):
        left = Counter(use.unit for use in uses)
        for use in uses:
            fetch(use.unit)
        for use in reversed(uses):
            if use.saved and use.returns:
                fetch(use.unit)
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
    """Bytes gathered at once: the whole's own, and the largest other unit (with the next one, where that is fetched
    ahead)."""
    always = sum(wholes[unit] for unit in units if unit.entrances == ("",))
    others = [wholes[unit] for unit in units if unit.entrances != ("",)]
    pairs = [a + b for a, b in pairwise(others)] if ahead else []
    return always + max([*others, *pairs], default=0)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
