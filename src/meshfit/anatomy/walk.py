"""How far one device's share of a parameter reaches: the noise behind ``pairs``.

Noise is put on one share of a parameter's channels at a time, and what depends on it is computed again, operation by
operation. While no element changes for two devices, the tensors stay shared out. A walk ends at the operations that
mix the shares: rows, where they are products with another parameter, else a reason why there is no pair.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfit.anatomy.aten import Op, Storage, StridedView, real
from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.reach import Mixed, Reach, RowProduct, Walk, copied_walk
from meshfit.anatomy.shares import (
    Noise,
    cut_into,
    divisors,
    factors_of,
    in_common,
    is_blunt,
    overlapping,
    owners_of,
    same_owners,
)
from meshfit.torch_private.trees import tree_leaves, tree_unflatten

LONGEST_WALK = 1500
"""Operations after which a parameter is given up."""

COPIES = ("clone", "_to_copy", "repeat", "index_select")
"""Operations that return elements of their input as they are, some more than once."""


class Walker:
    """Walks from every parameter of a recorded forward, for ``degree`` devices."""

    def __init__(self, trace: AtenTrace, degree: int, copies: bool):
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
            copies = (copied_walk(self.trace, first, name) for first in firsts[-8:])
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
                    self.places[key] = own, numbers[:, 0].real.long()
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
