"""Cross entropy of logits that are cut over ranks by their classes: three numbers a token are summed, not the logits.

forward    all-reduce of the largest logit of each token; of its sum of exponentials and its target's logit
backward   each rank's own: softmax less the target, times the gradient
memory     the slice of the logits, and one number a token; its gradient in fp32 while it is made
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshfit.comm.group import MAX, Group
from meshfit.torch_private.kernels import assert_on_device


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Group,
    *,
    at: int = -1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As ``F.cross_entropy`` of the whole, from this rank's slice of the dim ``at``; the same on all ranks."""
    shape, dtype = target.shape, logits.dtype
    logits = logits.movedim(at, -1).reshape(-1, logits.shape[at])
    classes = logits.shape[-1] * group.size
    target = target.reshape(-1)
    keep = target != ignore_index
    _in_bounds(target, keep, classes)
    target = torch.where(keep, target, -1)
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else dtype
    start = group.rank * logits.shape[-1]
    of_classes = None
    if label_smoothing:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        of_classes = torch.ones(classes, device=logits.device, dtype=wide) if weight is None else weight.to(wide)
    apart, smooth = _CrossEntropy.apply(logits, target, of_classes, start, group)  # type: ignore[misc]
    counts = keep.to(apart.dtype)
    if weight is not None:
        counts = weight.to(apart.dtype)[target.clamp(min=0)] * counts
    each = torch.where(keep, apart, 0.0) * counts
    if label_smoothing:
        smooth = torch.where(keep, smooth, 0.0) * (label_smoothing / classes)
        each = each * (1 - label_smoothing) + smooth
    if reduction == "none":
        return each.view(shape).to(dtype)
    total = each.sum()
    return (total / counts.sum() if reduction == "mean" else total).to(dtype)


def _in_bounds(target: Tensor, keep: Tensor, classes: int) -> None:
    wrong = keep & ((target < 0) | (target >= classes))
    if wrong.device.type == "cuda":
        assert_on_device(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


class _CrossEntropy(torch.autograd.Function):
    """Of each token: the loss; and its mean over all classes, times their number, where that is asked for."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, start: int, group: Group
    ) -> tuple[Tensor, Tensor | None]:
        size = logits.shape[-1]
        wide = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
        top = group.all_reduce_(logits.amax(-1).to(wide), MAX)
        here = (target >= start) & (target < start + size)
        index = torch.where(here, target - start, 0)
        picked = logits.gather(-1, index[:, None])[:, 0].to(wide).masked_fill(~here, 0.0)
        sums = [(logits - top[:, None]).exp_().sum(-1), picked]  # logits in half are subtracted from as they are
        own = None
        if weight is not None:
            own, ctx.weights = weight[start : start + size], weight.sum()
            sums.append(logits.to(wide) @ own)
        total = group.all_reduce_(torch.stack(sums))
        scale = top + total[0].log()
        ctx.save_for_backward(logits, scale, index, here, own)
        return scale - total[1], None if weight is None else ctx.weights * scale - total[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, smooth: Tensor | None) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        logits, scale, index, here, own = ctx.saved_tensors
        each = grad if own is None or smooth is None else grad + ctx.weights * smooth
        out = (logits - scale[:, None]).exp_().mul_(each[:, None])
        out.scatter_add_(-1, index[:, None], -(grad * here)[:, None])
        if own is not None and smooth is not None:
            out.addcmul_(smooth[:, None], own, value=-1)
        return out.to(logits.dtype), None, None, None, None
