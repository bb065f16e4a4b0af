"""A narrow stand-in for a model of Hugging Face that is too large for trials, or on meta: a few layers, each of its
widths divided by one number, the heads as many. What tensor= and context= find on it is taken for the large one too:
the same cuts of all its layers, as many times as wide, and as many bytes more in their collectives.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.context.plan import ContextPlan
from meshfit.axes.tensor.region import Cut, Region, TensorPlan, joined
from meshfit.comm.group import Traffic
from meshfit.data import tree

LAYERS = 2
HEAD = 8
"""Width of a head of the stand-in: kernels of attention take multiples of it."""

TOKENS = 64
SAMPLES = 13
"""As many as splits are tried on."""

WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "moe_intermediate_size")


@dataclass(frozen=True)
class NarrowModel:
    model: nn.Module
    batch: Any
    factor: int
    """How many times narrower it is."""
    width: int
    """Of its activations."""
    longer: float
    """How many times longer sequences are."""
    layers: int
    """Of the large one."""

    def tensor(self, plan: TensorPlan, large: nn.Module) -> TensorPlan | None:
        """``plan``, of the stand-in, for ``large``; None where that has other shapes than it should."""
        shapes = {name: tuple(p.shape) for name, p in (*large.named_parameters(), *large.named_buffers())}
        regions = [region for each in plan.regions for region in self._in_all_layers(each)]
        regions = [self._region(region) for region in regions]
        for region in regions:
            for cut in region.cuts:
                if shapes.get(joined(region.module, cut.name), ())[cut.dim : cut.dim + 1] != (cut.size,):
                    return None
        elements = {name: p.numel() for name, p in large.named_parameters()}
        return replace(plan, regions=tuple(regions), elements=elements, traffic=self._several(plan.traffic))

    def context(self, plan: ContextPlan) -> ContextPlan:
        return replace(plan, traffic=self._several(plan.traffic))

    def _several(self, traffic: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
        """Of all layers, for that of the stand-in's: what is said the same in each of them, so many times."""
        counts: dict[Traffic, int] = {}
        for each in map(self._wide, traffic):
            counts[each] = counts.get(each, 0) + 1
        more = lambda count: count * self.layers // LAYERS if count >= LAYERS else count
        return tuple(each for each, count in counts.items() for _ in range(more(count)))

    def _in_all_layers(self, region: Region) -> list[Region]:
        parts = region.module.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        if not numbers:
            return [region]
        if parts[numbers[0]] != "0":
            return []
        at = numbers[0]
        named = lambda layer: ".".join((*parts[:at], str(layer), *parts[at + 1 :]))
        return [replace(region, module=named(layer)) for layer in range(self.layers)]

    def _region(self, region: Region) -> Region:
        cuts = tuple(
            Cut(
                cut.name,
                cut.dim,
                tuple(tuple((a * self.factor, b * self.factor) for a, b in own) for own in cut.ranges),
            )
            for cut in region.cuts
        )
        return replace(region, cuts=cuts, traffic=tuple(map(self._wide, region.traffic)))

    def _wide(self, each: Traffic) -> Traffic:
        wide = self.factor if len(each.shape) > 2 or each.shape[-1:] == (self.width,) else 1
        return replace(each, elements=round(each.elements * wide * self.longer))


def narrow_config(config: Any) -> tuple[Any, int] | None:
    """``config`` with each of its widths divided by one number, which comes with it; None where one does not divide."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factor = max(1, width // HEAD)
    small: Any = copy.deepcopy(config)
    for word in WIDTHS:
        if isinstance(size := getattr(config, word, None), int):
            if size % factor:
                return None
            setattr(small, word, size // factor)
    return small, factor


def narrowed(model: nn.Module, batch: Any, tokens: int) -> NarrowModel | None:
    """Of ``model``, whose samples have ``tokens``; None where it has no config of the usual words."""
    config: Any = getattr(model, "config", None)
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "num_hidden_layers", 0)
    inputs = [t for t in tree.tensors(batch) if t.dim()]
    if not heads or layers <= LAYERS or not tokens or any(t.is_floating_point() for t in inputs):
        return None
    found = narrow_config(config)
    if found is None:
        return None
    small, factor = found
    small.num_hidden_layers = LAYERS
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        small.layer_types = kinds[:LAYERS]
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        made = type(model)(small)
    length = min(TOKENS, tokens)

    def short(t: Tensor) -> Tensor:
        sizes = (SAMPLES, *(length if size == tokens else size for size in t.shape[1:])) if t.dim() else ()
        return torch.randint(2, small.vocab_size, sizes, generator=torch.Generator().manual_seed(0)).to(t.dtype)

    return NarrowModel(made, tree.map_tensors(short, batch), factor, small.hidden_size, tokens / length, layers)
