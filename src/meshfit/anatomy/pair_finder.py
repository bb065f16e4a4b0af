"""Pairs of weights put together from walks: see pairs.py."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from meshfit.anatomy.aten import Op
from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.pair import Pair, ParameterShard
from meshfit.anatomy.reach import Conflict, Mixed, Reach, RowProduct, agreeing, alike, closure_of
from meshfit.anatomy.shares import (
    as_ranges,
    cut_into,
    divisors,
    factors_of,
    filled_up,
    held_alike,
    runs_of,
)
from meshfit.anatomy.walk import Walker


class PairFinder(Walker):
    """Puts walks together into pairs."""

    def __init__(self, trace: AtenTrace, degree: int, *, copies: bool, limits: bool):
        """``limits``: whether to look for the largest degree."""
        super().__init__(trace, degree, copies)
        self.limited = limits

    def pairs(self, sizes: Mapping[str, int]) -> list[Pair]:
        reaches = {(walk.name, dim): reach for walk in self.walks() for dim, reach in walk.reaches.items()}
        by_row: dict[str, list[tuple[str, int]]] = {}
        for key, reach in reaches.items():
            for row in reach.rows:
                by_row.setdefault(row.weight, []).append(key)
        pairs, done = [], set()
        for key, reach in reaches.items():
            if key in done or not reach.column:
                continue
            members = closure_of(key, reaches, by_row)
            done |= members.keys()
            pairs += self._pairs_of(members, sizes)
        return pairs

    def _pairs_of(self, members: dict[tuple[str, int], Reach], sizes: Mapping[str, int]) -> list[Pair]:
        """The pair that ``members`` make; if they do not agree, those of each group that does."""
        try:
            return [self._pair(members, sizes)]
        except Mixed as mixed:
            for name, dim in members:
                self.why[name][dim] = mixed
            if not isinstance(mixed, Conflict):
                return []
            less = self._coarsened(members)
            if less is not None:
                return self._pairs_of(less, sizes)
        groups: list[dict[tuple[str, int], Reach]] = []
        for key, reach in members.items():
            group = next((g for g in groups if all(agreeing(reach, other) for other in g.values())), None)
            if group is None:
                groups.append({key: reach})
            else:
                group[key] = reach
        groups = [group for group in groups if any(reach.column for reach in group.values())]
        return [pair for group in groups if len(group) < len(members) for pair in self._pairs_of(group, sizes)]

    def _coarsened(self, members: dict[tuple[str, int], Reach]) -> dict[tuple[str, int], Reach] | None:
        """Members that disagree with the largest one cut in fewer parts, as heads of keys and values that are fewer
        than the devices; None if that does not help."""
        full = [key for key, reach in members.items() if reach.shares == self.degree]
        if not full or not self.copies:
            return None
        base = members[max(full, key=lambda key: self._elements(key[0]))]
        found = {}
        for (name, dim), reach in members.items():
            tried = [reach]
            if not agreeing(base, reach):
                tried = [self.again(name, dim, reach.sizes, n) for n in divisors(self.degree) if 1 < n < reach.shares]
            fitting = [each for each in reversed(tried) if each is not None and agreeing(base, each)]
            if not fitting:
                return None
            found[name, dim] = fitting[0]
        return found if any(found[key] is not reach for key, reach in members.items()) else None

    def _elements(self, name: str) -> int:
        return math.prod(self.trace.whole[self.trace.value_of[name]].size)

    def _pair(self, members: dict[tuple[str, int], Reach], sizes: Mapping[str, int]) -> Pair:
        trace = self.trace
        while True:  # vectors and tables that meet something else as well are not part of it
            shared = set().union(*(reach.shared for reach in members.values()))
            stray = [k for k, reach in members.items() if not reach.column and not shared.issuperset(reach.own)]
            if not stray:
                break
            members = {key: reach for key, reach in members.items() if key not in stray}
        names = [name for name, _ in members]
        largest = max((self._elements(name) for (name, _), reach in members.items() if reach.column), default=0)
        for (name, _), reach in members.items():
            if reach.column and reach.shares < self.degree and self._elements(name) == largest:
                raise Mixed(f"can be shared by {reach.shares} devices at most")
        if len(set(names)) < len(names):
            raise Mixed("would be cut in two dims")
        for value in sorted({value for reach in members.values() for value in reach.own} - shared):
            if value not in trace.constant:
                raise Mixed("meets an activation that is not cut along with it")
            if value not in trace.drawn and len(trace.elements(value).unique()) > 1:
                raise Mixed("meets a constant of the code that is not cut along with it")
        rows = self._rows(members, set(names))
        columns = [self._shard(*key, reach) for key, reach in members.items() if reach.column]
        others = [self._shard(*key, reach) for key, reach in members.items() if not reach.column]
        others += self._cut_along(members, names)
        partial, entries = self._outside(members, shared)
        inside = [trace.ops[i] for i in sorted({i for reach in members.values() for i in reach.ops})]
        held = [shard.parameter for shard in (*columns, *rows, *others)]
        self._prove(members, columns + others, rows)
        return Pair(
            module=_around(trace.model, [*held, *entries]),
            kind=_kind(trace, inside, held),
            columns=tuple(columns),
            rows=rows,
            others=tuple(others),
            partial=partial,
            entries=entries,
            draws=any(op.draws or any(w.value in trace.drawn for w in op.reads) for op in inside),
            summed=sum(
                math.prod(trace.ops[i].outs[0].size) for i in sorted({r.op for m in members.values() for r in m.rows})
            ),
            degree=self.degree,
            limit=math.gcd(*(shard.limit for shard in columns + others)),
            bytes=sum(sizes.get(name, 0) for name in held),
        )

    def _cut_along(self, members: dict[tuple[str, int], Reach], names: list[str]) -> list[ParameterShard]:
        """Parameters and buffers met on the way that show nothing of their own, as biases that a softmax cancels."""
        trace = self.trace
        inside = {i for reach in members.values() for i in reach.ops}
        found: dict[str, ParameterShard] = {}
        for reach in members.values():
            for name, (dim, owners) in reach.along.items():
                if name in names:
                    continue
                owners = filled_up(owners, reach.shares)
                if owners is None or len(set(torch.bincount(owners, minlength=reach.shares).tolist())) > 1:
                    raise Mixed("meets {}, of which devices read parts that are no cut", name)
                shard = ParameterShard(name, dim, held_alike(runs_of(owners, reach.shares), self.degree), len(owners))
                if found.setdefault(name, shard) != shard:
                    raise Mixed("meets {}, which would be cut in two ways", name)
                if not inside.issuperset(trace.users[trace.value_of[name]]):
                    raise Mixed("meets {}, which is used elsewhere too", name)
        return list(found.values())

    def _rows(self, members: dict[tuple[str, int], Reach], names: set[str]) -> tuple[ParameterShard, ...]:
        """Rows on whose owners all members agree."""
        trace = self.trace
        found: dict[int, RowProduct] = {}
        for reach in members.values():
            for row in reach.rows:
                known = found.get(row.op, row)
                if not alike(known, row):
                    raise Conflict("{} would be cut in two ways", row.weight)
                if known.shares == row.shares:
                    row = replace(row, owners=torch.maximum(known.owners, row.owners))
                found[row.op] = max(known, row, key=lambda row: row.shares) if known.shares != row.shares else row
        shards: dict[str, ParameterShard] = {}
        for row in found.values():
            read = {trace.source[w.value] for w in trace.ops[row.op].reads if w.value in trace.source}
            self.added.setdefault(row.weight, set()).update(read)
            if row.shares < self.degree:
                raise Mixed("{} has input from {} devices at most", row.weight, str(row.shares))
            if row.weight in names:
                raise Mixed("{} would be both column and row", row.weight)
            owners = filled_up(row.owners, self.degree)
            if owners is None:
                raise Mixed("some input channels of {} come from elsewhere", row.weight)
            size = trace.whole[trace.value_of[row.weight]].size[row.dim]
            by_index = torch.full((size,), -1)
            by_index[row.index] = owners
            if bool((by_index[row.index] != owners).any()) or bool((by_index < 0).any()):
                raise Mixed("{} is read by more than one rank at one index", row.weight)
            if len(set(torch.bincount(by_index, minlength=self.degree).tolist())) > 1:
                raise Mixed("{} would be cut unevenly", row.weight)
            shard = ParameterShard(row.weight, row.dim, runs_of(by_index, self.degree), size)
            if shards.setdefault(row.weight, shard) != shard:
                raise Mixed("{} would be cut in two ways", row.weight)
        for weight in shards:
            users = [i for value, name in trace.source.items() if name == weight for i in trace.users.get(value, ())]
            for i in users:
                if i not in found and not all(trace.source.get(v) == weight for v in trace.ops[i].made):
                    raise Mixed("{} is used elsewhere too", weight)
        return tuple(sorted(shards.values(), key=lambda shard: list(trace.value_of).index(shard.parameter)))

    def _outside(
        self, members: dict[tuple[str, int], Reach], shared: set[int]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of what is read inside but stays whole: parameters, and weights whose output enters."""
        trace = self.trace
        partial, entering = set(), set()
        inside = {i for reach in members.values() for i in (*reach.ops, *reach.behind)}
        for reach in members.values():
            for index, value in reach.common:
                if value in shared or value not in trace.trained:
                    continue
                if value in trace.source:
                    partial.add(trace.source[value])
                    continue
                factors = factors_of(trace.ops[index]) or ()
                weights = [w for w, _ in factors if w.value in shared and w.value not in trace.fed]
                if not weights or all(w.value != value for w, _ in factors):  # else it is the input of a column
                    entering.add(value)
        sites = {value: self._site(value) for value in sorted(entering)}
        between = {value for _, values in sites.values() for value in values}
        inside |= {trace.maker[value] for value in between}
        if any(weight is None for weight, _ in sites.values()):
            raise Mixed("meets a whole activation on its way")
        if any(not inside.issuperset(trace.users[value]) for value in between):
            raise Mixed("meets a whole activation that is used elsewhere too")
        return tuple(sorted(partial)), tuple(sorted({weight for weight, _ in sites.values() if weight}))

    def _site(self, value: int) -> tuple[str | None, set[int]]:
        """The one weight whose product ``value`` is computed from, and the values on the way, the product included."""
        trace = self.trace
        weights, between, todo = set(), {value}, [value]
        while todo:
            op = trace.ops[trace.maker[todo.pop()]]
            factors = factors_of(op)
            if factors:
                weights |= {trace.source.get(w.value) for w, _ in factors if w.value not in trace.fed} or {None}
                continue
            for read in (w.value for w in op.reads if w.value in trace.trained and w.value not in between):
                if read not in trace.maker or read in trace.source:
                    return None, between
                between.add(read)
                todo.append(read)
        return (weights.pop() if len(weights) == 1 else None), between

    def _prove(
        self, members: dict[tuple[str, int], Reach], shards: list[ParameterShard], rows: tuple[ParameterShard, ...]
    ) -> None:
        """Noise on all that a rank holds, at once, stays in the rank's own channels."""
        key = tuple(sorted(id(reach.first or reach) for reach in members.values()))
        if key in self.proven:
            return
        for shares in sorted({reach.shares for reach in members.values()}):
            joint = Reach()
            cuts = {}
            for shard in shards:
                held = list(dict.fromkeys(shard.ranges))
                if len(held) >= shares:
                    parts = [
                        torch.tensor(shard.index(rank)) for rank in range(0, self.degree, self.degree // len(held))
                    ]
                    times = len(held) // shares
                    cuts[shard.parameter] = shard.dim, [torch.cat(parts[i * times :][:times]) for i in range(shares)]
            self._spread(cuts, joint)
            found = sorted({row.weight for row in joint.rows})
            if found != sorted(row.parameter for row in rows):
                raise Mixed("together they reach " + ", ".join("{}" for _ in found), *found)
        self.proven.add(key)

    def _shard(self, name: str, dim: int, reach: Reach) -> ParameterShard:
        ranges = [as_ranges(share.tolist()) for share in cut_into(reach.sizes, reach.shares)]
        looks = self.limited and reach.shares == self.degree
        limit = self._limit(name, dim, reach) if looks else self.degree
        return ParameterShard(name, dim, held_alike(ranges, self.degree), limit)

    def _limit(self, name: str, dim: int, reach: Reach) -> int:
        """The largest degree for which two neighbouring shares still stay apart."""
        key = id(reach.first or reach), dim
        if key not in self.limits:
            size = math.gcd(*reach.sizes)
            finer = [n for n in range(size, self.degree, -1) if size % n == 0] if reach.column else []
            self.limits[key] = next((n for n in finer if self._apart(name, dim, reach.sizes, n)), self.degree)
            if not reach.column:
                self.limits[key] = size
        return self.limits[key]

    def _apart(self, name: str, dim: int, sizes: tuple[int, ...], degree: int) -> bool:
        try:
            self._spread({name: (dim, cut_into(sizes, degree)[:2])}, Reach())
        except Mixed:
            return False
        return True

    def reason(self, name: str, dim: int | None, found: Sequence[Pair], chosen: Sequence[Pair]) -> str:
        """Why a parameter is in no pair of those ``chosen`` from those ``found``."""
        trace = self.trace
        if not trace.users.get(trace.value_of[name]):
            return "no operation reads it"
        if any(name in self.added.get(row.parameter, ()) for pair in chosen for row in pair.rows):
            return "added once, after the sum over devices"
        if any(name in pair.entries for pair in chosen):
            return "every device needs all of its output"
        if any(name in pair.partial for pair in chosen):
            return "read whole by every device"
        lost = next((pair for pair in found if name in [shard.parameter for shard in pair.shards]), None)
        if lost is not None:
            other = [shard.parameter for shard in lost.shards if shard.parameter != name]
            return f"would be cut with {', '.join(other[:3])}, which other pairs hold"
        why = self.why.get(name, {})
        if why:
            return str(why[dim] if dim in why else next(iter(why.values())))
        if self.reached.get(name):
            return "meets an activation that is not cut along with it"
        return f"too small or odd to be cut in {self.degree}"

    def output_dim(self, name: str) -> int | None:
        """The dim of output channels of a weight that is used in products, convolutions or look-ups only."""
        trace = self.trace
        dims = set()
        for i in trace.users.get(trace.value_of[name], ()):
            op = trace.ops[i]
            factors = factors_of(op)
            if op.name == "embedding":
                dims.add(1)
            elif factors:
                window, dim = next(((w, d) for w, d in factors if trace.source.get(w.value) == name), (None, 0))
                place = window and self._place(name, window, dim)
                dims.add(1 - place[0] if place and place[0] < 2 else None)
            elif op.name not in ("_to_copy", "clone"):
                dims.add(None)
        return dims.pop() if len(dims) == 1 else None


def _around(model: nn.Module, names: Sequence[str]) -> str:
    """The lowest module that holds all of ``names`` and has a forward of its own."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    while common and isinstance(model.get_submodule(".".join(common)), (nn.ModuleList, nn.ModuleDict)):
        common.pop()
    return ".".join(common)


def _kind(trace: AtenTrace, ops: Sequence[Op], cut: Collection[str]) -> str:
    names = {op.name for op in ops}
    products = {op.name for op in ops if factors_of(op) and any(trace.source.get(w.value) in cut for w in op.reads)}
    if any("softmax" in name for name in names):
        return "attention"
    if "_grouped_mm" in products:
        return "experts"
    if "convolution" in products:
        return "conv"
    return "mlp" if products and not names & {"convolution", "bmm", "baddbmm", "embedding"} else ""
