"""Cut a model's weights over the ranks of a tensor group, in place, and wrap the forwards at the borders of its
regions (border.py). Parameters keep their objects and names.

``check`` cuts copies of one module, with threads for ranks, as ``split_model`` cuts the model.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.cut_parameters import CutParameters, Undo
from meshfit.axes.forward import wrap
from meshfit.axes.tensor.border import Border, Forward
from meshfit.axes.tensor.functions import is_product
from meshfit.axes.tensor.region import Region, TensorPlan, joined
from meshfit.axes.tensors import check_ties
from meshfit.comm.draws import Stream
from meshfit.comm.group import Group, RankGroup

FAST_PATHS = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
"""Attributes of torch's transformer layers that allow, if they are not 0, kernels which read the weights themselves."""


def split_model(model: nn.Module, plan: TensorPlan, group: dist.ProcessGroup) -> CutParameters:
    """Cut ``model`` in place: the same weights on every rank before, a share of them after. Parameters keep their
    objects, names and ties; what a rank holds is in memory of its own, so the rest is free to go."""
    ties, ranks = tied(model), RankGroup(group)
    stream = Stream(ranks)
    undo = [step for region in plan.regions for step in cut(model, region, ranks, stream)]
    undo += _without_fast_paths(model, plan)
    check_ties(model, ties)
    return CutParameters(model, plan.cuts, ranks, undo, plan.shared)


def _without_fast_paths(model: nn.Module, plan: TensorPlan) -> list[Undo]:
    """Keep torch's transformer layers from reading cut weights by themselves, as they do where nothing is trained."""
    undo: list[Undo] = []
    for path, module in model.named_modules():
        for kind, name in FAST_PATHS.items():
            if isinstance(module, kind) and any(cut.startswith(f"{path}." if path else "") for cut in plan.cuts):
                undo.append(_set(module, name, 0))
    return undo


def cut(model: nn.Module, region: Region, group: Group, stream: Stream) -> list[Undo]:
    """Cut ``region`` of ``model``; returns what gives its attributes back their values."""
    home = model.get_submodule(region.module)
    for each in region.cuts:
        held = _tensor(home, each.name)
        held.data = each.of(held.data, group.rank)
    undo = [_patched(home.get_submodule(each.module), each.attribute, each.value) for each in region.patches]
    entered = {path: home.get_submodule(path) for path in region.enters}
    products = [layer for layer in entered.values() if is_product(layer)]
    alone = len(products) == len(entered) and not region.raw and not region.sources
    border = Border(group, stream if region.draws else None, products, alone=alone)

    def put(path: str, run: Any, *given: Any) -> None:
        wrap(home.get_submodule(path), lambda forward: partial(run, forward, *given))

    for path in region.heads:
        put(path, _local_heads, home.get_submodule(path))
    for path in region.lookups:
        module: Any = home.get_submodule(path)
        size = module.weight.shape[0]
        if (padding := module.padding_idx) is not None:
            own = padding - group.rank * size
            undo.append(_set(module, "padding_idx", own if 0 <= own < size else None))
        put(path, border.run_lookup, size)
    for path, layer in entered.items():
        put(path, *((border.run_column, layer) if layer in products else (border.run_entered,)))
    for path, dim in region.gathers:
        put(path, border.run_gathered, dim)
    for path in region.slices:
        put(path, border.run_sliced)
    for each in region.leaves:
        layer, holder = home.get_submodule(each.module), None
        if each.bias:
            holder = home.get_submodule(each.bias.rpartition(".")[0])
        put(each.module, border.run_leaving, layer, each, holder, is_product(layer))
    for each in region.raw:
        columns, rows = ([_tensor(home, name) for name in names] for names in (each.columns, each.rows))
        put(each.module, border.run_raw, columns, rows)
    for path in region.sources:
        put(path, border.run_source)
    for path in region.rows:
        put(path, border.run_rows)
    if not (region.gathers or region.lookups or region.slices or region.rows):
        put("", border.run_region)
    return undo


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    return getattr(module.get_submodule(path), own)


def _set(thing: Any, name: str, value: Any) -> Undo:
    before = getattr(thing, name)
    setattr(thing, name, value)
    return partial(setattr, thing, name, before)


def _patched(module: nn.Module, attribute: str, value: Any) -> Undo:
    name, *inner = attribute.split(".")
    if inner:  # settings that other modules read too: this one gets its own
        own = copy.copy(getattr(module, name))
        setattr(own, inner[0], value)
        value = own
    return _set(module, name, value)


def untraceable(model: nn.Module, region: Region) -> list[str]:
    """Paths of modules at whose calls ``region`` does what a compiler cannot trace."""
    home = model.get_submodule(region.module)
    borders = [*region.enters, *(each.module for each in region.leaves)]
    other = region.gathers or region.lookups or region.slices
    if other or (region.rows and region.draws):
        paths = [*borders, *(path for path, _ in region.gathers), *region.lookups, *region.slices, *region.rows]
        return [joined(region.module, path) for path in paths]
    plain = all(is_product(home.get_submodule(path)) for path in borders)
    biases = all(each.bias in ("", joined(each.module, "bias")) and each.dim == -1 for each in region.leaves)
    fits = plain and biases and not (region.draws or region.raw or region.sources or region.heads)
    return [] if fits else [region.module]


def _local_heads(
    whole: Forward,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """The forward of ``nn.MultiheadAttention`` with as many heads as the weights have; torch's asserts all of them."""
    batched = query.dim() == 3
    inputs = [x if batched else x.unsqueeze(0 if module.batch_first else 1) for x in (query, key, value)]
    inputs = [x if module.batch_first else x.transpose(0, 1) for x in inputs]
    weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    if module.in_proj_weight is not None:
        weights = list(module.in_proj_weight.chunk(3))
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in projected)
    mask = _mask(attn_mask, key_padding_mask, q)
    out = F.scaled_dot_product_attention(q, k, v, mask, module.dropout if module.training else 0.0)
    out = F.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    out = out if module.batch_first else out.transpose(0, 1)
    return out if batched else out.squeeze(0 if module.batch_first else 1), None


def _mask(attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one to be added; each says True, or minus infinity, where nothing is to be seen."""
    total = None
    for mask in (attention, None if padding is None else padding.view(-1, 1, 1, padding.shape[-1])):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
        mask = mask.to(q.dtype)
        total = mask if total is None else total + mask
    return total
