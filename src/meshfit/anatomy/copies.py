"""Copies of a model to run once and look at: the model itself stays as it is."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_program import PLAIN, TraceError, tensors
from meshfit.errors import in_short
from meshfit.torch_private.modules import map_tensors_in_place


def twin(model: nn.Module, *, meta: bool) -> nn.Module:
    """A copy of ``model``: on meta (no memory, no values) or as it is. Whatever a forward does to it, the model and
    what it holds stay as they were; what cannot be copied is shared."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise TraceError("the model has lazy modules", "run it once on a batch, so that its shapes are known")
        memo[id(tensor)] = _like(tensor, meta=meta)
    return copied(model, memo)


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, in which ``memo`` says what stands for which tensor: also of a model whose attributes hold tensors
    that were computed, which Python's own refuses. What cannot be copied is shared."""
    for module in model.modules():
        for thing in vars(module).values():
            if not isinstance(thing, PLAIN) and id(thing) not in memo:
                for tensor in tensors(thing) if not isinstance(thing, nn.Module) else ():
                    memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        for module in model.modules():
            for name, thing in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules") and not _copyable(thing, memo, model):
                    memo[id(thing)] = thing
        return copy.deepcopy(model, dict(memo))


def _like(tensor: Tensor, *, meta: bool) -> Tensor:
    data = torch.empty_like(tensor.detach(), device="meta") if meta else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        new: Tensor = nn.Parameter(data, requires_grad=tensor.requires_grad)
    else:
        new = data.requires_grad_(tensor.requires_grad)
    for name, thing in vars(tensor).items():  # marks that libraries leave on parameters
        setattr(new, name, thing)
    return new


def _copyable(thing: Any, memo: dict[int, Any], model: nn.Module) -> bool:
    shared = dict(memo) | {id(module): module for module in model.modules()}
    try:
        copy.deepcopy(thing, shared)
    except Exception:
        return False
    return True


class Uncopied(Exception):
    """A model of which there can be no copy: why not."""


def study(model: nn.Module) -> nn.Module:
    """A copy on the CPU that has its own attributes and buffers, and shares the memory of the weights. Those that are
    all alike are copied and get some noise: zeros would hide what follows. Those that a forward writes are copied."""
    random = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    written = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None}
    for parameter in model.parameters():
        weight = parameter.detach().cpu()
        if _is_flat(weight):
            weight = weight + 0.1 * torch.randn(weight.shape, generator=random).to(weight.dtype)
        elif id(parameter) in written:
            weight = weight.clone()
        # a parameter of its own: autograd remembers the shape of one that was used, and this one will be cut
        memo[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    try:
        twin = copied(model, memo).cpu().train()
    except Exception as error:
        raise Uncopied(in_short(error)) from error
    for module in twin.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # type: ignore[union-attr]
    return twin


def _is_flat(weight: Tensor) -> bool:
    if not weight.is_floating_point() or not weight.numel():
        return False
    first = weight.flatten()[:8]
    return bool((first == first[0]).all()) and bool((weight == first[0]).all())


def converted(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in another precision; what is complex stays so."""
    memo = _parameters(module, lambda weight: to_precision(weight, dtype).clone())
    for held in (x for each in module.modules() for x in vars(each).values() if isinstance(x, Tensor)):
        memo[id(held)] = to_precision(held.detach(), dtype).clone()
    return map_tensors_in_place(copied(module, memo), lambda t: to_precision(t, dtype))


def to_precision(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return x.to(dtype) if x.is_floating_point() else x


def sharing(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own that lie in the same memory."""
    return copied(module, _parameters(module, lambda weight: weight))


def _parameters(module: nn.Module, data: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """A parameter in place of each, on ``data`` of what it holds: by id."""
    return {id(p): nn.Parameter(data(p.detach()), requires_grad=p.requires_grad) for p in module.parameters()}


def replaced(model: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with the same parameters, and other modules at the paths ``others``."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo |= {id(model.get_submodule(path)): module for path, module in others.items()}
    return copied(model, memo)
