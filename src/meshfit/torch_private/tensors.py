"""Storages, views, versions and classes of tensors."""

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional
from torch import Tensor, nn


def storage_id(tensor: Tensor | torch.UntypedStorage) -> int:
    """A number that tensors have in common which share memory, as long as one of them lives. ``data_ptr`` is 0 for all
    that have no memory: on meta, or of no elements."""
    storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
    return storage._cdata


def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """What a typed storage is of; its public method warns of deprecation."""
    return storage._untyped_storage


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors there are on it, and one for each object that Python has for it."""
    return torch._C._storage_Use_Count(storage._cdata)


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 for one of inference mode, where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A saved tensor that stays where it is. Torch leaves it to hooks to see that it was not changed since."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(unbound(tensor), version(tensor))

    def get(self) -> Tensor:
        self.check()
        return self.tensor

    def check(self) -> None:
        """Raise what torch would, if it was changed."""
        if (now := version(self.tensor)) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(self.tensor.shape)}, {now - self.version} times"
            )


def unbound(tensor: Tensor) -> Tensor:
    """What a hook may hold of a saved tensor: detached, since a node must not hold its own result. A wrapper around
    tensors is in no graph itself and stays as it is: torch's checkpoint runs again from what it has saved, and the
    tensors inside must still be in theirs."""
    with without_subclasses():
        return tensor if tensor.grad_fn is None else tensor.detach()


def detached_alias(tensor: Tensor) -> Tensor:
    """Detached, below autograd, with the same count of changes in place: ``detach`` in a dispatch mode begins anew."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that a view is of."""
    return view._base


def call_a_parameter(tensor: Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` hold: some forwards ask."""
    tensor._is_param = True  # type: ignore[attr-defined]


def wrapper_of(kind: type[Any], shape: list[int], like: Tensor) -> Any:
    """A tensor of the subclass ``kind`` with a shape and no memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """``parameter.data = data``, also where the parameter is on meta and ``data`` is not: it stays the same object."""
    if not parameter.is_meta or data.is_meta:
        parameter.data = data
        return
    new: Any = Tensor._make_subclass(type(parameter), data.detach(), parameter.requires_grad)  # type: ignore[attr-defined]
    vars(new).update(vars(parameter))
    if parameter.requires_grad:
        set_grad_dtype(new, grad_dtype(parameter))
    torch.utils.swap_tensors(parameter, new)


def set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let its gradients be kept in ``dtype``, whatever the parameter's."""
    parameter.grad_dtype = dtype


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def local_part(tensor: Tensor) -> Tensor:
    """Of a DTensor what this rank holds, outside of autograd; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def without_subclasses() -> AbstractContextManager[None]:
    """No subclass is asked about functions called within; modes are."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[return-value]


def is_wrapper(kind: type) -> bool:
    """Whether a class of tensors is made of other tensors, like DTensor; fake tensors are not."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # there is none before it is imported, which takes long
    return hasattr(kind, "__tensor_flatten__") and not (fake is not None and issubclass(kind, fake.FakeTensor))


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
