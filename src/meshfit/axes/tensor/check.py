"""The proof of a tensor plan, before anything is cut: a module whole, against its parts in threads (prove.py).

On inputs that it met in a forward of the model. What must agree, element by element: the outputs that are used, the
gradients of its inputs and of every parameter, buffers that it changes.

Where dropout is met is noted: on what all ranks hold alike it must be drawn from their common stream, on what is shared
out from each rank's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import converted, sharing
from meshfit.axes.prove import Close, PassResult, Refused, in_parts, in_precision, run_once, size_of, summed
from meshfit.axes.tensor.cut import cut
from meshfit.axes.tensor.region import Region, joined
from meshfit.comm.draws import Stream
from meshfit.comm.group import ThreadGroup, Traffic
from meshfit.errors import in_short
from meshfit.generators import Generators

TOLERANCE = {torch.float64: (1e-8, 1e-5), torch.float32: (2e-4, 1e-2)}
"""By how much an element may differ, relative to itself and to the root mean square of its tensor; and how small that
may be beside those of the others, before it is taken for rounding of zero."""


@dataclass(eq=False)
class ObservedCall:
    """What one call of a module was given, and which of the real tensors that it returned were used."""

    inputs: Any
    """(args, kwargs), detached; those that needed a gradient say so, and what was one tensor is one."""

    used: tuple[bool, ...] = ()


@dataclass(eq=False)
class Reference:
    """What a module computes as a whole, for one call."""

    module: nn.Module
    call: ObservedCall
    dtype: torch.dtype
    draws: bool
    result: PassResult


def reference(module: nn.Module, call: ObservedCall) -> Reference:
    """Run ``module`` on ``call``; raises ``Refused`` if it cannot be run by itself."""
    met: list[Tensor | None] = []

    def run(whole: nn.Module, dtype: torch.dtype) -> PassResult:
        met.clear()
        before = Generators(torch.device("cpu"))
        result = _run(sharing(whole), call, dtype, met.append)
        if before.moved_others:
            raise Refused("draws random numbers of Python or NumPy, so that two runs cannot be compared")
        return result

    whole, dtype, result = in_precision(partial(converted, module), TOLERANCE, run)
    return Reference(whole, call, dtype, bool(met), result)


def check(whole: Reference, regions: Sequence[Region], degree: int) -> tuple[tuple[str, ...], tuple[Traffic, ...]]:
    """Whether ``regions`` of the module compute what it does as a whole; raises ``Refused`` if not.

    Returns the names of parameters, among those the regions call partial, whose gradients have to be summed; and the
    collectives of one call.
    """
    groups = ThreadGroup.make(degree)
    streams = [Stream(group) for group in groups]

    def cut_all(module: nn.Module, group: ThreadGroup) -> None:
        try:
            for region in regions:
                cut(module, region, group, streams[group.rank])
        except (AttributeError, RuntimeError, TypeError, AssertionError) as error:
            raise Refused(f"cannot be cut: {in_short(error)}") from error

    def run(module: nn.Module, group: ThreadGroup) -> PassResult:
        stream = streams[group.rank]

        def met(x: Tensor | None) -> None:
            if x is None:
                if stream.inside:
                    raise Refused("draws random numbers inside, other than for dropout")
                return
            every = group.share(x.detach())
            alike = all(part.shape == x.shape and torch.allclose(part, every[0]) for part in every)
            if alike == stream.inside:
                raise Refused("drops out what all ranks hold alike and what is shared out in one go")

        return _run(module, whole.call, whole.dtype, met)

    results = in_parts(whole.module, groups, cut_all, run)
    return _compared(whole, regions, results), tuple(groups[0].log)


def _run(module: nn.Module, call: ObservedCall, dtype: torch.dtype, met: Any) -> PassResult:
    random = torch.Generator().manual_seed(3)

    def weights(at: int, output: Tensor) -> Tensor | None:
        used = not call.used or (at < len(call.used) and call.used[at])
        return torch.randn(output.shape, generator=random).to(dtype) if used else None

    return run_once(module, call.inputs, dtype, met, weights)


def _compared(whole: Reference, regions: Sequence[Region], parts: list[PassResult]) -> tuple[str, ...]:
    want, close = whole.result, _close(whole)
    cuts = {joined(region.module, each.name): each for region in regions for each in region.cuts}
    claimed = {joined(region.module, name) for region in regions for name in region.partial}
    compared = 0
    for rank, part in enumerate(parts):
        if len(part.outputs) != len(want.outputs):
            unused = not any(whole.call.used[len(part.outputs) :]) and len(part.outputs) < len(want.outputs)
            if not unused:
                raise Refused("returns another number of tensors")
        for used, got, right in zip(whole.call.used, part.outputs, want.outputs, strict=False):
            compared += used
            if used and not close(got, right):
                raise Refused("its output differs")
        for got, right in zip(part.inputs, want.inputs, strict=True):
            if not close.gradient(got, right):
                raise Refused("the gradient of its input differs")
        for name, right in want.buffers.items():
            if not right.is_floating_point():
                continue
            if not close(part.buffers[name], cuts[name].part(right, rank) if name in cuts else right):
                raise Refused(f"{name} differs")
        for name, right in want.parameters.items():
            if name not in cuts:
                continue
            own, ranges = None if right is None else cuts[name].part(right, rank), cuts[name].ranges
            alike = [other.parameters[name] for other, held in zip(parts, ranges, strict=True) if held == ranges[rank]]
            if not close.gradient(summed(alike), own):
                raise Refused(f"the gradient of {name} differs")
    if not compared:
        raise Refused("nothing that it returns is used: there is nothing to compare")
    partial = []
    for name, right in want.parameters.items():
        grads = [part.parameters[name] for part in parts]
        if name in cuts or all(close.gradient(grad, right) for grad in grads):
            continue
        total = summed(grads)
        if name not in claimed or total is None or not close.gradient(total, right):
            raise Refused(f"the gradient of {name}, which every rank holds, differs")
        partial.append(name)
    return tuple(partial)


def _close(whole: Reference) -> Close:
    tolerance, floor = TOLERANCE[torch.float32 if whole.result.narrow else whole.dtype]
    grads = (*whole.result.parameters.values(), *whole.result.inputs)
    return Close(tolerance, floor * max((size_of(grad) for grad in grads if grad is not None), default=1.0))
