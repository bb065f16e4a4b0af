"""Modules: what they hold, their hooks and calls; base classes that have no public name."""

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils import parametrize

from meshfit.patches import replaced

__all__ = ["BatchNorm", "Convolution", "Dropout", "RunningNorm"]  # base classes of all dims, with no public name


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, as it holds them: what is put there is not asked whether it is one, None included."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Likewise."""
    return module._buffers


def emptied(module: nn.Module) -> nn.Module:
    """A copy with the attributes of ``module``, and without parameters, buffers and modules."""
    other = copy.copy(module)
    other._parameters, other._buffers, other._modules = {}, {}, {}
    return other


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Likewise; ``named_children`` leaves out None, and what comes a second time."""
    return module._modules


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def parts_of_parametrized(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]] | None:
    """Of a module whose weights torch computes from others (``parametrizations.weight_norm``): what it can be sent as.
    torch refuses to pickle the class that it makes for each."""
    if not parametrize.is_parametrized(module):
        return None
    return type(module).__mro__[1], vars(module)


def parametrized(kind: type[nn.Module], held: dict[str, Any]) -> nn.Module:
    """Such a module of its parts."""
    module = kind.__new__(kind)
    vars(module).update(held)
    parametrize._inject_new_class(module)
    for name in vars(module)["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)
    return module


def wrap_call(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Go around a module's call, its hooks included; ``module.forward`` is without them."""
    module.__dict__["_call_impl"] = around(module._call_impl)


def unwrap_call(module: nn.Module) -> None:
    module.__dict__.pop("_call_impl", None)


def map_tensors_in_place(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> nn.Module:
    """``fn`` of all parameters and buffers, as ``module.to`` does: parameters stay the objects that they are."""
    return module._apply(fn)


def without_weak_references(model: nn.Module) -> bool:
    """Whether nothing refers weakly to its parameters, as ``set_data`` needs it; torch's recurrent layers do so no
    more."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            count = len(module._flat_weight_refs)  # by which a parameter that was replaced is noticed: none will be
            module._flat_weight_refs = [None] * count
    return not any(weakref.getweakrefcount(p) for p in model.parameters())


def refresh_flat_weights(module: Any) -> None:
    """Recurrent layers keep a list of their weights beside their parameters: it would hold those that were replaced."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def batches_of_one() -> AbstractContextManager[None]:
    """Within it ``F.batch_norm`` of this thread takes a single value a channel."""
    return replaced(torch.nn.functional, "_verify_batch_size", lambda before: lambda size: None)


def in_place_of_rejection_sampling(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Within it ``make(before)`` is called where ``nn.init.trunc_normal_`` draws until all numbers are within its
    bounds."""
    return replaced(torch.nn.init, "_no_grad_trunc_normal_", make)
