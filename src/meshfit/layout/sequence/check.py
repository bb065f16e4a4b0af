"""The proof of a context plan, before anything is trained: one step whole, against its ranks as threads.

In double precision, where a difference is no rounding, or in single if a kernel refuses that: the loss on every rank,
and the sum over the ranks of every gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshfit.data import tree
from meshfit.layout.sequence.find import ContextPlan, Step, begin
from meshfit.layout.sequence.piece import guarded
from meshfit.layout.split.ops import Meeting, Threads
from meshfit.layout.split.twin import converted, sharing

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Of a gradient, relative to the largest element of its tensor, or to a small part of the largest of all. Norms and
losses are often computed in single precision, whatever they are given."""

SMALL = 1e-3


class Differs(Exception):
    """A rank's part does not add up to the whole: where, in words."""


def check(model: nn.Module, step: Step, batch: Any, plan: ContextPlan) -> None:
    """Raises ``Differs``. ``model`` draws no random numbers."""
    refused: Exception | None = None
    for dtype, tolerance in TOLERANCE.items():
        cast = tree.map_tensors(lambda t, dtype=dtype: t.to(dtype) if t.is_floating_point() else t, batch)
        try:
            want = _gradients(twin := converted(model, dtype), step, cast, 1)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            refused = error
            continue
        return _compare(want, _parts(twin, step, cast, plan), tolerance)
    raise Differs(f"the step cannot be tried: {refused}")


Made = tuple[float, dict[str, Tensor | None]]


def _gradients(model: nn.Module, step: Step, batch: Any, ranks: int) -> Made:
    loss = step(model, batch)
    (loss / ranks).backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def _parts(model: nn.Module, step: Step, batch: Any, plan: ContextPlan) -> list[Made]:
    meeting = Meeting(plan.ways)
    copies = [sharing(model) for _ in range(plan.ways)]
    for rank, each in enumerate(copies):
        begin(each, plan.beginnings, Threads(meeting, rank))

    try:
        with guarded():
            return meeting.run(lambda rank: _gradients(copies[rank], step, batch, plan.ways))
    except Exception as error:
        raise Differs(f"{type(error).__name__}: {error}") from error


def _compare(want: Made, parts: list[Made], tolerance: float) -> None:
    loss, gradients = want
    for rank, (other, _) in enumerate(parts):
        if not abs(other - loss) <= tolerance * max(abs(loss), SMALL):
            raise Differs(f"the loss is {loss:.9g}, and {other:.9g} on rank {rank}")
    largest = max((float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0.0)
    for name, gradient in gradients.items():
        others = [other[name] for _, other in parts if other[name] is not None]
        if gradient is None or not others:
            if gradient is not None and gradient.any():
                raise Differs(f"{name} has no gradient on any rank")
            continue
        total = torch.stack(others).sum(0)  # type: ignore[arg-type]
        floor = max(float(gradient.abs().max()) if gradient.numel() else 0.0, SMALL * largest)
        off = float((total - gradient).abs().max()) if gradient.numel() else 0.0
        if not off <= tolerance * floor:
            raise Differs(f"the gradient of {name} is off by {off / (floor or 1.0):.1e} of its largest element")
