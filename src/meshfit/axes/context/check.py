"""The proof of a context plan, before anything is trained: steps whole, against their ranks in threads (prove.py).

What must agree: the loss on every rank, and the sum over the ranks of every gradient. In double precision code of the
model's that asks for single gets double.

What a model computes may depend on what it is given: a mask of packed documents is made where positions restart, one of
padding where there is some. So the step is tried on the user's samples together, on the same with padding and packed
positions put into them, and on each by itself whose forward takes another way through the model.
"""

import functools
import threading
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.copies import converted, to_precision
from meshfit.axes.context.find import Step, length_of, shortened, some
from meshfit.axes.context.piece import Piece, guarded
from meshfit.axes.context.plan import ContextPlan, begin
from meshfit.axes.prove import DRAWS, Refused, in_parts, in_precision
from meshfit.axes.spec import name_of
from meshfit.comm.group import ThreadGroup
from meshfit.data import tree
from meshfit.torch_private.trees import tree_map

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Of a gradient, relative to the largest element of its tensor, or to a small part of the largest of all."""

LARGE = 2**27
"""Parameters above which a model is tried in single precision: in double it takes twice the memory and the time."""

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
    large = sum(p.numel() for p in model.parameters()) > LARGE
    dtypes = [dtype for dtype in TOLERANCE if not (large and dtype == torch.float64)]
    proven: set[Hashable] = set()
    for place, each in enumerate(_trials(model, batch, plan)):

        def whole(twin: nn.Module, dtype: torch.dtype, place: int = place, each: Any = each) -> "Whole | None":
            cast = tree.map_tensors(lambda t: to_precision(t, dtype), each)
            way = _way(twin, step, cast, dtype)
            if place >= ALWAYS and (way in proven or len(proven) >= WAYS):
                return None
            loss, gradients = _gradients(twin, step, cast, dtype)
            if lost := [name for name, grad in gradients.items() if grad is not None and not grad.sum().isfinite()]:
                raise ValueError(f"the gradient of {lost[0]} is not finite on one device")
            return cast, way, loss, _Remainder(gradients)

        try:
            twin, dtype, made = in_precision(convert, dtypes, whole)
        except Refused as refused:
            if place == 0:  # others were put together here, and the model need not take them
                raise Refused(f"the step cannot be tried: {refused}") from refused
            continue
        if made is None:
            continue
        cast, way, loss, remainder = made
        with guarded():
            losses = in_parts(
                twin,
                ThreadGroup.make(plan.degree),
                lambda module, group: begin(module, plan, group),
                partial(_part, step, cast, plan.degree, dtype, remainder),
            )
        _compare(loss, losses, remainder, TOLERANCE[dtype])
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


class _Remainder:
    """What is left of the gradients of one device, when those of ranks are taken off as they are made: all of them at
    once would be as many models."""

    def __init__(self, gradients: dict[str, Tensor | None]):
        self.left, self.made = gradients, set[str]()
        """Parameters of which a rank made a gradient."""
        self.largest = {name: _largest(grad) for name, grad in gradients.items() if grad is not None}
        self._lock = threading.Lock()

    def take(self, name: str, parameter: Tensor) -> None:
        made, parameter.grad = parameter.grad, None
        with self._lock:
            self.made.add(name)
            if (left := self.left[name]) is not None and made is not None:
                left.sub_(made)


Whole = tuple[Any, Hashable, float, _Remainder]
"""The batch in a precision, the way that it takes through the model, and what one device makes of it."""


def _gradients(model: nn.Module, step: Step, batch: Any, dtype: torch.dtype) -> tuple[float, dict[str, Tensor | None]]:
    """The loss of one device, and its gradients."""
    model.zero_grad(set_to_none=True)
    with _Alike(dtype):
        loss = step(model, batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def _part(
    step: Step, batch: Any, ranks: int, dtype: torch.dtype, rest: _Remainder, model: nn.Module, group: ThreadGroup
) -> float:
    """The loss on one rank, whose gradients are taken off the ``rest``."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(rest.take, name))
    with _Alike(dtype):
        loss = step(model, batch)
    (loss / ranks).backward()
    return float(loss.detach())


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


def _compare(loss: float, losses: list[float], rest: _Remainder, tolerance: float) -> None:
    for rank, other in enumerate(losses):
        if not abs(other - loss) <= tolerance * max(abs(loss), SMALL):
            raise Refused(f"the loss is {loss:.9g}, and {other:.9g} on rank {rank}")
    largest = max(rest.largest.values(), default=0.0)
    for name, left in rest.left.items():
        if left is None:
            continue
        if name not in rest.made:
            if left.any():
                raise Refused(f"{name} has no gradient on any rank")
            continue
        floor = max(rest.largest[name], SMALL * largest)
        off = _largest(left)
        if not off <= tolerance * floor:
            raise Refused(f"the gradient of {name} is off by {off / (floor or 1.0):.1e} of its largest element")


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, torch.inf)) if x.numel() else 0.0
