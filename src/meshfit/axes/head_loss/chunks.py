"""A head and its cross entropy, some tokens at a time: all logits are never there at once.

    forward    of each chunk: logits, loss, and at once the gradients of the head's input and weight
    backward   multiplies them by the gradient of the loss
    memory     a chunk of logits, a few times over; the gradients of input and weight, from the loss to its backward
    traffic    none; where classes are cut over ranks, that of their cross entropy, for each chunk

Where the gradient of the loss is not one number (``reduction="none"``), where it must come first so that nothing is
too small for fp16, and while the weight's gradients of another microbatch still wait, backward computes each chunk
again instead: a product more, and nothing of the weight's size kept.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from meshfit.axes.tensor.functions import cross_entropy, loss_denominator
from meshfit.comm.group import Group

if TYPE_CHECKING:
    from meshfit.axes.head_loss.logits import Head

INPUTS = 2.0
"""A chunk has as many logits as the head's whole input has elements, times this."""

LEAST = 2**18
"""Logits in a chunk: fewer are not worth a product of their own."""


def chunk_rows(rows: int, width: int, classes: int) -> int:
    """Tokens in a chunk."""
    return max(1, min(rows, max(ceil(INPUTS * rows * width / classes), ceil(LEAST / classes))))


@dataclass(frozen=True, slots=True)
class Autocast:
    """Whether products are rounded."""

    device: str
    dtype: torch.dtype | None

    @staticmethod
    def now(device: torch.device) -> "Autocast":
        on = torch.is_autocast_enabled(device.type)
        return Autocast(device.type, torch.get_autocast_dtype(device.type) if on else None)

    def of_product(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None or dtype == torch.float64 else self.dtype

    def __call__(self) -> Any:
        """Around what is computed as it would have been then."""
        if self.device == "meta":
            return nullcontext()
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not None, cache_enabled=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """How a chunk is computed."""

    of_head: Autocast
    of_loss: Autocast
    todo: Sequence[tuple[Any, tuple, dict[str, Any]]]
    """Done to the logits before their loss."""
    dtype: torch.dtype
    """Of the logits, then."""
    group: Group | None
    """The ranks over which classes are cut."""
    weight: Tensor | None
    """Of classes."""
    ignore_index: int
    reduction: str
    label_smoothing: float

    def losses(self, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """Of each token."""
        with self.of_head():
            logits = F.linear(rows, weight, bias)
        with self.of_loss():
            for func, args, kwargs in self.todo:
                logits = func(logits, *args, **kwargs)
            how = {"weight": self.weight, "ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
            if self.group is None:
                return F.cross_entropy(logits, target, reduction="none", **how)
            return cross_entropy(logits, target, self.group, reduction="none", **how)

    def run(
        self, given: tuple[Tensor, Tensor, Tensor | None], target: Tensor, wants: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss of each token; and, where ``wants`` says so, the gradients of rows, weight and bias from ``grad``,
        that of each loss (None: ones)."""
        rows, weight, bias = given[0].detach(), given[1].detach(), given[2]
        dtype = self.of_head.of_product(weight.dtype)  # rounded once, not for each chunk
        size, losses = chunk_rows(len(rows), rows.shape[1], weight.shape[0]), []
        found = [_zeros(x) if want and x is not None else None for x, want in zip(given, wants, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
            own = weight.to(dtype).requires_grad_(wants[1])
            own_bias = None if bias is None else bias.detach().to(dtype).requires_grad_(wants[2])
            for start in range(0, len(rows), size):
                part = rows[start : start + size].requires_grad_(wants[0])
                each = self.losses(part, own, own_bias, target[start : start + size])
                losses.append(each.detach())
                sums = [None if found[0] is None else found[0][start : start + size], *found[1:]]
                leaves = zip((part, own, own_bias), sums, strict=True)
                pairs = [(x, to) for x, to in leaves if x is not None and to is not None]
                if pairs:
                    above = torch.ones_like(each) if grad is None else grad[start : start + size].to(each.dtype)
                    terms = torch.autograd.grad(each, [x for x, _ in pairs], above)
                    for (_, to), term in zip(pairs, terms, strict=True):
                        to.add_(term)
        made = [x if x is None or like is None else x.to(like.dtype) for x, like in zip(found, given, strict=True)]
        return torch.cat(losses) if losses else rows.new_zeros(0, dtype=torch.float32), made


def _zeros(x: Tensor) -> Tensor:
    """To sum in."""
    return torch.zeros_like(x, dtype=_wide(x.dtype))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class HeldGradients:
    """Of one loss, from its forward to its backward."""

    gradients: list[Tensor | None] | None = None

    def take(self, grad: Tensor) -> list[Tensor | None]:
        """Times ``grad``, in their own memory: once."""
        if self.gradients is None:
            raise RuntimeError("recompute=loss: a second backward through one loss; its gradients were used up")
        found, self.gradients = self.gradients, None
        return [x if x is None else x.mul_(grad) for x in found]


class HeadLoss(torch.autograd.Function):
    """The loss of each token; with ``held`` their sum, whose gradients are computed at once."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        chunks: Chunks,
        held: HeldGradients | None,
    ) -> Tensor:
        ctx.chunks, ctx.held = chunks, held
        wants = [held is not None and need for need in ctx.needs_input_grad[:3]]
        losses, gradients = chunks.run((rows, weight, bias), target, wants, None)
        if held is None:
            ctx.save_for_backward(rows, weight, bias, target)
            return losses
        held.gradients = gradients
        return losses.sum(dtype=_wide(losses.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.held is not None:
            return (*ctx.held.take(grad), None, None, None)
        rows, weight, bias, target = ctx.saved_tensors
        _, gradients = ctx.chunks.run((rows, weight, bias), target, ctx.needs_input_grad[:3], grad)
        return (*gradients, None, None, None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def chunked_cross_entropy(
    head: "Head", rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: Chunks
) -> Tensor:
    """As ``F.cross_entropy`` of all logits."""
    shape, target = target.shape, target.reshape(-1)
    waits = None if head.held is None else head.held()
    rounded = chunks.of_head.of_product(rows.dtype)
    at_once = chunks.reduction != "none" and rounded != torch.float16 and (waits is None or waits.gradients is None)
    held = HeldGradients() if at_once else None
    head.held = head.held if held is None else ref(held)
    made: Tensor = HeadLoss.apply(rows, weight, bias, target, chunks, held)  # type: ignore[assignment]
    if chunks.reduction == "none":
        return made.view(shape)
    dtype = chunks.dtype if chunks.of_loss.dtype is None else _wide(chunks.dtype)  # as autocast has it
    total = made if at_once else made.sum(dtype=_wide(made.dtype))
    if chunks.reduction == "mean":
        total = total / loss_denominator(target, chunks.weight, chunks.ignore_index)
    return total.to(dtype)
