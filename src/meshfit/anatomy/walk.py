"""How far one device's share of a parameter reaches: the noise behind ``pairs``.

Noise is put on one share of a parameter's channels at a time, and what depends on it is computed again, operation by
operation. While no element changes for two devices, the tensors stay shared out. A walk ends at the operations that
mix the shares: rows, where they are products with another parameter, else a reason why there is no pair.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshfit.anatomy.aten import Op, Storage, StridedView, real
from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.shares import (
    Noise,
    coarser,
    cut_into,
    divisors,
    factors_of,
    in_common,
    is_blunt,
    overlapping,
    owners_of,
    same_owners,
    uses_of,
)
from meshfit.torch_private import tree_leaves, tree_unflatten

LONGEST_WALK = 1500
"""Operations after which a parameter is given up."""

COPIES = ("clone", "_to_copy", "repeat", "index_select")
"""Operations that return elements of their input as they are, some more than once."""


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


class Walker:
    """Walks from every parameter of a recorded forward, for ``degree`` devices."""

    def __init__(self, trace: AtenTrace, degree: int, copies: bool = False):
        self.trace, self.degree, self.copies = trace, degree, copies
        self.why: dict[str, dict[int, Mixed]] = {}
        self.reached: dict[str, bool] = {}
        self.added: dict[str, set[str]] = {}
        """What a row reads beside its weight: its bias."""

        self.places: dict[tuple[StridedView, int], tuple[int, Tensor] | None] = {}
        self.limits: dict[tuple[int, int], int] = {}
        self.proven: set[tuple[int, ...]] = set()

    # From one parameter on

    def walks(self) -> list[Walk]:
        walks: list[Walk] = []
        alike: dict[tuple, list[Walk]] = {}
        for name, value in self.trace.value_of.items():
            window = self.trace.whole[value]
            if not window.dtype.is_floating_point or not self.trace.users.get(value):
                continue
            firsts = alike.setdefault((window.geometry, len(self.trace.users[value])), [])
            copies = (self._copied(first, name) for first in firsts[-8:])
            walk = next((walk for walk in copies if walk is not None), None)
            if walk is None:
                walk = self._walk(name, window)
                firsts.append(walk)
            walks.append(walk)
            self.why[name], self.reached[name] = walk.why, bool(walk.reaches)
        return walks

    def _walk(self, name: str, window: StridedView) -> Walk:
        ops: set[int] = set()
        reaches, why = {}, {}
        other = self._not_channels(name)
        for dim, size in enumerate(window.size):
            for shares, sizes in self._blocks(size) if dim not in other else ():
                reach = Reach(sizes=sizes, shares=shares)
                try:
                    self._spread({name: (dim, cut_into(sizes, shares))}, reach)
                    reaches[dim] = reach
                    break
                except Mixed as mixed:
                    why.setdefault(dim, mixed)
                finally:
                    ops.update(reach.ops)
        return Walk(name, sorted(ops), reaches, why)

    def again(self, name: str, dim: int, sizes: tuple[int, ...], shares: int) -> Reach | None:
        """The reach of a parameter that is cut in so many parts."""
        reach = Reach(sizes=sizes, shares=shares)
        try:
            self._spread({name: (dim, cut_into(sizes, shares))}, reach)
        except Mixed:
            return None
        return reach

    def _not_channels(self, name: str) -> tuple[int, ...]:
        """Dims that are no output channels: what the first product sums over, kernels, entries of a look-up table."""
        trace = self.trace
        op = trace.ops[trace.users[trace.value_of[name]][0]]
        if op.name == "embedding":
            return (0,)
        factors = factors_of(op) or ()
        window, dim = next(((w, d) for w, d in factors if w.value == trace.value_of[name]), (None, 0))
        if window is None or not any(w.value in trace.fed for w, _ in factors):
            return ()
        place = self._place(name, window, dim)
        kernel = range(2, len(window.size)) if op.name == "convolution" else ()
        return (*kernel, place[0]) if place else ()

    def _blocks(self, size: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Ways to see a dim as fused blocks, each to be cut in equal parts: in as many as there are ranks, or in fewer,
        which several ranks hold alike."""
        fewer = [n for n in reversed(divisors(self.degree)) if 1 < n < self.degree] if self.copies else []
        for shares in (self.degree, *fewer):
            for count in (1, 3, 2):
                if size and size % (count * shares) == 0:
                    yield shares, (size // count,) * count
            for sizes in self.trace.splits:
                if sum(sizes) == size and all(s % shares == 0 for s in sizes):
                    yield shares, sizes

    def _spread(self, cuts: Mapping[str, tuple[int, Sequence[Tensor]]], reach: Reach) -> None:
        """Follow noise on each rank's share of the parameters in ``cuts`` until it mixes, and fill in ``reach``."""
        trace = self.trace
        ranks = len(next(iter(cuts.values()))[1])
        noise = {trace.value_of[name]: Noise(trace, name, dim, shares) for name, (dim, shares) in cuts.items()}
        live: dict[int, list[Storage]] = {value: [] for value in noise}
        masks: dict[int, list[Tensor]] = {}
        reach.shared |= set(live)
        blind: set[int] = set()
        todo = sorted({i for value in live for i in trace.users.get(value, ())})
        seen = set(todo)
        while todo:
            op = trace.ops[heapq.heappop(todo)]
            reach.ops.append(op.index)
            if len(reach.ops) > LONGEST_WALK:
                raise Mixed("reaches too far")
            if any(window.value in blind for window in op.reads):
                raise Mixed(f"decides {op.name} by an index")
            reads = {window.value for window in op.reads if window.value in live}
            results = []
            for rank in range(ranks):
                made = self._replayed(op, rank, {value: live[value] for value in reads}, noise)
                if made is None:
                    raise Mixed(f"changes the shape that {op.name} returns")
                results.append(made)
            changed = {v: [trace.differs(v, made[v]) for made in results] for v in op.made}
            used = [v for v in changed if trace.users.get(v) or v in trace.outputs]
            if any(overlapping(changed[v]) for v in used):
                reach.rows.append(self._row(op, live, masks))
                continue
            for value in changed:
                reach.shared.add(value)
                if is_blunt(trace, op, value, reads):
                    blind.add(value)
                elif any(bool(mask.any()) for mask in changed[value]):
                    if value in trace.outputs:
                        raise Mixed("reaches the output")
                    live[value] = [made[value] for made in results]
                    masks[value] = changed[value]
                else:
                    continue
                for user in trace.users.get(value, ()):
                    if user not in seen:
                        seen.add(user)
                        heapq.heappush(todo, user)
        if not reach.rows:
            raise Mixed("ends in no row, or has no effect on this batch")
        self._meet(reach, live, masks)

    def _replayed(
        self, op: Op, rank: int, live: Mapping[int, list[Storage]], noise: Mapping[int, Noise]
    ) -> dict[int, Storage] | None:
        put = [noise[value] for value in live if value in noise]
        changed = {value: each[rank] for value, each in live.items() if value not in noise}
        try:
            changed |= {value: noise[value].put(rank) for value in live if value in noise}
            return self.trace.replay(op, changed)
        finally:
            for each in put:
                each.take(rank)

    def _row(self, op: Op, live: Mapping[int, Any], masks: Mapping[int, list[Tensor]]) -> RowProduct:
        """The row that ``op`` is, if it is one."""
        trace = self.trace
        factors = factors_of(op)
        read = sorted({trace.source[w.value] for w in op.reads if w.value in trace.source and w.value not in live})
        by = f"mixed by {op.name}" + (" with " + ", ".join("{}" for _ in read) if read else "")
        mixed = Mixed(by, *read)
        if factors is None:
            raise mixed
        if factors[0][0].value in live:
            (inner, inner_dim), (outer, outer_dim) = factors
        else:
            (outer, outer_dim), (inner, inner_dim) = factors
        if outer.value in live or inner.value not in masks or outer.value not in trace.source:
            raise mixed
        if any(w.value in live for w in op.reads if w is not inner):
            raise mixed
        channels = [trace.through(inner, mask).movedim(inner_dim, 0).flatten(1).any(1) for mask in masks[inner.value]]
        if overlapping(channels) or not all(bool(channel.any()) for channel in channels):
            raise Mixed(f"{by}, whose input channels are not shared out", *read)
        zero = inner.on(trace.contents[inner.value]).movedim(inner_dim, 0).flatten(1).eq(0).all(1)
        owners = torch.where(zero, -2, -1)
        for rank, channel in enumerate(channels):
            owners[channel] = rank
        weight = trace.source[outer.value]
        place = self._place(weight, outer, outer_dim)
        if place is None:
            raise Mixed("meets {}, which is rearranged before use", weight)
        return RowProduct(op.index, weight, owners, *place, len(channels))

    def _place(self, name: str, window: StridedView, dim: int) -> tuple[int, Tensor] | None:
        """Which dim of a parameter ``dim`` of a window on it is, and the index there of each place here."""
        key = window, dim
        if key not in self.places:
            self.places[key] = None
            for own in range(len(self.trace.whole[self.trace.value_of[name]].size)):
                numbers = window.on(self._numbered(name, own, window.value)).movedim(dim, 0)
                numbers = numbers.reshape(len(numbers), -1)
                if bool((numbers == numbers[:, :1]).all()) and bool((numbers[0] != numbers[-1]).any()):
                    self.places[key] = own, numbers[:, 0].long()
                    break
        return self.places[key]

    def _numbered(self, name: str, dim: int, value: int) -> Storage:
        """``value``, which holds a parameter, with every element replaced by its index in ``dim`` of that parameter."""
        trace = self.trace
        whole = trace.whole[value]
        if value == trace.value_of[name]:
            storage = trace.contents[value].clone()
            shape = [1] * len(whole.size)
            shape[dim] = -1
            whole.on(storage).copy_(torch.arange(whole.size[dim]).view(shape).expand(whole.size))
            return storage
        op = trace.ops[trace.maker[value]]
        before = next(op.reads).value
        made = trace.replay(op, {before: self._numbered(name, dim, before)})
        assert made is not None
        return made[value]

    def _meet(self, reach: Reach, live: Mapping[int, list[Storage]], masks: Mapping[int, list[Tensor]]) -> None:
        """What the shares meet on their way, from outside."""
        trace = self.trace
        rows = {row.op for row in reach.rows}
        for index in reach.ops:
            op = trace.ops[index]
            if index in rows or not any(value in live for value in trace.ops[index].made):
                continue
            factors = factors_of(op)
            if factors and sum(window.value in live for window, _ in factors) == 1:
                inside, outside = (w for w, _ in sorted(factors, key=lambda f: f[0].value not in live))
                reach.column |= inside.value not in trace.fed and outside.value in trace.fed
            reach.column |= op.name == "embedding" and any(w.value in trace.fed for w in op.reads)
            for value, new in op.written.items():
                if value in trace.names and new in masks:
                    self._along(reach, value, masks[new])
            outside = {w.value: None for w in op.reads if w.value not in op.written and real(w.dtype)}
            outside = [value for value in outside if value not in reach.shared]
            whole = self._read_by_all(op, live)
            if whole in outside:
                reach.common.append((index, whole))
                outside.remove(whole)
            for value, supports in zip(outside, self._supports(op, outside, masks), strict=True):
                self._from_outside(reach, index, value, supports)

    def _read_by_all(self, op: Op, live: Mapping[int, Any]) -> int | None:
        """What a plain product multiplies with a parameter that is cut by its output channels."""
        factors = factors_of(op) if op.name in ("mm", "addmm") else None
        if factors is None:
            return None
        inside, outside = (w.value for w, _ in sorted(factors, key=lambda f: f[0].value not in live))
        return outside if inside in live and inside in self.trace.source and outside not in live else None

    def _from_outside(self, reach: Reach, op: int, value: int, supports: list[Tensor]) -> None:
        """Sort a value from outside by what each rank reads of it."""
        read = [support for support in supports if bool(support.any())]
        if len(read) < 2:
            return  # to no effect
        if in_common(read):
            reach.common.append((op, value))
        elif value in self.trace.names:
            self._along(reach, value, supports)
        elif not self._copies(reach, value, supports):
            reach.own.append(value)

    def _copies(self, reach: Reach, value: int, supports: list[Tensor]) -> bool:
        """Whether each rank's share of ``value`` is a copy of something that all ranks read alike."""
        trace = self.trace
        if value not in trace.maker or len(reach.behind) > 50:
            return False
        maker = trace.ops[trace.maker[value]]
        before = [w.value for w in maker.reads if w.value in trace.trained]
        before = list(dict.fromkeys(before or [w.value for w in maker.reads if real(w.dtype)]))
        if not before or maker.written or any(read in trace.source for read in before):
            return False
        reach.behind.append(maker.index)
        for read, shares in zip(before, self._supports(maker, before, {value: supports}), strict=True):
            if not in_common(shares):
                if not self._copies(reach, read, shares):
                    return False
            elif maker.name in COPIES:
                reach.common.append((maker.index, read))
            else:
                return False
        return True

    def _along(self, reach: Reach, value: int, shares: list[Tensor]) -> None:
        """Note a parameter or buffer that is cut along, from what each rank reads or writes of it."""
        name = self.trace.names[value]
        found = owners_of(self.trace.through(self.trace.whole[value], share) for share in shares)
        if found is None:
            raise Mixed("meets {}, of which devices read parts that are no cut", name)
        dim, owners = reach.along.get(name, found)
        if dim != found[0] or not same_owners(owners, found[1]):
            raise Mixed("meets {}, which would be cut in two ways", name)
        reach.along[name] = dim, torch.maximum(owners, found[1])

    def _supports(self, op: Op, values: list[int], masks: Mapping[int, list[Tensor]]) -> list[list[Tensor]]:
        """For each of ``values``, what each rank reads of it: where the gradient of the rank's outputs is not zero."""
        if not values:
            return []
        trace = self.trace
        leaves = {value: trace.elements(value).clone().requires_grad_() for value in values}

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, StridedView):
                return leaf
            if leaf.value in leaves:
                return leaf.over(leaves[leaf.value])
            held = trace.contents[leaf.value]
            return leaf.on(held.clone() if leaf.value in op.written else held)

        ranks = len(next(iter(masks.values())))
        found: list[list[Tensor]] = [[] for _ in values]
        random = torch.Generator().manual_seed(2)  # a plain sum would not see through a softmax
        try:
            with torch.enable_grad():
                args, kwargs = tree_unflatten([tensor(leaf) for leaf in op.leaves], op.spec)
                results = zip(op.outs, tree_leaves(op.func(*args, **kwargs)), strict=True)
                outs = [
                    (w, t) for w, t in results if isinstance(w, StridedView) and w.value in masks and t.requires_grad
                ]
                outs = [(w, t * (torch.rand(t.shape, dtype=torch.float64, generator=random) + 0.5)) for w, t in outs]
                for rank in range(ranks):
                    total = sum((t * trace.through(w, masks[w.value][rank])).sum() for w, t in outs)
                    grads: Sequence[Tensor | None] = [None] * len(values)
                    if isinstance(total, Tensor):
                        grads = torch.autograd.grad(total, [*leaves.values()], retain_graph=True, allow_unused=True)
                    for supports, leaf, grad in zip(found, leaves.values(), grads, strict=True):
                        supports.append(torch.zeros_like(leaf, dtype=torch.bool) if grad is None else grad != 0)
        except RuntimeError:
            raise Mixed(f"meets {op.name}, which has no derivative") from None
        return found

    # The same from another parameter on

    def _copied(self, first: Walk, name: str) -> Walk | None:
        """The walk ``first`` for ``name``, if the same operations follow it: compared one by one, nothing is run."""
        trace = self.trace
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
            if not self._alike(op, other, values):
                return None
            ops[index] = other.index
            values |= zip(trace.ops[index].made, other.made, strict=True)
        for index in (i for reach in first.reaches.values() for i in reach.behind):
            other = trace.maker.get(values[trace.ops[index].made[0]], -1)
            if other < 0 or not self._alike(trace.ops[index], trace.ops[other], values):
                return None
            ops[index] = other
        for old, new in values.items():
            if old in inside and (uses_of(trace, old), old in trace.outputs) != (
                uses_of(trace, new),
                new in trace.outputs,
            ):
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

    def _alike(self, one: Op, two: Op, values: dict[int, int]) -> bool:
        """Whether two operations are the same on corresponding values; those first met are added to ``values``."""
        if one.func is not two.func or len(one.leaves) != len(two.leaves) or one.spec != two.spec:
            return False
        trace = self.trace
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
