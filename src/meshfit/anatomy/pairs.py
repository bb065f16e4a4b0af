"""Which parameters can be split over devices: column, then row, with one collective a pair.

A pair is a region of the model between *columns*, weights cut by their output channels, and *rows*, weights cut by
their input channels: each device computes its share of the channels in between by itself, and the sum over devices of
what the rows return is what one device would compute.

Pairs are found without rules for operations, by noise. The aten operations of one small forward are recorded; noise
is put on one device's share of a parameter, and what depends on it is computed again. As long as no element changes for
two devices, the tensor is shared out. The first operation that mixes the shares is a row if it is a matrix product
or convolution with another parameter; which of its input channels changed for whom says how that parameter is cut.
Anything else that mixes (a norm over channels, softmax, a sum over heads, the output) means there is no pair.

    Note: what a pair has to fulfil
    Columns and rows are closed: every parameter that reaches a row belongs to the pair of that row, unless it stays
    whole. All of them agree on who owns each input channel of each row, and every channel has an owner. A tensor from
    outside may be read inside if each device reads the same of it (a mask, rotary tables); if each reads a share of
    its own it must be cut by the pair as well, else it is a residual and there is no pair.

What is found is a claim about one forward on one batch. Where the batch says nothing (a channel that is zero, an expert
no token is sent to), the claim is weaker: whoever applies a pair checks it, forward and backward.

    cost   one forward, and for each parameter a replay of what follows it until shares mix. A parameter that is
           followed by the same operations as an earlier one takes its result: 32 equal layers are looked at once.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from meshfit.anatomy.aten import AtenTrace, Op, Storage, Window, real

Ranges = tuple[tuple[int, int], ...]
"""Indices as (start, stop) of each run of them."""

LONGEST_WALK = 1500
"""Operations after which a parameter is given up."""

MOST_OF_MODULE = 0.4
"""A pair that holds this share of the lowest module around it comes before larger ones that lie across modules."""

COPIES = ("clone", "_to_copy", "repeat", "index_select")
"""Operations that return elements of their input as they are, some more than once."""

CONTRACTIONS = {  # the two factors among the positional arguments, and the dim of each that is summed over
    "mm": ((0, 1), (1, 0)),
    "addmm": ((1, 1), (2, 0)),
    "bmm": ((0, 2), (1, 1)),
    "baddbmm": ((1, 2), (2, 1)),
    "mv": ((0, 1), (1, 0)),
    "addmv": ((1, 1), (2, 0)),
    "_grouped_mm": ((0, -1), (1, -2)),
    "convolution": ((0, 1), (1, 1)),
}

LAYERS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
"""Modules whose weight may be split by output channels, with the output gathered."""


@dataclass(frozen=True, slots=True)
class Shard:
    """How one parameter or buffer is cut."""

    parameter: str
    dim: int
    ranges: tuple[Ranges, ...]
    """For each device, the indices of ``dim`` that it holds."""

    limit: int
    """The largest number of ways in which it could be cut here, were it alone: heads, groups, channels."""

    def index(self, rank: int) -> tuple[int, ...]:
        return tuple(i for start, stop in self.ranges[rank] for i in range(start, stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Parameters that are cut together, with one sum over devices for each call of a row."""

    module: str
    """Path of the lowest module that holds them all; "" for the model."""

    kind: str
    """ "attention", "mlp", "conv", "experts"; "" for anything else."""

    columns: tuple[Shard, ...]
    rows: tuple[Shard, ...]
    """A bias of a row stays whole, and is added once, after the sum."""

    others: tuple[Shard, ...]
    """Cut along: biases of columns, norms by channel, per-head tables; buffers too."""

    partial: tuple[str, ...]
    """Parameters read inside that stay whole: each device has part of their gradient, to be summed."""

    entries: tuple[str, ...]
    """Weights whose whole output is read inside, beside the inputs of the columns: gradients of these outputs are to
    be summed too. They stay whole (keys and values of multi-query attention), or are rows of this very pair."""

    draws: bool
    """Random numbers are met inside: each device draws those of its share."""

    summed: int
    """Elements that the rows return, for the traced batch: what is summed over devices."""

    ways: int
    limit: int
    """The largest number of ways; every divisor of it is possible."""

    bytes: int

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.columns + self.rows + self.others

    @property
    def narrowest(self) -> Shard:
        """The shard that limits the number of ways."""
        return min(self.columns + self.others, key=lambda shard: shard.limit)

    def allows(self, ways: int) -> bool:
        return self.limit % ways == 0


@dataclass(frozen=True, kw_only=True)
class Split:
    """What of a model can be split, and how."""

    ways: int
    pairs: tuple[Pair, ...]
    gathered: tuple[str, ...]
    """Weights of Linear, Conv and Embedding that can be cut by output channels only, with the output gathered."""

    whole: tuple[str, ...]
    """Parameters that every device holds."""

    why: dict[str, str]
    """Of each parameter in no pair, what stood against it."""

    cover: float
    """Share of the parameters, by bytes, that lies in pairs."""

    @property
    def limit(self) -> int:
        """The largest number of ways that all pairs allow; 1 if there is none."""
        return math.gcd(*(pair.limit for pair in self.pairs)) or 1


def find_pairs(model: nn.Module, inputs: Any, *, ways: int = 2) -> Split:
    """Find what can be split over ``ways`` devices, from one forward on ``inputs``; ``model`` stays as it is.

    ``inputs`` is a small batch: a tensor, a tuple of arguments, or a dict of keyword arguments.
    """
    if ways < 2:
        raise ValueError(f"a split has two ways or more, not {ways}")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    modules = dict(model.named_modules())
    with torch.random.fork_rng(devices=[]):
        trace = AtenTrace.of(model, inputs)
        finder = _Finder(trace, ways)
        found = finder.pairs(sizes)
    pairs = _chosen(found, modules, sizes)
    held = {shard.parameter for pair in pairs for shard in pair.shards}
    entries = {name for pair in pairs for name in pair.entries}
    gathered, whole, why = [], [], {}
    for name in sizes:
        if name in held:
            continue
        dim = finder.output_dim(name)
        why[name] = finder.reason(name, dim, found, pairs)
        layer = modules[name.rpartition(".")[0]]
        plain = isinstance(layer, LAYERS) or type(layer).__name__ == "Conv1D"
        if plain and name not in entries and dim is not None and trace.model.get_parameter(name).shape[dim] % ways == 0:
            gathered.append(name)
        else:
            whole.append(name)
    return Split(
        ways=ways,
        pairs=pairs,
        gathered=tuple(gathered),
        whole=tuple(whole),
        why=why,
        cover=sum(sizes.get(name, 0) for name in held) / max(sum(sizes.values()), 1),
    )


def _chosen(pairs: list[Pair], modules: Mapping[str, nn.Module], sizes: Mapping[str, int]) -> tuple[Pair, ...]:
    """Pairs of which no two hold the same parameter: those that fill their module first, then the largest."""
    around = {
        pair.module: sum(p.numel() * p.element_size() for p in modules[pair.module].parameters()) for pair in pairs
    }
    pairs = sorted(pairs, key=lambda pair: (pair.bytes <= MOST_OF_MODULE * around[pair.module], -pair.bytes))
    cut: set[str] = set()
    kept: set[str] = set()
    chosen = []
    for pair in pairs:
        names = {shard.parameter for shard in pair.shards}
        stay = {*pair.entries, *pair.partial} - names
        if not names & (cut | kept) and not stay & cut:
            chosen.append(pair)
            cut, kept = cut | names, kept | stay
    place = {name: i for i, name in enumerate(sizes)}
    return tuple(sorted(chosen, key=lambda pair: min(place.get(s.parameter, len(place)) for s in pair.shards)))


class _Mixed(Exception):
    """No pair: why not, in words with a place for each of ``names``."""

    def __init__(self, words: str, *names: str):
        super().__init__(words, *names)
        self.words, self.names = words, names

    def __str__(self) -> str:
        return self.words.format(*self.names)

    def about(self, names: Mapping[str, str]) -> "_Mixed":
        """The same about other parameters."""
        return _Mixed(self.words, *(names[name] for name in self.names))


class _Conflict(_Mixed):
    """Members that each reach a row, but would cut it differently."""


@dataclass(frozen=True, eq=False, slots=True)
class _Row:
    """An operation that sums over shared-out channels."""

    op: int
    weight: str
    owners: Tensor
    """The rank of each input channel; -1 where no noise came, -2 if the channel is zero throughout."""

    dim: int
    """Of the weight."""

    index: Tensor
    """The index in that dim, for each input channel."""


@dataclass(eq=False)
class _Reach:
    """How far shares stay apart, from one parameter on."""

    rows: list[_Row] = field(default_factory=list)
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

    first: "_Reach | None" = None
    """The reach that this one is a copy of, for another parameter."""


@dataclass(eq=False)
class _Walk:
    """All that was tried from one parameter on."""

    name: str
    ops: list[int]
    reaches: dict[int, _Reach]
    why: dict[int, _Mixed]
    """Both by dim."""


class _Finder:
    def __init__(self, trace: AtenTrace, ways: int):
        self.trace, self.ways = trace, ways
        self.why: dict[str, dict[int, _Mixed]] = {}
        self.reached: dict[str, bool] = {}
        self.added: dict[str, set[str]] = {}
        """What a row reads beside its weight: its bias."""

        self.places: dict[tuple[Window, int], tuple[int, Tensor] | None] = {}
        self.limits: dict[tuple[int, int], int] = {}
        self.proven: set[tuple[int, ...]] = set()

    # From one parameter on

    def walks(self) -> list[_Walk]:
        walks: list[_Walk] = []
        alike: dict[tuple, list[_Walk]] = {}
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

    def _walk(self, name: str, window: Window) -> _Walk:
        ops: set[int] = set()
        reaches, why = {}, {}
        other = self._not_channels(name)
        for dim, size in enumerate(window.size):
            for sizes in self._blocks(size) if dim not in other else ():
                reach = _Reach(sizes=sizes)
                try:
                    self._spread({name: (dim, _shares(sizes, self.ways))}, reach)
                    reaches[dim] = reach
                    break
                except _Mixed as mixed:
                    why.setdefault(dim, mixed)
                finally:
                    ops.update(reach.ops)
        return _Walk(name, sorted(ops), reaches, why)

    def _not_channels(self, name: str) -> tuple[int, ...]:
        """Dims that are no output channels: what the first product sums over, kernels, entries of a look-up table."""
        trace = self.trace
        op = trace.ops[trace.users[trace.value_of[name]][0]]
        if op.name == "embedding":
            return (0,)
        factors = _factors(op) or ()
        window, dim = next(((w, d) for w, d in factors if w.value == trace.value_of[name]), (None, 0))
        if window is None or not any(w.value in trace.fed for w, _ in factors):
            return ()
        place = self._place(name, window, dim)
        kernel = range(2, len(window.size)) if op.name == "convolution" else ()
        return (*kernel, place[0]) if place else ()

    def _blocks(self, size: int) -> Iterator[tuple[int, ...]]:
        """Ways to see a dim as fused blocks, each to be cut in equal parts."""
        for count in (1, 3, 2):
            if size and size % (count * self.ways) == 0:
                yield (size // count,) * count
        yield from (
            sizes for sizes in self.trace.splits if sum(sizes) == size and all(s % self.ways == 0 for s in sizes)
        )

    def _spread(self, cuts: Mapping[str, tuple[int, Sequence[Tensor]]], reach: _Reach) -> None:
        """Follow noise on each rank's share of the parameters in ``cuts`` until it mixes, and fill in ``reach``."""
        trace = self.trace
        ranks = len(next(iter(cuts.values()))[1])
        live: dict[int, list[Storage]] = {trace.value_of[n]: _noised(trace, n, dim, s) for n, (dim, s) in cuts.items()}
        masks: dict[int, list[Tensor]] = {}
        reach.shared |= set(live)
        blind: set[int] = set()
        todo = sorted({i for value in live for i in trace.users.get(value, ())})
        seen = set(todo)
        while todo:
            op = trace.ops[heapq.heappop(todo)]
            reach.ops.append(op.index)
            if len(reach.ops) > LONGEST_WALK:
                raise _Mixed("reaches too far")
            if any(window.value in blind for window in op.reads):
                raise _Mixed(f"decides {op.name} by an index")
            reads = {window.value for window in op.reads if window.value in live}
            results = []
            for rank in range(ranks):
                made = trace.replay(op, {value: live[value][rank] for value in reads})
                if made is None:
                    raise _Mixed(f"changes the shape that {op.name} returns")
                results.append(made)
            changed = {v: [trace.differs(v, made[v]) for made in results] for v in trace.made[op.index]}
            used = [v for v in changed if trace.users.get(v) or v in trace.outputs]
            if any(_overlap(changed[v]) for v in used):
                reach.rows.append(self._row(op, live, masks))
                continue
            for value in changed:
                reach.shared.add(value)
                if _blunt(trace, op, value, reads):
                    blind.add(value)
                elif any(bool(mask.any()) for mask in changed[value]):
                    if value in trace.outputs:
                        raise _Mixed("reaches the output")
                    live[value] = [made[value] for made in results]
                    masks[value] = changed[value]
                else:
                    continue
                for user in trace.users.get(value, ()):
                    if user not in seen:
                        seen.add(user)
                        heapq.heappush(todo, user)
        if not reach.rows:
            raise _Mixed("ends in no row, or has no effect on this batch")
        self._meet(reach, live, masks)

    def _row(self, op: Op, live: Mapping[int, Any], masks: Mapping[int, list[Tensor]]) -> _Row:
        """The row that ``op`` is, if it is one."""
        trace = self.trace
        factors = _factors(op)
        read = sorted({trace.source[w.value] for w in op.reads if w.value in trace.source and w.value not in live})
        by = f"mixed by {op.name}" + (" with " + ", ".join("{}" for _ in read) if read else "")
        mixed = _Mixed(by, *read)
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
        if _overlap(channels) or not all(bool(channel.any()) for channel in channels):
            raise _Mixed(f"{by}, whose input channels are not shared out", *read)
        zero = inner.on(trace.contents[inner.value]).movedim(inner_dim, 0).flatten(1).eq(0).all(1)
        owners = torch.where(zero, -2, -1)
        for rank, channel in enumerate(channels):
            owners[channel] = rank
        weight = trace.source[outer.value]
        place = self._place(weight, outer, outer_dim)
        if place is None:
            raise _Mixed("meets {}, which is rearranged before use", weight)
        return _Row(op.index, weight, owners, *place)

    def _place(self, name: str, window: Window, dim: int) -> tuple[int, Tensor] | None:
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

    def _meet(self, reach: _Reach, live: Mapping[int, list[Storage]], masks: Mapping[int, list[Tensor]]) -> None:
        """What the shares meet on their way, from outside."""
        trace = self.trace
        rows = {row.op for row in reach.rows}
        for index in reach.ops:
            op = trace.ops[index]
            if index in rows or not any(value in live for value in trace.made[index]):
                continue
            factors = _factors(op)
            if factors and sum(window.value in live for window, _ in factors) == 1:
                inside, outside = (w for w, _ in sorted(factors, key=lambda f: f[0].value not in live))
                reach.column |= inside.value not in trace.fed and outside.value in trace.fed
            reach.column |= op.name == "embedding" and any(w.value in trace.fed for w in op.reads)
            for value, new in op.written.items():
                if value in trace.names and new in masks:
                    self._along(reach, value, masks[new])
            outside = {w.value: None for w in op.reads if w.value not in op.written and real(w.dtype)}
            outside = [value for value in outside if value not in reach.shared]
            for value, supports in zip(outside, self._supports(op, outside, masks), strict=True):
                self._from_outside(reach, index, value, supports)

    def _from_outside(self, reach: _Reach, op: int, value: int, supports: list[Tensor]) -> None:
        """Sort a value from outside by what each rank reads of it."""
        read = [support for support in supports if bool(support.any())]
        if len(read) < 2:
            return  # to no effect
        if _common(read):
            reach.common.append((op, value))
        elif value in self.trace.names:
            self._along(reach, value, supports)
        elif not self._copies(reach, value, supports):
            reach.own.append(value)

    def _copies(self, reach: _Reach, value: int, supports: list[Tensor]) -> bool:
        """Whether each rank's share of ``value`` is a copy of something that all ranks read alike."""
        trace = self.trace
        if value not in trace.maker or len(reach.behind) > 50:
            return False
        maker = trace.ops[trace.maker[value]]
        before = list(dict.fromkeys(w.value for w in maker.reads if w.value in trace.trained))
        if not before or maker.written or any(read in trace.source for read in before):
            return False
        reach.behind.append(maker.index)
        for read, shares in zip(before, self._supports(maker, before, {value: supports}), strict=True):
            if not _common(shares):
                if not self._copies(reach, read, shares):
                    return False
            elif maker.name in COPIES:
                reach.common.append((maker.index, read))
            else:
                return False
        return True

    def _along(self, reach: _Reach, value: int, shares: list[Tensor]) -> None:
        """Note a parameter or buffer that is cut along, from what each rank reads or writes of it."""
        name = self.trace.names[value]
        found = _owners(self.trace.through(self.trace.whole[value], share) for share in shares)
        if found is None:
            raise _Mixed("meets {}, of which devices read parts that are no cut", name)
        dim, owners = reach.along.get(name, found)
        if dim != found[0] or not _same_owners(owners, found[1]):
            raise _Mixed("meets {}, which would be cut in two ways", name)
        reach.along[name] = dim, torch.maximum(owners, found[1])

    def _supports(self, op: Op, values: list[int], masks: Mapping[int, list[Tensor]]) -> list[list[Tensor]]:
        """For each of ``values``, what each rank reads of it: where the gradient of the rank's outputs is not zero."""
        if not values:
            return []
        trace = self.trace
        leaves = {value: trace.elements(value).clone().requires_grad_() for value in values}

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, Window):
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
                outs = [(w, t) for w, t in results if isinstance(w, Window) and w.value in masks and t.requires_grad]
                outs = [(w, t * (torch.rand(t.shape, dtype=torch.float64, generator=random) + 0.5)) for w, t in outs]
                for rank in range(ranks):
                    total = sum((t * trace.through(w, masks[w.value][rank])).abs().sum() for w, t in outs)
                    grads: Sequence[Tensor | None] = [None] * len(values)
                    if isinstance(total, Tensor):
                        grads = torch.autograd.grad(total, [*leaves.values()], retain_graph=True, allow_unused=True)
                    for supports, leaf, grad in zip(found, leaves.values(), grads, strict=True):
                        supports.append(torch.zeros_like(leaf, dtype=torch.bool) if grad is None else grad != 0)
        except RuntimeError:
            raise _Mixed(f"meets {op.name}, which has no derivative") from None
        return found

    # The same from another parameter on

    def _copied(self, first: _Walk, name: str) -> _Walk | None:
        """The walk ``first`` for ``name``, if the same operations follow it: compared one by one, nothing is run."""
        trace = self.trace
        values = {trace.value_of[first.name]: trace.value_of[name]}
        ops: dict[int, int] = {}
        reached = {value for reach in first.reaches.values() for value in reach.shared} | set(values)
        inside = reached | {value for i in first.ops for value in trace.made[i]}
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
            values |= zip(trace.made[index], trace.made[other.index], strict=True)
        for index in (i for reach in first.reaches.values() for i in reach.behind):
            other = trace.maker.get(values[trace.made[index][0]], -1)
            if other < 0 or not self._alike(trace.ops[index], trace.ops[other], values):
                return None
            ops[index] = other
        for old, new in values.items():
            if old in inside and (_uses(trace, old), old in trace.outputs) != (_uses(trace, new), new in trace.outputs):
                return None
        if any(value not in values for value in reached):
            return None
        weights = {trace.names[old]: trace.names[new] for old, new in values.items() if old in trace.names}
        sources = {trace.source[old]: trace.source[new] for old, new in values.items() if old in trace.source}
        weights = sources | weights

        def moved(reach: _Reach) -> _Reach:
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
        return _Walk(name, [ops[i] for i in first.ops], reaches, why)

    def _alike(self, one: Op, two: Op, values: dict[int, int]) -> bool:
        """Whether two operations are the same on corresponding values; those first met are added to ``values``."""
        if one.func is not two.func or len(one.leaves) != len(two.leaves) or one.spec != two.spec:
            return False
        trace = self.trace
        for a, b in zip(one.leaves, two.leaves, strict=True):
            if isinstance(a, Window) and isinstance(b, Window):
                if a.geometry != b.geometry or values.setdefault(a.value, b.value) != b.value:
                    return False
                for kind in (trace.constant, trace.trained, trace.fed, trace.source, trace.names):
                    if (a.value in kind) != (b.value in kind):
                        return False
            elif type(a) is not type(b) or (a != b and not isinstance(a, float)):
                return False
        return len(trace.made[one.index]) == len(trace.made[two.index])

    # From parameters to pairs

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
            members = _closure(key, reaches, by_row)
            done |= members.keys()
            pairs += self._pairs_of(members, sizes)
        return pairs

    def _pairs_of(self, members: dict[tuple[str, int], _Reach], sizes: Mapping[str, int]) -> list[Pair]:
        """The pair that ``members`` make; if they do not agree, those of each group that does."""
        try:
            return [self._pair(members, sizes)]
        except _Mixed as mixed:
            for name, dim in members:
                self.why[name][dim] = mixed
            if not isinstance(mixed, _Conflict):
                return []
        groups: list[dict[tuple[str, int], _Reach]] = []
        for key, reach in members.items():
            group = next((g for g in groups if all(_agree(reach, other) for other in g.values())), None)
            if group is None:
                groups.append({key: reach})
            else:
                group[key] = reach
        groups = [group for group in groups if any(reach.column for reach in group.values())]
        return [pair for group in groups if len(group) < len(members) for pair in self._pairs_of(group, sizes)]

    def _pair(self, members: dict[tuple[str, int], _Reach], sizes: Mapping[str, int]) -> Pair:
        trace = self.trace
        while True:  # vectors and tables that meet something else as well are not part of it
            shared = set().union(*(reach.shared for reach in members.values()))
            stray = [k for k, reach in members.items() if not reach.column and not shared.issuperset(reach.own)]
            if not stray:
                break
            members = {key: reach for key, reach in members.items() if key not in stray}
        names = [name for name, _ in members]
        if len(set(names)) < len(names):
            raise _Mixed("would be cut in two dims")
        for value in sorted({value for reach in members.values() for value in reach.own} - shared):
            if value not in trace.constant:
                raise _Mixed("meets an activation that is not cut along with it")
            if value not in trace.drawn and not _uniform(trace.elements(value)):
                raise _Mixed("meets a constant of the code that is not cut along with it")
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
            ways=self.ways,
            limit=math.gcd(*(shard.limit for shard in columns + others)),
            bytes=sum(sizes.get(name, 0) for name in held),
        )

    def _cut_along(self, members: dict[tuple[str, int], _Reach], names: list[str]) -> list[Shard]:
        """Parameters and buffers met on the way that show nothing of their own, as biases that a softmax cancels."""
        trace = self.trace
        inside = {i for reach in members.values() for i in reach.ops}
        found: dict[str, Shard] = {}
        for reach in members.values():
            for name, (dim, owners) in reach.along.items():
                if name in names:
                    continue
                owners = _filled(owners, self.ways)
                if owners is None or len(set(torch.bincount(owners, minlength=self.ways).tolist())) > 1:
                    raise _Mixed("meets {}, of which devices read parts that are no cut", name)
                shard = Shard(name, dim, _runs(owners, self.ways), len(owners))
                if found.setdefault(name, shard) != shard:
                    raise _Mixed("meets {}, which would be cut in two ways", name)
                if not inside.issuperset(trace.users[trace.value_of[name]]):
                    raise _Mixed("meets {}, which is used elsewhere too", name)
        return list(found.values())

    def _rows(self, members: dict[tuple[str, int], _Reach], names: set[str]) -> tuple[Shard, ...]:
        """Rows on whose owners all members agree."""
        trace = self.trace
        found: dict[int, _Row] = {}
        for reach in members.values():
            for row in reach.rows:
                known = found.get(row.op, row)
                if not _same_owners(known.owners, row.owners):
                    raise _Conflict("{} would be cut in two ways", row.weight)
                found[row.op] = replace(row, owners=torch.maximum(known.owners, row.owners))
        shards: dict[str, Shard] = {}
        for row in found.values():
            read = {trace.source[w.value] for w in trace.ops[row.op].reads if w.value in trace.source}
            self.added.setdefault(row.weight, set()).update(read)
            if row.weight in names:
                raise _Mixed("{} would be both column and row", row.weight)
            owners = _filled(row.owners, self.ways)
            if owners is None:
                raise _Mixed("some input channels of {} come from elsewhere", row.weight)
            size = trace.whole[trace.value_of[row.weight]].size[row.dim]
            by_index = torch.full((size,), -1)
            by_index[row.index] = owners
            if bool((by_index[row.index] != owners).any()) or bool((by_index < 0).any()):
                raise _Mixed("{} is read by more than one rank at one index", row.weight)
            if len(set(torch.bincount(by_index, minlength=self.ways).tolist())) > 1:
                raise _Mixed("{} would be cut unevenly", row.weight)
            shard = Shard(row.weight, row.dim, _runs(by_index, self.ways), size)
            if shards.setdefault(row.weight, shard) != shard:
                raise _Mixed("{} would be cut in two ways", row.weight)
        for weight in shards:
            users = [i for value, name in trace.source.items() if name == weight for i in trace.users.get(value, ())]
            for i in users:
                if i not in found and not all(trace.source.get(v) == weight for v in trace.made[i]):
                    raise _Mixed("{} is used elsewhere too", weight)
        return tuple(sorted(shards.values(), key=lambda shard: list(trace.value_of).index(shard.parameter)))

    def _outside(
        self, members: dict[tuple[str, int], _Reach], shared: set[int]
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
                factors = _factors(trace.ops[index]) or ()
                weights = [w for w, _ in factors if w.value in shared and w.value not in trace.fed]
                if not weights or all(w.value != value for w, _ in factors):  # else it is the input of a column
                    entering.add(value)
        sites = {value: self._site(value) for value in sorted(entering)}
        between = {value for _, values in sites.values() for value in values}
        inside |= {trace.maker[value] for value in between}
        if any(weight is None for weight, _ in sites.values()):
            raise _Mixed("meets a whole activation on its way")
        if any(not inside.issuperset(trace.users[value]) for value in between):
            raise _Mixed("meets a whole activation that is used elsewhere too")
        return tuple(sorted(partial)), tuple(sorted({weight for weight, _ in sites.values() if weight}))

    def _site(self, value: int) -> tuple[str | None, set[int]]:
        """The one weight whose product ``value`` is computed from, and the values on the way, the product included."""
        trace = self.trace
        weights, between, todo = set(), {value}, [value]
        while todo:
            op = trace.ops[trace.maker[todo.pop()]]
            factors = _factors(op)
            if factors:
                weights |= {trace.source.get(w.value) for w, _ in factors if w.value not in trace.fed} or {None}
                continue
            for read in (w.value for w in op.reads if w.value in trace.trained and w.value not in between):
                if read not in trace.maker or read in trace.source:
                    return None, between
                between.add(read)
                todo.append(read)
        return (weights.pop() if len(weights) == 1 else None), between

    def _prove(self, members: dict[tuple[str, int], _Reach], shards: list[Shard], rows: tuple[Shard, ...]) -> None:
        """Noise on all that a rank holds, at once, stays in the rank's own channels."""
        key = tuple(sorted(id(reach.first or reach) for reach in members.values()))
        if key in self.proven:
            return
        joint = _Reach()
        cuts = {s.parameter: (s.dim, [torch.tensor(s.index(rank)) for rank in range(self.ways)]) for s in shards}
        self._spread(cuts, joint)
        found = sorted({row.weight for row in joint.rows})
        if found != sorted(row.parameter for row in rows):
            raise _Mixed("together they reach " + ", ".join("{}" for _ in found), *found)
        self.proven.add(key)

    def _shard(self, name: str, dim: int, reach: _Reach) -> Shard:
        ranges = tuple(_ranges(share.tolist()) for share in _shares(reach.sizes, self.ways))
        return Shard(name, dim, ranges, self._limit(name, dim, reach))

    def _limit(self, name: str, dim: int, reach: _Reach) -> int:
        """The largest number of ways for which two neighbouring shares still stay apart."""
        key = id(reach.first or reach), dim
        if key not in self.limits:
            size = math.gcd(*reach.sizes)
            ways = [n for n in range(size, self.ways, -1) if size % n == 0] if reach.column else []
            self.limits[key] = next((n for n in ways if self._apart(name, dim, reach.sizes, n)), self.ways)
            if not reach.column:
                self.limits[key] = size
        return self.limits[key]

    def _apart(self, name: str, dim: int, sizes: tuple[int, ...], ways: int) -> bool:
        try:
            self._spread({name: (dim, _shares(sizes, ways)[:2])}, _Reach())
        except _Mixed:
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
        return f"too small or odd to be cut in {self.ways}"

    def output_dim(self, name: str) -> int | None:
        """The dim of output channels of a weight that is used in products, convolutions or look-ups only."""
        trace = self.trace
        dims = set()
        for i in trace.users.get(trace.value_of[name], ()):
            op = trace.ops[i]
            factors = _factors(op)
            if op.name == "embedding":
                dims.add(1)
            elif factors:
                window, dim = next(((w, d) for w, d in factors if trace.source.get(w.value) == name), (None, 0))
                place = window and self._place(name, window, dim)
                dims.add(1 - place[0] if place and place[0] < 2 else None)
            elif op.name not in ("_to_copy", "clone"):
                dims.add(None)
        return dims.pop() if len(dims) == 1 else None


def _shares(sizes: Sequence[int], ways: int) -> list[Tensor]:
    """The indices of each rank when every block is cut in ``ways`` equal parts."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [torch.arange(size).view(ways, -1) + start for size, start in zip(sizes, starts, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(ways)]


def _ranges(index: Iterable[int]) -> Ranges:
    runs: list[list[int]] = []
    for i in index:
        if runs and runs[-1][1] == i:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return tuple((start, stop) for start, stop in runs)


def _runs(owners: Tensor, ways: int) -> tuple[Ranges, ...]:
    return tuple(_ranges(owners.eq(rank).nonzero().flatten().tolist()) for rank in range(ways))


def _noised(trace: AtenTrace, name: str, dim: int, shares: Sequence[Tensor]) -> list[Storage]:
    random = torch.Generator().manual_seed(1)
    value = trace.value_of[name]
    window, recorded = trace.whole[value], trace.elements(value)
    scale = 0.1 + float(recorded.std()) if recorded.numel() > 1 else 1.0
    noised = []
    for share in shares:
        storage = trace.contents[value].clone()
        tensor = window.on(storage)
        size = (*tensor.shape[:dim], len(share), *tensor.shape[dim + 1 :])
        noise = (torch.rand(size, generator=random, dtype=torch.float64) + 0.5) * scale
        tensor.index_add_(dim, share, noise.to(tensor.dtype))
        noised.append(storage)
    return noised


def _overlap(masks: Sequence[Tensor]) -> bool:
    return bool((torch.stack(list(masks)).sum(0) > 1).any())


def _blunt(trace: AtenTrace, op: Op, value: int, reads: Collection[int]) -> bool:
    """Whether ``value`` may mix shares and not show it: numbers of places, or bits that sum up several elements."""
    whole = trace.whole[value]
    if whole.dtype != torch.bool:
        return not real(whole.dtype)
    return math.prod(whole.size) < max(math.prod(w.size) for w in op.reads if w.value in reads)


def _common(supports: Sequence[Tensor]) -> bool:
    """Whether all that is read, is read by every rank, at least in part."""
    return bool(torch.stack(list(supports)).all(0).any())


def _owners(masks: Iterable[Tensor]) -> tuple[int, Tensor] | None:
    """The dim along which masks part a tensor, and the rank of each index; -2 for an index in no mask."""
    stack = torch.stack(list(masks))
    for dim in range(stack.dim() - 1):
        each = stack.movedim(dim + 1, 1).reshape(len(stack), stack.shape[dim + 1], -1).any(2)
        if bool((each.sum(0) <= 1).all()):
            return dim, torch.where(each.any(0), each.int().argmax(0), -2)
    return None


def _factors(op: Op) -> tuple[tuple[Window, int], tuple[Window, int]] | None:
    """The two factors of a product, each with the dim that is summed over; None if it is no plain product."""
    if op.name not in CONTRACTIONS:
        return None
    arguments = op.arguments
    (one, one_dim), (two, two_dim) = CONTRACTIONS[op.name]
    if op.name == "convolution":
        if arguments[8] != 1:
            return None
        two_dim = 0 if arguments[6] else 1
    return (arguments[one], one_dim), (arguments[two], two_dim)


def _filled(owners: Tensor, ways: int) -> Tensor | None:
    """Owners with channels that are always zero given to whom an even cut would give them."""
    if bool((owners == -1).any()):
        return None
    if bool((owners >= 0).all()):
        return owners
    even = torch.arange(len(owners)) * ways // len(owners)
    known = owners >= 0
    return even if torch.equal(owners[known], even[known]) else None


def _same_owners(one: Tensor, two: Tensor) -> bool:
    return not bool(((one >= 0) & (two >= 0) & (one != two)).any())


def _agree(one: _Reach, two: _Reach) -> bool:
    rows = {row.op: row for row in one.rows}
    return all(_same_owners(rows[row.op].owners, row.owners) for row in two.rows if row.op in rows)


def _uses(trace: AtenTrace, value: int) -> int:
    return len(trace.users.get(value, ()))


def _uniform(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[:1]).all())


def _closure(
    start: tuple[str, int],
    reaches: Mapping[tuple[str, int], _Reach],
    by_row: Mapping[str, list[tuple[str, int]]],
) -> dict[tuple[str, int], _Reach]:
    """All that reach the rows that they reach, in the order of ``reaches``."""
    found, todo = {start}, [start]
    while todo:
        for row in reaches[todo.pop()].rows:
            new = [key for key in by_row[row.weight] if key not in found]
            found.update(new)
            todo += new
    return {key: reach for key, reach in reaches.items() if key in found}


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
    products = {op.name for op in ops if _factors(op) and any(trace.source.get(w.value) in cut for w in op.reads)}
    if any("softmax" in name for name in names):
        return "attention"
    if "_grouped_mm" in products:
        return "experts"
    if "convolution" in products:
        return "conv"
    return "mlp" if products and not names & {"convolution", "bmm", "baddbmm", "embedding"} else ""
