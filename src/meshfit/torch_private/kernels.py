"""Kernels: of lists of tensors, grouped products, attention; and the operators that stand for them in a trace."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshfit.torch_private.operators import unregister

aten: Any = torch.ops.aten

foreach_add, foreach_copy_, foreach_lerp_ = torch._foreach_add, torch._foreach_copy_, torch._foreach_lerp_
foreach_mul_, foreach_norm, foreach_zero_ = torch._foreach_mul_, torch._foreach_norm, torch._foreach_zero_
"""One kernel for a list of tensors: documented, as a beta."""

assert_on_device = torch._assert_async
"""Fails the stream, later, where a tensor holds False: the host does not wait."""

negated_view = torch._neg_view

scaled_mm = torch._scaled_mm
"""A product of matrices in 8 bits, with scales."""

_grouped: dict[str, tuple[int, torch.library.Library]] = {}
_grouping = threading.Lock()


@contextmanager
def grouped_products_in_autocast(device: str = "cuda") -> Iterator[None]:
    """Within it, in all threads, autocast to bfloat16 holds for ``F.grouped_mm`` too, as for every other matrix
    product: in fp32 torch runs it as a loop, for which the host waits. Its kernel takes rows of a multiple of 16 bytes;
    others stay as they are. The first who enters registers it, which takes a while, the last who leaves takes it
    back."""
    with _grouping:
        users, library = _grouped.get(device) or (0, _autocast_of_grouped_products(device))
        _grouped[device] = users + 1, library
    try:
        yield
    finally:
        with _grouping:
            users, library = _grouped.pop(device)
            if users > 1:
                _grouped[device] = users - 1, library
            else:
                unregister(library)


def _autocast_of_grouped_products(device: str) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    key = f"Autocast{device.upper()}"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key):
        return library  # torch does so by itself

    def product(x: Tensor, weight: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
        fits = all(size % 8 == 0 for size in (x.shape[-1], *weight.shape[-2:]))
        if fits and torch.get_autocast_dtype(device) is torch.bfloat16:
            x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        with torch.autocast(device, enabled=False):
            return aten._grouped_mm(x, weight, offs, bias, out_dtype)

    library.impl("_grouped_mm", product, key)
    return library


attention_by_products = aten._scaled_dot_product_attention_math
attention_on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
attention_on_cuda = aten._scaled_dot_product_flash_attention
attention_on_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
attention_on_cuda_backward = aten._scaled_dot_product_flash_attention_backward
cudnn_attention = aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = aten._scaled_dot_product_cudnn_attention_backward
attention_with_bias_on_cuda = aten._scaled_dot_product_efficient_attention
softmax_kernel, log_softmax_kernel = aten._softmax, aten._log_softmax
BATCH_NORMS = aten.native_batch_norm, aten.cudnn_batch_norm, aten._native_batch_norm_legit
scaled_product = aten._scaled_mm
grouped_product = aten._grouped_mm
recurrence_on_cuda = aten._cudnn_rnn
recurrence_on_cuda_backward = aten._cudnn_rnn_backward
convolution_of_scripts = aten._convolution


class AttentionKernel:
    """A kernel of attention in parts, without masks and dropout: beside its result it gives, of each query, the
    log-sum-exp of its scores; and the gradients of a part, given the result and log-sum-exps of all its parts."""

    def __init__(self, kind: SDPBackend, on_cpu: bool, scale: float | None):
        self.cudnn, self._on_cpu, self._scale = kind == SDPBackend.CUDNN_ATTENTION, on_cpu, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """The result, the log-sum-exps [..., queries, 1], and what backward is to be given."""
        if self._on_cpu:
            out, total = attention_on_cpu(q, k, v, 0.0, causal, scale=self._scale)
            return out, total.unsqueeze(-1), ()
        if self.cudnn:
            out, total, *rest = cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=self._scale)
        else:
            out, total, *rest = attention_on_cuda(q, k, v, 0.0, causal, False, scale=self._scale)
        return out, total if total.dim() == out.dim() else total.unsqueeze(-1), tuple(rest[:6])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        total: Tensor,
        state: tuple[Any, ...],
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries, keys and values."""
        given = grad, q, k, v, out
        if self._on_cpu:
            return attention_on_cpu_backward(*given, total.squeeze(-1), 0.0, causal, scale=self._scale)
        *sizes, seed, offset = state
        if self.cudnn:
            rest = (total.contiguous(), seed, offset, None, *sizes, 0.0, causal)
            return cudnn_attention_backward(*given, *rest, scale=self._scale)
        rest = (total.squeeze(-1).contiguous(), *sizes, 0.0, causal, seed, offset)
        return attention_on_cuda_backward(*given, *rest, scale=self._scale)


def attention_kernel(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, grouped: bool) -> AttentionKernel | None:
    """What torch takes for causal attention of these; None if it takes one that has no such parts."""
    if q.device.type not in ("cpu", "cuda") or (q.is_cuda and q.shape[-1] % 8) or q.shape[-1] != v.shape[-1]:
        return None
    kind = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped))
    known = (SDPBackend.FLASH_ATTENTION, *(() if q.is_cpu else (SDPBackend.CUDNN_ATTENTION,)))
    return AttentionKernel(kind, q.is_cpu, scale) if kind in known else None


GROUPED_PRODUCTS = grouped_product, aten._scaled_grouped_mm
FUSED_ATTENTIONS = (
    attention_on_cpu,
    attention_on_cuda,
    attention_with_bias_on_cuda,
    cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
)
FUSED_ATTENTIONS_BACKWARD = (
    attention_on_cpu_backward,
    attention_on_cuda_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    cudnn_attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
)
RAGGED_ATTENTIONS = aten._flash_attention_forward, aten._efficient_attention_forward
VIEWS_NOT_SAID = aten._unsafe_view, aten._reshape_alias
"""Their schema does not say that they share memory with what they are given."""
