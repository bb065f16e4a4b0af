"""The tensors of a model: by name, tied ones, and their device."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.torch_private.modules import own_buffers
from meshfit.torch_private.tensors import set_data


def check_ties(model: nn.Module, ties: dict[str, str]) -> None:
    """Assert that tied parameters are still tied: otherwise they would train silently wrong."""
    now = tied(model)
    assert now == ties, f"tied parameters were untied: {sorted(ties.items() ^ now.items())}"


def shared_names(model: nn.Module) -> set[str]:
    """Parameters that are known by several names: all of those names."""
    ties = tied(model)
    return {*ties, *ties.values()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, tied ones under each of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def parameters_to(model: nn.Module, device: torch.device, apart: Collection[Tensor] = ()) -> None:
    """Move parameters, but for those ``apart``, to the device; those on meta get memory there, to be filled."""
    for p in model.parameters():
        if p not in apart:
            set_data(p, torch.empty_like(p.detach(), device=device) if p.is_meta else p.data.to(device))


def buffers_to(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                own_buffers(module)[name] = moved.setdefault(id(buffer), buffer.to(device))
