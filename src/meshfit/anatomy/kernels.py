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

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfit.torch_private import (
    attention_by_products,
    attention_on_cpu,
    attention_on_cuda,
    attention_with_bias_on_cuda,
    rms_norm_on_cuda,
    unregister,
)

aten = torch.ops.aten


@contextmanager
def standing_for(target: str) -> Iterator[None]:
    """Within it, in every thread, meta tensors run by the kernels of ``target``: "cuda" or "cpu"."""
    cuda = target == "cuda"

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
        if not _fused(query, key, value, attn_mask, dropout_p, enable_gqa, cuda=cuda):
            return attention_by_products(
                *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
            )[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        if not cuda:
            return attention_on_cpu(*(query, key, value, dropout_p, is_causal), attn_mask=attn_mask, scale=scale)[0]
        if attn_mask is None and query.element_size() == 2:
            width, short = value.shape[-1], -value.shape[-1] % 8
            if short:
                query, key, value = (F.pad(tensor, (0, short)) for tensor in (query, key, value))
            seen = attention_on_cuda(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return seen[..., :width] if short else seen
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        return attention_with_bias_on_cuda(*(query, key, value, attn_mask, True, dropout_p, is_causal), scale=scale)[0]

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        return (
            aten.native_dropout(x, p, True)[0] if train and 0 < p < 1 else aten.dropout.default.decompose(x, p, train)
        )

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return rms_norm_on_cuda(x, shape, weight, eps)[0]

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        if cuda:
            library.impl("dropout", dropout, "AutogradMeta")
            library.impl("rms_norm", rms_norm, "AutogradMeta")
        yield
    finally:
        unregister(library)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, grouped: bool, *, cuda: bool
) -> bool:
    """Whether the device has one kernel for this attention."""
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]):
        return False
    if cuda:
        half = query.element_size() == 2
        return query.dtype != torch.float64 and ((half and mask is None) or not grouped)
    return dropout == 0 and (mask is None or not mask.requires_grad)
