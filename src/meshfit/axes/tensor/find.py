"""What of a model can be split, by looking at each kind of block once.

A small model is looked at as a whole. Of a large one, blocks that it repeats are looked at by themselves, one of each
kind, on what it was given in a forward of the model; then all that lies around them, with blocks that only return what
they did. Pairs that lie across blocks are found in small models alone.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import replaced
from meshfit.anatomy.dataflow import Arguments
from meshfit.anatomy.pair import Pair, ParameterShard
from meshfit.anatomy.pairs import Pairs, find_pairs
from meshfit.anatomy.shares import divisors
from meshfit.axes.tensor.explain import as_degrees, numberless
from meshfit.axes.tensor.region import joined
from meshfit.axes.tensor.watch import Observed
from meshfit.errors import in_short
from meshfit.torch_private.trees import tree_leaves, tree_map

SMALL = 2**24
"""Parameters up to which a model is looked at as a whole."""

MOSTLY = 0.8
"""Share of a block in pairs above which nobody asks for more."""

WORTH_A_LOOK = 0.01
"""Share of the parameters that lies around blocks, below which it is not looked at."""


def find(model: nn.Module, seen: Observed, degree: int, apart: Collection[str] = ()) -> tuple[Pairs, list[str]]:
    """What can be split, and notes. Modules at ``apart`` are known already."""
    total = sum(p.numel() for p in model.parameters())
    if total <= SMALL:
        split = find_pairs(model, seen.inputs, degree=degree, copies=True, limits=False)
        return split, other_degrees(model, seen.inputs, split, "")
    found: list[tuple[str, Pairs]] = []
    """By the path of the module in which they were found."""
    gathered, whole = list[str](), list[str]()
    why: dict[str, str] = {}
    notes: list[str] = []
    stand_ins: dict[str, nn.Module] = {path: StandIn(seen.outputs[path]) for path in apart if path in seen.outputs}
    for paths in seen.blocks():
        rep = next(path for path in paths if path in seen.calls)
        stand_ins |= {path: StandIn(seen.outputs[rep]) for path in paths}
        try:
            block, given = model.get_submodule(rep), Arguments(*seen.calls[rep].inputs)
            split = find_pairs(block, given, degree=degree, copies=True, limits=False)
            notes += other_degrees(block, given, split, rep)
            found += [(path, split) for path in paths]
        except (RuntimeError, TypeError, ValueError) as error:
            notes.append(f"{rep}: cannot be run by itself: {in_short(error)}")
            gathered += [joined(p, name) for p in paths for name, _ in model.get_submodule(rep).named_parameters()]
    known = {joined(path, name) for path in stand_ins for name, _ in model.get_submodule(path).named_parameters()}
    rest = {name: p for name, p in model.named_parameters() if name not in known}
    if sum(p.numel() for p in rest.values()) >= WORTH_A_LOOK * total:
        try:
            around = find_pairs(replaced(model, stand_ins), seen.inputs, degree=degree, copies=True, limits=False)
            found.append(("", around))
        except (RuntimeError, TypeError, ValueError) as error:
            notes.append(f"around its blocks the model cannot be looked at: {in_short(error)}")
            gathered += [name for name in rest if name.endswith("weight")]
    else:
        why = dict.fromkeys(rest, "too small to be worth a collective")
        whole += rest
    pairs = tuple(_moved(pair, path) for path, split in found for pair in split.pairs)
    for path, split in found:
        gathered += [joined(path, name) for name in split.gathered]
        whole += [joined(path, name) for name in split.whole]
        why |= {joined(path, name): reason for name, reason in split.why.items()}
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    cover = sum(pair.bytes for pair in pairs) / max(size, 1)
    made = Pairs(degree=degree, pairs=pairs, gathered=tuple(gathered), whole=tuple(whole), why=why, cover=cover)
    return made, notes


def other_degrees(model: nn.Module, inputs: Any, found: Pairs, path: str) -> list[str]:
    """Of pairs that so many ranks cannot share, how many could: looked for where much is in no pair."""
    notes: list[str] = []

    def width(shard: ParameterShard) -> int:
        return sum(stop - start for ranges in shard.ranges for start, stop in ranges)

    for degree in (2, 3):
        if found.cover > MOSTLY or degree >= found.degree:
            break
        held = {shard.parameter for pair in found.pairs for shard in pair.shards}
        for pair in find_pairs(model, inputs, degree=degree).pairs:
            if not held & {shard.parameter for shard in pair.shards}:
                limits = [shard.limit for shard in pair.columns]
                widest = max(map(width, pair.columns))
                most = min(shard.limit for shard in pair.columns if width(shard) == widest)
                fits = [n for n in divisors(most) if all(limit % n == 0 or n % limit == 0 for limit in limits)]
                what = "heads" if pair.kind == "attention" else "channels"
                where = numberless(joined(path, pair.module))
                notes.append(f"{where or 'the model'}: {most} {what}: {as_degrees(fits)}")
        if notes:
            break
    return list(dict.fromkeys(notes))


class StandIn(nn.Module):
    """Returns what a module once did, touched by all that it is given."""

    one: Tensor

    def __init__(self, returned: Any):
        super().__init__()
        self.returned = returned
        self.register_buffer("one", torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        touched = self.one * 0
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not x.is_complex():
                touched = touched + 1e-3 * x.to(self.one.dtype).mean().tanh()

        def again(x: Any) -> Any:
            return x.to(touched.dtype) + touched if isinstance(x, Tensor) and x.is_floating_point() else x

        return tree_map(again, self.returned)


def _moved(pair: Pair, path: str) -> Pair:
    def shards(every: tuple[ParameterShard, ...]) -> tuple[ParameterShard, ...]:
        return tuple(replace(shard, parameter=joined(path, shard.parameter)) for shard in every)

    return replace(
        pair,
        module=joined(path, pair.module),
        columns=shards(pair.columns),
        rows=shards(pair.rows),
        others=shards(pair.others),
        partial=tuple(joined(path, name) for name in pair.partial),
        entries=tuple(joined(path, name) for name in pair.entries),
    )
