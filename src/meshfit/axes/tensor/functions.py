"""Autograd functions of a step under tensor=: products with weights that are cut by output channels, and the cross
entropy of logits that are cut by classes.

Products: the gradient of their input is summed over the ranks while the gradients of their weights are computed.
Autograd runs what is ready in the reverse order of forward, so what is put between two nodes there runs between them:

    forward    arrive(x), then the weights of all layers that x enters, then enter(x), then the products
    backward   products: the gradient of x alone; enter: its sum over ranks is started; weights: their gradients;
               arrive: the sum is waited for

Where it enters nothing else, x does so in the dtype that autocast gives to products: that is what travels.

Cross entropy: three numbers a token are summed over the ranks, not the logits.

    forward    all-reduce of the largest logit of each token; of its sum of exponentials and its target's logit
    backward   each rank's own: softmax less the target, times the gradient
    memory     the slice of the logits, and one number a token; its gradient in fp32 while it is made
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshfit.axes.forward import is_wrapped
from meshfit.axes.tensor.region import SEQUENCE
from meshfit.comm import collectives
from meshfit.comm.collectives import Collective, even
from meshfit.comm.group import MAX, Group
from meshfit.torch_private.autograd import will_run
from meshfit.torch_private.kernels import assert_on_device
from meshfit.torch_private.tensors import storage_id

# Products


def is_product(layer: nn.Module) -> bool:
    """Whether it is a plain product with its weight, as nn.Linear or the Conv1D of Hugging Face, and nothing more."""
    plain = type(layer) is nn.Linear or (type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"))
    return plain and not is_wrapped(layer) and "forward" not in vars(layer)


def product_weights(layer: nn.Module) -> Tensor:
    """[out, in]."""
    weight: Any = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.t()


class Entrance:
    """``x`` on its way into ``layers``, or also elsewhere if these are not ``alone``. ``length``: it is a rank's rows
    of so many, and what enters is all of them, gathered."""

    def __init__(self, x: Tensor, layers: Iterable[nn.Module], group: Group, length: int = 0, *, alone: bool = False):
        self._sum = _Sum(alone)
        x = Arrive.apply(in_autocast(x) if alone else x, self._sum)  # type: ignore[assignment]
        self._weights = {layer: self._entered(layer) for layer in layers}
        self.x: Tensor = Enter.apply(x, self._sum, group, length)  # type: ignore[assignment]

    def product(self, layer: nn.Module) -> Tensor:
        weights, tensors = self._weights.get(layer) or self._entered(layer)
        return ColumnProduct.apply(in_autocast(self.x), *tensors, weights)  # type: ignore[return-value]

    @staticmethod
    def _entered(layer: nn.Module) -> "tuple[_Weights, tuple[Tensor, Tensor | None]]":
        weights = _Weights(turned=not isinstance(layer, nn.Linear))
        return weights, Weights.apply(weights, layer.weight, layer.bias)  # type: ignore[return-value]


def in_autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast gives to products."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


class _Sum:
    """The sum of a gradient, under way."""

    def __init__(self, alone: bool):
        self.alone = alone
        """Products alone make the gradient, so its memory is free to hold the sum."""
        self.wait: Callable[[], object] | None = None


class _Weights:
    """What the gradients of one layer's weights need, for one entrance. Not the weights: the graph holds on to it, and
    they may be dropped after the forward, and gathered again."""

    def __init__(self, *, turned: bool):
        self.turned = turned
        """[in, out], as in Conv1D."""
        self.owed: list[tuple[Tensor, Tensor]] = []
        """Gradients of the output, with the input: what the gradients of the weights are to be computed from."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of the weight and the bias."""
        owed, self.owed = self.owed, []
        pairs = [(grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])) for grad, x in owed]
        weights = [x.t().mm(grad) if self.turned else grad.t().mm(x) for grad, x in pairs]
        biases = [grad.sum(0) for grad, _ in pairs]
        return sum(weights[1:], weights[0]), sum(biases[1:], biases[0])


class Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.total.wait is not None:
            ctx.total.wait()
            ctx.total.wait = None
        return grad, None


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum, group: Group, length: int) -> Tensor:
        ctx.total, ctx.group = total, group
        ctx.parts = (SEQUENCE, even(length, group.size)) if length else ()
        return collectives.FORWARD["all_gather"](x, group, *ctx.parts) if length else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        name = "reduce_scatter" if ctx.parts else "reduce"
        if torch.is_grad_enabled():
            return Collective.apply(grad, name, ctx.group, *ctx.parts), None, None, None
        if not ctx.parts:
            grad = grad.contiguous() if ctx.total.alone else grad.clone(memory_format=torch.contiguous_format)
        found, ctx.total.wait = collectives.start(name, grad, ctx.group, *ctx.parts)
        return found, None, None, None


class Weights(torch.autograd.Function):
    """The weight and the bias of a layer. Their gradients are computed when autograd comes here."""

    @staticmethod
    def forward(ctx: Any, weights: _Weights, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.weights = weights
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.weights.owed:
            grads = tuple(map(_with, grads, ctx.weights.gradients()))
        return None, *grads


def _with(grad: Tensor | None, owed: Tensor) -> Tensor | None:
    """``owed``, and what came beside: where a gradient is differentiated, weights have other uses than in products."""
    if grad is None:
        return None
    owed = owed.to(grad.dtype)
    return owed if storage_id(grad) == storage_id(_nothing(grad.device, grad.dtype)) else owed + grad


class ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: _Weights) -> Tensor:
        ctx.weights, ctx.bias = weights, None if bias is None else (bias.shape, bias.dtype)
        ctx.save_for_backward(x, weight)
        own = weight.to(x.dtype)
        return F.linear(x, own.t() if weights.turned else own, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        weights, flat = ctx.weights, grad.reshape(-1, grad.shape[-1])
        of_input, *of_weights = (node is not None and will_run(node) for node, _ in ctx.next_functions)
        own = weight.to(grad.dtype)
        found = flat.mm(own.t() if weights.turned else own).view(x.shape) if of_input else None
        if not any(of_weights):
            return found, None, None, None
        weights.owed.append((flat, x))
        if torch.is_grad_enabled():  # it may be differentiated again: nothing is put off
            of_weight, of_bias = weights.gradients()
            return found, of_weight.to(weight.dtype), of_bias if ctx.bias else None, None
        later = [_nothing(grad.device, weight.dtype).expand(weight.shape), None]
        if ctx.bias is not None:
            shape, dtype = ctx.bias
            later[1] = _nothing(grad.device, dtype).expand(shape)
        return found, *later, None


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """In place of a gradient that is computed later. There must be one: autograd runs a node without any in another
    thread."""
    return torch.zeros((), device=device, dtype=dtype)


# Cross entropy


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
    check_range(torch.where(keep, target, 0), classes, "Target {} is out of bounds.")
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


def loss_denominator(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean of a cross entropy is over: the targets that are not ignored, each by the weight of its class."""
    kept = target != ignore_index
    return kept.sum() if weight is None else (weight[torch.where(kept, target, 0)] * kept).sum()


def check_range(index: Tensor, size: int, message: str) -> None:
    """Raise ``IndexError`` with the first of ``index`` that is not from 0 to ``size``. On a GPU, which is not waited
    for, an assertion fails instead; on meta there is nothing to look at."""
    if index.is_meta:
        return
    wrong = (index < 0) | (index >= size)
    if index.is_cuda:
        assert_on_device(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(message.format(int(index[wrong][0])))


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
