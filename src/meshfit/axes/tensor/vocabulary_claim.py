"""Embeddings and heads as regions that are cut along the vocabulary: which can be, and the check that they are right.

One weight that is both is cut once, and both of its uses put their gradients into it. A head is cut this way if the
loss reads its logits in slices; if all of them are needed anyway, it is a layer whose output is gathered.

The check runs embedding and head on what they met in the model, with a small vocabulary: what is done with a class does
not depend on how many there are. The loss is part of it.
"""

import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.anatomy.shares import divisors
from meshfit.axes.tensor.check import ObservedCall, check, reference
from meshfit.axes.tensor.claim import around
from meshfit.axes.tensor.explain import as_degrees
from meshfit.axes.tensor.region import Cut, Patch, Region, even_ranges
from meshfit.axes.tensor.watch import Observed
from meshfit.comm.group import Traffic
from meshfit.torch_private.trees import tree_map

ENTRIES = 16
"""Of a rank, in the check."""


@dataclass(frozen=True)
class Candidates:
    embeddings: dict[str, nn.Embedding]
    heads: dict[str, nn.Linear]

    @property
    def paths(self) -> list[str]:
        return [*self.embeddings, *self.heads]

    @property
    def tensors(self) -> list[Tensor]:
        layers = (*self.embeddings.values(), *self.heads.values())
        return [p for layer in layers for p in layer.parameters(recurse=False)]


def candidates(model: nn.Module, kinds: dict[str, int], least: float) -> Candidates:
    """Layers with more entries than channels that hold ``least`` elements or more."""
    embeddings, heads = {}, {}
    common = list(kinds.values())
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.numel() >= least:
            odd = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
            if not odd and module.num_embeddings > module.embedding_dim:
                embeddings[path] = module
    tables = {id(module.weight) for module in embeddings.values()}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.numel() >= least:
            alone = common.count(kinds[path]) == 1 and module.out_features > module.in_features
            if alone or id(module.weight) in tables:
                heads[path] = module
    return Candidates(embeddings, heads)


def of_vocabulary(
    model: nn.Module, found: Candidates, seen: Observed, degree: int
) -> tuple[list[Region], dict[str, str]]:
    """Regions to be checked; and of weights that cannot be cut along the vocabulary, why not."""
    names = {id(p): name for name, p in model.named_parameters()}
    layers: dict[int, list[str]] = {}
    for path in found.paths:
        weight = model.get_submodule(path).weight
        if seen.called(path) and id(weight) in names:  # not one that a hook computes from another
            layers.setdefault(id(weight), []).append(path)
    regions, why = [], {}
    for weight, paths in layers.items():
        module: Any = model.get_submodule(paths[0])
        size, name = module.weight.shape[0], names[weight]
        heads = [path for path in paths if path in found.heads]
        if all(path in heads for path in paths) and any(_gathered(seen, path) for path in heads):
            continue
        if size % degree:
            why[name] = f"{size} entries: {as_degrees(divisors(size))}"
            continue
        if unseen := [path for path in paths if not seen.shapes.get(path)]:
            why[name] = f"{unseen[0]} is given no tensor: it makes its own indices"
            continue
        own = {id(p) for path in paths for p in model.get_submodule(path).parameters(recurse=False)}
        if any(seen.uses.get(p) != sum(seen.times[path] for path in paths if _holds(model, path, p)) for p in own):
            why[name] = "used by other code than its layers too"
            continue
        regions.append(_region(model, [names[p] for p in names if p in own], paths, heads, seen, degree))
    return regions, why


def _gathered(seen: Observed, path: str) -> bool:
    traffic = seen.traffic.get(path, ())
    return not traffic or any(each.op == "all_gather" for each in traffic)


def _holds(model: nn.Module, path: str, parameter: int) -> bool:
    return any(id(p) == parameter for p in model.get_submodule(path).parameters(recurse=False))


def _region(
    model: nn.Module, names: list[str], paths: list[str], heads: list[str], seen: Observed, degree: int
) -> Region:
    home = around([*paths, *(name.rpartition(".")[0] for name in names)])
    rest = len(home) + 1 if home else 0
    size, width = next(p.shape for p in map(model.get_parameter, names) if p.dim() == 2)
    lookups = [path for path in paths if path not in heads]
    patches = [Patch(path[rest:], "num_embeddings", size // degree) for path in lookups]
    patches += [Patch(path[rest:], "out_features", size // degree) for path in heads]
    traffic: list[Traffic] = []
    for path in lookups:
        shape = seen.shapes[path][0][0]
        traffic += [Traffic("all_reduce", False, prod(shape) * width, shape)] * seen.times[path]
    for path in heads:
        shape, trained = seen.shapes[path][0]
        traffic += [Traffic("all_reduce", True, prod(shape), shape)] * (seen.times[path] if trained else 0)
        traffic += seen.traffic[path]
    return Region(
        module=home,
        kind="tied" if lookups and heads else "head" if heads else "embedding",
        cuts=tuple(Cut(name[rest:], 0, even_ranges(size, degree)) for name in names),
        enters=tuple(path[rest:] for path in heads),
        lookups=tuple(path[rest:] for path in lookups),
        slices=tuple(path[rest:] for path in heads),
        patches=tuple(patches),
        traffic=tuple(traffic),
    )


def verify(model: nn.Module, region: Region, seen: Observed, degree: int) -> None:
    """Raises ``Refused`` if embedding, head and loss differ from those of one device."""
    size = ENTRIES * degree
    uses = _Uses([(model.get_submodule(path), seen.calls[path].inputs) for path in region.inner], size)
    place = {path: f"layers.{i}" for i, path in enumerate((*region.lookups, *region.slices))}
    small = region.renamed("", lambda name: place.get(name, name))
    cuts = tuple(Cut(name, 0, even_ranges(size, degree)) for name, _ in uses.named_parameters())
    small = replace(small, cuts=cuts, patches=tuple(replace(each, value=ENTRIES) for each in small.patches))
    check(reference(uses, ObservedCall((tuple(uses.given), {}), uses.used)), (small,), degree)


class _Uses(nn.Module):
    """Layers with a small vocabulary, each called on what it met, and the loss of each head."""

    def __init__(self, calls: list[tuple[nn.Module, Any]], size: int):
        super().__init__()
        memo: dict[int, Any] = {}
        for module, _ in calls:
            for parameter in module.parameters(recurse=False):
                small = parameter.detach()[:size].clone()
                if len(small) < size:
                    small = torch.cat([small] * size)[:size]
                memo[id(parameter)] = memo.get(id(parameter), nn.Parameter(small, parameter.requires_grad))
        self.layers = nn.ModuleList(copy.deepcopy(module, memo) for module, _ in calls)
        self.given = []
        self.used: tuple[bool, ...] = ()
        for module, (_, inputs) in zip(self.layers, calls, strict=True):
            if isinstance(module, nn.Embedding):
                module.num_embeddings = size
                if module.padding_idx is not None:
                    module.padding_idx %= size  # type: ignore[assignment]
                inputs = tree_map(lambda x: x % size if isinstance(x, Tensor) else x, inputs)
            else:
                module.out_features = size  # type: ignore[assignment]
            self.given.append(inputs)
            self.used += (True,) if isinstance(module, nn.Embedding) else (True, True)

    def forward(self, *given: Any) -> list[Tensor]:
        outs = []
        for module, (args, kwargs) in zip(self.layers, given, strict=True):
            outs.append(module(*args, **kwargs))
            if not isinstance(module, nn.Embedding):
                logits = outs[-1].reshape(-1, outs[-1].shape[-1])
                target = torch.arange(len(logits)) * 7 % logits.shape[-1]
                outs.append(F.cross_entropy(logits, torch.where(target % 5 == 4, -100, target)))
        return outs
