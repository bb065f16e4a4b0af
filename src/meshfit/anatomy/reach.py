"""How far one device's share of a parameter reaches, as a value; and the same for a parameter that is followed by the
same operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from meshfit.anatomy.aten import Op, StridedView
from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.shares import coarser, same_owners


class Mixed(Exception):
    """No pair: why not, in words with a place for each of ``names``."""

    def __init__(self, words: str, *names: str):
        super().__init__(words, *names)
        self.words, self.names = words, names

    def __str__(self) -> str:
        return self.words.format(*self.names)

    def about(self, names: Mapping[str, str]) -> "Mixed":
        """The same about other parameters."""
        return Mixed(self.words, *(names[name] for name in self.names))


class Conflict(Mixed):
    """Members that each reach a row, but would cut it differently."""


@dataclass(frozen=True, eq=False, slots=True)
class RowProduct:
    """An operation that sums over shared-out channels."""

    op: int
    weight: str
    owners: Tensor
    """The rank of each input channel; -1 where no noise came, -2 if the channel is zero throughout."""

    dim: int
    """Of the weight."""

    index: Tensor
    """The index in that dim, for each input channel."""

    shares: int
    """How many ranks there are among the owners."""


@dataclass(eq=False)
class Reach:
    """How far shares stay apart, from one parameter on."""

    rows: list[RowProduct] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    """Operations that read something shared out, in order, rows among them."""

    shared: set[int] = field(default_factory=set)
    """Values shared out, or computed from such without any change."""

    own: list[int] = field(default_factory=list)
    """Other values from outside of which each rank reads a share of its own."""

    common: list[tuple[int, int]] = field(default_factory=list)
    """(operation, value) from outside that all ranks read alike."""

    behind: list[int] = field(default_factory=list)
    """Operations that copy such a value for each rank, last first."""

    along: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Parameters and buffers of which each rank reads or writes a share of its own: dim, and the rank of each index."""

    column: bool = False
    """The parameter is a matrix that meets inputs, not a vector or table that meets what is shared out."""

    sizes: tuple[int, ...] = ()
    """Blocks of channels that were each cut in equal parts."""

    shares: int = 0
    """Into how many parts: fewer than there are ranks if several have to hold the same one."""

    first: "Reach | None" = None
    """The reach that this one is a copy of, for another parameter."""


@dataclass(eq=False)
class Walk:
    """All that was tried from one parameter on."""

    name: str
    ops: list[int]
    reaches: dict[int, Reach]
    why: dict[int, Mixed]
    """Both by dim."""


def agreeing(one: Reach, two: Reach) -> bool:
    rows = {row.op: row for row in one.rows}
    return all(alike(rows[row.op], row) for row in two.rows if row.op in rows)


def alike(one: RowProduct, two: RowProduct) -> bool:
    """Whether two see the same owners, as far as both can tell them apart."""
    shares = min(one.shares, two.shares)
    return same_owners(coarser(one.owners, one.shares // shares), coarser(two.owners, two.shares // shares))


def closure_of(
    start: tuple[str, int],
    reaches: Mapping[tuple[str, int], Reach],
    by_row: Mapping[str, list[tuple[str, int]]],
) -> dict[tuple[str, int], Reach]:
    """All that reach the rows that they reach, in the order of ``reaches``."""
    found, todo = {start}, [start]
    while todo:
        for row in reaches[todo.pop()].rows:
            new = [key for key in by_row[row.weight] if key not in found]
            found.update(new)
            todo += new
    return {key: reach for key, reach in reaches.items() if key in found}


def copied_walk(trace: AtenTrace, first: Walk, name: str) -> Walk | None:
    """The walk ``first`` for ``name``, if the same operations follow it: compared one by one, nothing is run."""
    values = {trace.value_of[first.name]: trace.value_of[name]}
    ops: dict[int, int] = {}
    reached = {value for reach in first.reaches.values() for value in reach.shared} | set(values)
    inside = reached | {value for i in first.ops for value in trace.ops[i].made}
    for index in first.ops:
        op = trace.ops[index]
        known = next((w.value for w in op.reads if w.value in values and w.value in inside), None)
        if known is None:
            return None
        there = trace.users.get(values[known], [])
        place = trace.users[known].index(index)
        if place >= len(there):
            return None
        other = trace.ops[there[place]]
        if not _alike(trace, op, other, values):
            return None
        ops[index] = other.index
        values |= zip(trace.ops[index].made, other.made, strict=True)
    for index in (i for reach in first.reaches.values() for i in reach.behind):
        other = trace.maker.get(values[trace.ops[index].made[0]], -1)
        if other < 0 or not _alike(trace, trace.ops[index], trace.ops[other], values):
            return None
        ops[index] = other
    uses = lambda value: (len(trace.users.get(value, ())), value in trace.outputs)
    if any(old in inside and uses(old) != uses(new) for old, new in values.items()):
        return None
    if any(value not in values for value in reached):
        return None
    weights = {trace.names[old]: trace.names[new] for old, new in values.items() if old in trace.names}
    sources = {trace.source[old]: trace.source[new] for old, new in values.items() if old in trace.source}
    weights = sources | weights

    def moved(reach: Reach) -> Reach:
        return replace(
            reach,
            rows=[replace(row, op=ops[row.op], weight=weights[row.weight]) for row in reach.rows],
            ops=[ops[i] for i in reach.ops],
            shared={values[value] for value in reach.shared},
            own=[values[value] for value in reach.own],
            behind=[ops[i] for i in reach.behind],
            common=[(ops[i], values[value]) for i, value in reach.common],
            along={weights[other]: found for other, found in reach.along.items()},
            first=reach.first or reach,
        )

    reaches = {dim: moved(reach) for dim, reach in first.reaches.items()}
    why = {dim: mixed.about(weights) for dim, mixed in first.why.items()}
    return Walk(name, [ops[i] for i in first.ops], reaches, why)


def _alike(trace: AtenTrace, one: Op, two: Op, values: dict[int, int]) -> bool:
    """Whether two operations are the same on corresponding values; those first met are added to ``values``."""
    if one.func is not two.func or len(one.leaves) != len(two.leaves) or one.spec != two.spec:
        return False
    for a, b in zip(one.leaves, two.leaves, strict=True):
        if isinstance(a, StridedView) and isinstance(b, StridedView):
            if a.geometry != b.geometry or values.setdefault(a.value, b.value) != b.value:
                return False
            for kind in (trace.constant, trace.trained, trace.fed, trace.source, trace.names):
                if (a.value in kind) != (b.value in kind):
                    return False
        elif type(a) is not type(b) or (a != b and not isinstance(a, float)):
            return False
    return len(one.made) == len(two.made)
