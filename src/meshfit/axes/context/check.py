"""The proof of a context plan, before anything is trained: steps whole, against their ranks in threads (prove.py).

What must agree: the loss on every rank, and the sum over the ranks of every gradient. In double precision code of the
model's that asks for single gets double.

What a model computes may depend on what it is given: a mask of packed documents is made where positions restart, one of
padding where there is some. So the step is tried on the user's samples together, on the same with padding and packed
positions put into them, and on each by itself whose forward takes another way through the model.
"""

import functools
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.copies import converted, to_precision
from meshfit.axes.context.find import ContextPlan, Step, begin, length_of, shortened, some
from meshfit.axes.context.piece import Piece, guarded
from meshfit.axes.prove import DRAWS, Refused, in_parts, in_precision, summed
from meshfit.axes.spec import name_of
from meshfit.comm.group import ThreadGroup
from meshfit.data import tree
from meshfit.torch_private.trees import tree_map

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Of a gradient, relative to the largest element of its tensor, or to a small part of the largest of all."""

SMALL = 1e-3

SAMPLES, TOGETHER = 8, 4
"""The most that are tried, and together: the others if they take another way through the model."""

ALWAYS = 2
"""Of the trials, the first: samples together, as they are and with padding and packed positions."""

WAYS = 4
"""Different ways through the model that are tried, at the most."""


def check(model: nn.Module, step: Step, batch: Any, plan: ContextPlan) -> None:
    """Raises ``Refused``. ``model`` has no dropout."""
    convert = functools.cache(partial(converted, model))
    proven: set[Hashable] = set()
    for place, each in enumerate(_trials(model, batch, plan)):

        def whole(twin: nn.Module, dtype: torch.dtype, place: int = place, each: Any = each) -> "Whole | None":
            cast = tree.map_tensors(lambda t: to_precision(t, dtype), each)
            way = _way(twin, step, cast, dtype)
            if place >= ALWAYS and (way in proven or len(proven) >= WAYS):
                return None
            loss, gradients = _gradients(twin, step, cast, 1, dtype)
            if lost := [name for name, grad in gradients.items() if grad is not None and not grad.sum().isfinite()]:
                raise ValueError(f"the gradient of {lost[0]} is not finite on one device")
            return cast, way, (loss, gradients)

        try:
            twin, dtype, made = in_precision(convert, TOLERANCE, whole)
        except Refused as refused:
            if place == 0:  # others were put together here, and the model need not take them
                raise Refused(f"the step cannot be tried: {refused}") from refused
            continue
        if made is None:
            continue
        cast, way, want = made
        with guarded():
            parts = in_parts(
                twin,
                ThreadGroup.make(plan.degree),
                lambda module, group: begin(module, plan, group),
                lambda module, group, cast=cast, dtype=dtype: _gradients(module, step, cast, plan.degree, dtype),
            )
        _compare(want, parts, TOLERANCE[dtype])
        proven.add(way)


# What is tried


def _trials(model: nn.Module, batch: Any, plan: ContextPlan) -> Iterator[Any]:
    there = max((len(t) for t in tree.tensors(batch) if t.dim()), default=1)
    batch = shortened(batch, plan.length - 1) if plan.length else batch  # one less: uneven parts
    together = some(batch, max(min(there, TOGETHER), plan.samples))
    yield together
    yield _altered(model, together)
    for sample in range(min(there, SAMPLES)):
        yield tree.map_tensors(lambda t, i=sample: t[i : i + 1] if t.dim() and len(t) == there else t, batch)


def _altered(model: nn.Module, batch: Any) -> Any:
    """``batch`` with what real data may have and these samples may lack: positions that restart within a row, padding
    on either side, tokens of another type."""
    length = length_of(batch)
    padding = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    fill = min(padding, default=0)
    third = max(length // 3, 1)

    def row(t: Tensor, place: int) -> Tensor:
        ends = slice(length - third, length) if place % 2 else slice(0, third)
        t = t.clone()
        if (t.diff() == 1).all():  # positions
            t[third + place % third :] -= t[third + place % third].clone()
        elif ((t == 0) | (t == 1)).all():  # a mask, or types
            t[ends] = t[ends].logical_not().to(t.dtype)
        elif (t >= 0).all():
            t[ends] = fill
        return t

    def alter(t: Tensor) -> Tensor:
        if t.is_floating_point() or t.is_complex() or t.dim() != 2 or t.shape[1] != length or length < 3:
            return t
        return torch.stack([row(each, place) for place, each in enumerate(t)])

    return tree.map_tensors(alter, batch)


def _way(model: nn.Module, step: Step, batch: Any, dtype: torch.dtype) -> Hashable:
    """The functions that a forward calls, in order, and which of their arguments are tensors, None or so."""
    with torch.no_grad(), _Alike(dtype) as seen:
        loss = step(model, batch)
    if not loss.isfinite():
        raise ValueError(f"the loss is {float(loss)}")
    return tuple(seen.called)


# The step


Made = tuple[float, dict[str, Tensor | None]]
"""The loss, and the gradients."""

Whole = tuple[Any, Hashable, Made]
"""The batch in a precision, the way that it takes through the model, and what one device makes of it."""


def _gradients(model: nn.Module, step: Step, batch: Any, ranks: int, dtype: torch.dtype) -> Made:
    model.zero_grad(set_to_none=True)
    with _Alike(dtype):
        loss = step(model, batch)
    (loss / ranks).backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


class _Alike(TorchFunctionMode):
    """What would tell ranks and one device apart beside their arithmetic: random numbers are the same each time, and
    single precision is ``dtype``."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.draws = dtype, 0
        self.called: list[Hashable] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), dict(kwargs or {})
        self.called.append((name, *map(_kind, args), *((key, _kind(value)) for key, value in kwargs.items())))
        if self.dtype == torch.float64:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args, kwargs = tree_map(lambda x: self.dtype if x is torch.float32 else x, (args, kwargs))
        if name not in DRAWS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.draws += 1
        kwargs["generator"] = torch.Generator().manual_seed(self.draws)
        if args and isinstance(x := args[0], Piece):  # of the whole's, those of a rank's positions
            own = x.span.of(func(x.whole().detach().clone(), *args[1:], **kwargs), x.group.rank)
            return x.copy_(own) if name.endswith("_") else Piece(own, x.span, x.group)
        return func(*args, **kwargs)


def _kind(value: Any) -> Hashable:
    return value if value is None or isinstance(value, bool) else type(value).__name__


def _compare(want: Made, parts: list[Made], tolerance: float) -> None:
    loss, gradients = want
    for rank, (other, _) in enumerate(parts):
        if not abs(other - loss) <= tolerance * max(abs(loss), SMALL):
            raise Refused(f"the loss is {loss:.9g}, and {other:.9g} on rank {rank}")
    largest = max((_largest(gradient) for gradient in gradients.values() if gradient is not None), default=0.0)
    for name, gradient in gradients.items():
        total = summed(other[name] for _, other in parts)
        if gradient is None or total is None:
            if gradient is not None and gradient.any():
                raise Refused(f"{name} has no gradient on any rank")
            continue
        floor = max(_largest(gradient), SMALL * largest)
        off = _largest(total - gradient)
        if not off <= tolerance * floor:
            raise Refused(f"the gradient of {name} is off by {off / (floor or 1.0):.1e} of its largest element")


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, torch.inf)) if x.numel() else 0.0
