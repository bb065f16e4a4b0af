"""``precision=fp8``: products of linear layers in 8-bit floating point (e4m3), scaled by rows as they come.

Of ``x @ w.T`` each row of ``x`` (a token) and each row of ``w`` (an output feature) has a scale of its own, its largest
element over the largest of the format. So it is in backward for the gradient of ``x``; that of ``w``, a sum over all
tokens of a batch, stays a product in bf16. What a token's row becomes then depends on no other token: shares of a batch
and microbatches are quantised as one device quantises them. (torchao calls this ``rowwise_with_gw_hp``.)

Layers whose sizes do not divide by 16 are computed in bf16. Everything else is as under ``precision=bf16``. On CPUs
products are emulated: the same numbers of 8 bits, multiplied in fp32; slow, and meant for tests.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfit.errors import PlanError
from meshfit.torch_private.kernels import scaled_mm

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
DIVISOR = 16
"""Of the sizes that the kernel takes."""


def check_device(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise PlanError(
            "precision=fp8 needs a GPU of compute capability 9.0 (Hopper) or later",
            f"{torch.cuda.get_device_name(device)} has {torch.cuda.get_device_capability(device)}",
            "precision=bf16 works",
        )
    if device.type not in ("cuda", "cpu"):
        raise PlanError(f"precision=fp8 is not there on {device.type}", "precision=bf16 works")


class LinearInFp8(TorchFunctionMode):
    """Within it ``F.linear`` is computed in fp8, where its sizes fit."""

    def __torch_function__(self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            plain = type(x) is Tensor and weight.dim() == 2 and x.is_floating_point() and weight.is_floating_point()
            if plain and all(size % DIVISOR == 0 for size in weight.shape):
                return _Linear.apply(x, weight, bias)
        return func(*args, **(kwargs or {}))


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        ctx.save_for_backward(rows, weight)
        ctx.shape, ctx.given, ctx.bias = x.shape, x.dtype, None if bias is None else bias.dtype
        made = product(rows, weight.to(torch.bfloat16))
        if bias is not None:
            made = made + bias.to(torch.bfloat16)
        return made.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0]).to(torch.bfloat16)
        of_x = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = product(gradient, weight.to(torch.bfloat16).t()).view(ctx.shape).to(ctx.given)
            if ctx.needs_input_grad[1]:
                of_weight = (gradient.t() @ rows).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.sum(0, dtype=torch.float32).to(ctx.bias)
        return of_x, of_weight, of_bias


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` in bf16, of rows in fp8."""
    (quantised, scale), (other, by) = quantise(a), quantise(b)
    if a.is_cuda:
        return scaled_mm(quantised, other.t(), scale_a=scale, scale_b=by.t(), out_dtype=torch.bfloat16)
    with torch.autocast(a.device.type, enabled=False):
        return ((quantised.float() * scale) @ (other.float() * by).t()).to(torch.bfloat16)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in 8 bits, contiguous, and what it is to be multiplied by, one number a row."""
    wide = rows.contiguous().float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FORMAT), scale
