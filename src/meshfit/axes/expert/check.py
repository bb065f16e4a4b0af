"""The proof of a mixture's spread, before anything is cut: whole, against its parts in threads.

The module that meets the others runs once as it is, and once as ``degree`` threads of this process, each with its own
experts and its own, unevenly many, of the rows that it was given in a forward of the model. What must agree: outputs,
the gradients of inputs and parameters, buffers. In double precision, where a difference is no rounding; in
single if its kernels refuse that, as grouped products do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.expert.mixture import Mixture
from meshfit.axes.expert.spread import bounds, spread
from meshfit.axes.expert.travel import OverThreads, Travel
from meshfit.axes.tensor.check import NoDraws, Refused, first_line, tensors_of
from meshfit.axes.tensor.ops import Meeting, Threads
from meshfit.axes.tensor.twin import converted, sharing
from meshfit.errors import MeshfitError
from meshfit.torch_private import tree_flatten, tree_unflatten

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""By how much an element may differ, relative to the root mean square of its tensor: some routers round to fp32."""

Given = tuple[tuple, dict[str, Any]]


@dataclass(eq=False)
class Result:
    outputs: list[Tensor]
    inputs: list[Tensor | None]
    """Their gradients."""
    parameters: dict[str, Tensor | None]
    """Their gradients."""
    buffers: dict[str, Tensor]


def check(model: nn.Module, mixture: Mixture, given: Given) -> None:
    """Raises ``Refused`` if the parts of ``mixture`` do not compute what it does as a whole on ``given``."""
    part = model.get_submodule(mixture.module)
    mixture, degree = mixture.relative(), len(mixture.cuts[0].ranges)
    rows = _rows(given)
    edges = [0, *(max(1, rows // (2 * degree)) + r * rows // degree for r in range(degree - 1)), rows]
    if sorted(set(edges)) != edges:
        raise Refused(f"{rows} rows are too few to try it on")
    refused: Exception | None = None
    for dtype, tolerance in TOLERANCE.items():
        whole = converted(part, dtype)
        try:
            want = _run(sharing(whole), given, dtype, rows, (0, rows))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            refused = error
            continue
        return _check_parts(whole, mixture, given, want, list(pairwise(edges)), tolerance)
    assert refused is not None
    raise Refused(_said(refused)) from refused


def _check_parts(
    whole: nn.Module, mixture: Mixture, given: Given, want: "Result", spans: list[tuple[int, int]], tolerance: float
) -> None:
    degree, dtype, rows = len(spans), next(whole.parameters()).dtype, spans[-1][1]
    copies, meeting = [sharing(whole) for _ in range(degree)], Meeting(degree)
    for rank, each in enumerate(copies):
        spread(each, mixture, Travel(OverThreads(Threads(meeting, rank)), 0, mixture.count))
    try:
        parts = meeting.run(lambda rank: _run(copies[rank], given, dtype, rows, spans[rank]))
    except Refused:
        raise
    except Exception as error:
        raise Refused(_said(error)) from error
    _compare(want, parts, {cut.name: cut.ranges for cut in mixture.cuts}, partial(_near, tolerance=tolerance))


def _rows(given: Given) -> int:
    return next((len(t) for t in tree_flatten(given)[0] if isinstance(t, Tensor) and t.dim()), 0)


def _said(error: BaseException) -> str:
    return f"{'' if isinstance(error, MeshfitError) else f'{type(error).__name__}: '}{first_line(error)}"


def _run(module: nn.Module, given: Given, dtype: torch.dtype, rows: int, part: tuple[int, int]) -> Result:
    leaves, spec = tree_flatten(given)
    origin: list[Tensor] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        own = leaf[slice(*part)] if leaf.dim() and len(leaf) == rows else leaf
        leaves[i] = own = own.detach().clone()
        if own.is_floating_point():
            own = own.to(dtype).requires_grad_()
            origin.append(own)
            leaves[i] = own.clone()  # a module may write to its inputs
    args, kwargs = tree_unflatten(leaves, spec)
    with torch.enable_grad(), NoDraws(_met):
        outputs = [out for out in tensors_of(module(*args, **kwargs)) if out.dim()]
        total = torch.zeros((), dtype=dtype)
        for output in outputs:
            times = len(output) // (part[1] - part[0])
            random = torch.Generator().manual_seed(3)
            weights = torch.randn(rows * times, *output.shape[1:], generator=random, dtype=dtype)
            if output.requires_grad:
                total = total + (output * weights[part[0] * times : part[1] * times]).sum()
        if total.requires_grad:
            total.backward()
    return Result(
        [output.detach() for output in outputs],
        [x.grad for x in origin],
        {name: p.grad for name, p in module.named_parameters()},
        dict(module.named_buffers()),
    )


def _met(x: Tensor | None) -> None:
    if x is None:
        raise Refused("it draws random numbers, other than for dropout")


def _compare(want: Result, parts: list[Result], cuts: dict[str, tuple], near: Callable[..., bool]) -> None:
    if any(len(part.outputs) != len(want.outputs) for part in parts) or not want.outputs:
        raise Refused("it returns nothing by rows that could be compared")
    for i, right in enumerate(want.outputs):
        if not near(torch.cat([part.outputs[i] for part in parts]), right):
            raise Refused("its output differs")
    for i, right in enumerate(want.inputs):
        grads = [part.inputs[i] for part in parts]
        got = torch.cat([grad for grad in grads if grad is not None]) if any(g is not None for g in grads) else None
        if not near(got, right):
            raise Refused("the gradient of its input differs")
    for name, right in want.parameters.items():
        grads = [part.parameters[name] for part in parts]
        if name in cuts and right is not None:
            spans = [bounds(each) for each in cuts[name]]
            fine = all(near(grad, right[a:b]) for grad, (a, b) in zip(grads, spans, strict=True))
        else:
            there = [grad for grad in grads if grad is not None]
            fine = near(torch.stack(there).sum(0) if there else None, right)
        if not fine:
            raise Refused(f"the gradient of {name} differs")
    for name, right in want.buffers.items():
        if any(not torch.equal(part.buffers[name], right) for part in parts):
            raise Refused(f"it changes {name}")


def _near(got: Tensor | None, want: Tensor | None, *, tolerance: float) -> bool:
    """No gradient, and one of zero, are the same."""
    if got is None or want is None:
        there = want if got is None else got
        return there is None or not there.any()
    if got.shape != want.shape:
        return False
    scale = want.double().square().mean().sqrt() if want.numel() else 0.0
    return bool(torch.allclose(got.double(), want.double(), rtol=tolerance, atol=float(tolerance * scale)))
