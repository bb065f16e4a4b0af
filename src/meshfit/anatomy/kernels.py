"""Which kernels meta tensors stand for.

torch runs some functions on meta tensors by another way than on any device: attention with the whole matrix of
scores, dropout with a mask of floats. What they would keep for backward is then far off. ``standing_for`` gives them,
for a while, the kernels that a device would choose.

    attention   cuda: flash for half precision without a mask, otherwise memory-efficient; the whole matrix
                for doubles, and for grouped heads in full precision. cpu: flash, unless there is dropout or
                the mask needs a gradient
    dropout     cuda: a mask of one byte an element
    rms_norm    cuda: one kernel

Recurrent layers stay as they are: step by step on meta tensors, one kernel on devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.torch_private.kernels import (
    attention_by_products,
    attention_on_cpu,
    attention_on_cuda,
    attention_with_bias_on_cuda,
)
from meshfit.torch_private.operators import forget_dispatch, unregister

aten = torch.ops.aten


@contextmanager
def standing_for(target: str, *, half: bool = False) -> Iterator[None]:
    """Within it, in every thread, meta tensors run by the kernels of ``target``: "cuda" or "cpu". ``half``: those of
    fp32 stand for tensors of a half precision."""
    cuda = target == "cuda"

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        return (
            aten.native_dropout(x, p, True)[0] if train and 0 < p < 1 else aten.dropout.default.decompose(x, p, train)
        )

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return _FusedRMSNorm.apply(x, weight, len(shape))  # type: ignore[return-value]

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention(cuda, half), "AutogradMeta")
        if cuda:
            library.impl("dropout", dropout, "AutogradMeta")
            library.impl("rms_norm", rms_norm, "AutogradMeta")
        yield
    finally:
        unregister(library)


@contextmanager
def attention_of_cuda() -> Iterator[None]:
    """Within it, in every thread, fake tensors on the CPU attend by the kernels of CUDA."""
    kernel, usual = _attention(True, False), aten.scaled_dot_product_attention.default

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain = type(query) in (Tensor, nn.Parameter)  # of another thread
        return (usual.decompose if plain else kernel)(query, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        forget_dispatch(usual)
        yield
    finally:
        unregister(library)
        forget_dispatch(usual)


def _attention(cuda: bool, half: bool) -> Callable[..., Tensor]:
    is_half = lambda query: query.element_size() == 2 or (half and query.dtype == torch.float32)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        halves = is_half(query)
        fused = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
        if cuda:
            fused &= query.dtype != torch.float64 and ((halves and attn_mask is None) or not enable_gqa)
        else:
            fused &= dropout_p == 0 and (attn_mask is None or not attn_mask.requires_grad)
        if not fused:
            return attention_by_products(
                *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
            )[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        if not cuda:
            return attention_on_cpu(*(query, key, value, dropout_p, is_causal), attn_mask=attn_mask, scale=scale)[0]
        if attn_mask is None and halves:
            width, short = value.shape[-1], -value.shape[-1] % 8
            if short:
                query, key, value = (F.pad(tensor, (0, short)) for tensor in (query, key, value))
            seen = attention_on_cuda(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return seen[..., :width] if short else seen
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        return attention_with_bias_on_cuda(*(query, key, value, attn_mask, True, dropout_p, is_causal), scale=scale)[0]

    return attention


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps what the kernel on GPUs keeps; on meta tensors torch has no such kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        scale = x.new_empty((*x.shape[: x.dim() - dims], *(1 for _ in range(dims))), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
