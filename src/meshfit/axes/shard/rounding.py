"""What several products take of one tensor, rounded once.

Autocast rounds the input of every product by itself, and autograd keeps each copy: three for the queries, keys and
values of an attention. Here they share one. Each product still has a node of its own, which hands its gradient back in
fp32, so sums and results are those of autocast to the last bit.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from meshfit.torch_private.operators import in_function_transform
from meshfit.torch_private.tensors import version


class SharedCopies:
    """The copy of the tensor that was rounded last, as long as that tensor lives."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._version, self._copy = 0, torch.empty(0)

    def __call__(self, x: Any, dtype: torch.dtype) -> Any:
        """``x`` as autocast would hand it to a product; what it would leave alone as it is."""
        plain = type(x) is Tensor and x.dtype == torch.float32 and x.requires_grad and torch.is_grad_enabled()
        if not plain or torch.compiler.is_compiling() or in_function_transform():
            return x
        known = self._of is not None and self._of() is x and self._version == version(x) and self._copy.dtype == dtype
        if not known:
            self._of, self._version = weakref.ref(x, self._forget), version(x)
            self._copy = x.detach().to(dtype)
        return _Rounded.apply(x, self._copy)

    def _forget(self, reference: "weakref.ref[Tensor]") -> None:
        if reference is self._of:
            self._of, self._copy = None, torch.empty(0)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].float(), None
