"""Frozen weights that bitsandbytes holds in 4 bits: codes in a parameter, and what they stand for beside it.

A layer's ``quant_state`` (scales, the table of codes) is no parameter and no buffer. It goes where the layer goes, and
checkpoints hold it, so that codes are never read by other scales than their own. The library is not imported: its
layers are known by what they have.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.torch_private.modules import own_parameters

PARTS = ("absmax", "code", "offset")


def quantised(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Name and module of each such layer, and its state."""
    for path, module in model.named_modules():
        own = own_parameters(module)  # not the attribute: a parametrization would run
        weight = own["weight"] if "weight" in own else None  # noqa: SIM401  a scripted module's has no get
        if weight is not None and not weight.is_floating_point():
            state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
            if state is not None:
                yield path, module, state


def prepare(model: nn.Module) -> nn.Module:
    """Have the layers keep their state themselves, where it survives that a parameter is sent or moved; and their
    codes in one order: on some CPUs a forward without gradients would pack them anew. They compute in the precision
    that they were quantised from, unless told: else in that of whatever they see first, which may be a trial."""
    for _, module, state in quantised(model):
        layer: Any = module
        layer.quant_state = state
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            layer.support_avx512bf16_for_cpu = False
        if getattr(layer, "compute_type_is_set", True) is False:
            layer.compute_dtype, layer.compute_type_is_set = state.dtype, True
    return model


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors beside the codes, by name."""
    found = {}
    for path, _, state in quantised(model):
        for level, each in (("weight", state), ("weight.nested", getattr(state, "state2", None))):
            for part in PARTS:
                if isinstance(tensor := getattr(each, part, None), Tensor):
                    found[f"{path}.{level}.{part}"] = tensor
    return found


def states_to(model: nn.Module, device: torch.device) -> None:
    for _, _, state in quantised(model):
        state.to(device)
