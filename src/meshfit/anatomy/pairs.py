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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.pair import Pair
from meshfit.anatomy.pair_finder import PairFinder
from meshfit.torch_private.modules import Convolution

MOST_OF_MODULE = 0.4
"""A pair that holds this share of the lowest module around it comes before larger ones that lie across modules."""

LAYERS = (nn.Linear, nn.Embedding, Convolution)
"""Modules whose weight may be split by output channels, with the output gathered."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What of a model can be split, and how."""

    degree: int
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
        """The largest degree that all pairs allow; 1 if there is none."""
        return math.gcd(*(pair.limit for pair in self.pairs)) or 1


def find_pairs(model: nn.Module, inputs: Any, *, degree: int = 2, copies: bool = False, limits: bool = True) -> Pairs:
    """Find what can be split over ``degree`` devices, from one forward on ``inputs``; ``model`` stays as it is.

    ``inputs`` is a small batch: a tensor, a tuple of arguments, or a dict of keyword arguments. With ``copies`` several
    devices may hold the same share of a column: heads of keys and values that are fewer than the devices. Without
    ``limits`` the largest degree is not looked for, which takes as long as the rest: ``degree`` stands for it.
    """
    if degree < 2:
        raise ValueError(f"a split has two ways or more, not {degree}")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    modules = dict(model.named_modules())
    with torch.random.fork_rng(devices=[]):
        trace = AtenTrace.of(model, inputs)
        finder = PairFinder(trace, degree, copies=copies, limits=limits)
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
        if (
            plain
            and name not in entries
            and dim is not None
            and trace.model.get_parameter(name).shape[dim] % degree == 0
        ):
            gathered.append(name)
        else:
            whole.append(name)
    return Pairs(
        degree=degree,
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
