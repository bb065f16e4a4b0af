"""The proof of a mixture's spread, before anything is cut: whole, against its parts in threads (prove.py).

Each thread has its own experts and its own, unevenly many, of the rows that the module that meets the others was given
in a forward of the model. What must agree: outputs, the gradients of inputs and parameters, buffers.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import converted, sharing
from meshfit.axes.expert.mixture import Mixture
from meshfit.axes.expert.spread import spread
from meshfit.axes.expert.travel import Travel
from meshfit.axes.prove import Close, Given, PassResult, Refused, in_parts, in_precision, run_once, summed
from meshfit.axes.tensor.region import Cut
from meshfit.comm.group import ThreadGroup
from meshfit.torch_private.trees import tree_leaves, tree_map

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""By how much an element may differ, relative to the root mean square of its tensor: some routers round to fp32."""


def check(model: nn.Module, mixture: Mixture, given: Given) -> None:
    """Raises ``Refused`` if the parts of ``mixture`` do not compute what it does as a whole on ``given``."""
    part = model.get_submodule(mixture.module)
    mixture, degree = mixture.relative(), len(mixture.cuts[0].ranges)
    rows = next((len(t) for t in tree_leaves(given) if isinstance(t, Tensor) and t.dim()), 0)
    edges = [0, *(max(1, rows // (2 * degree)) + r * rows // degree for r in range(degree - 1)), rows]
    if sorted(set(edges)) != edges:
        raise Refused(f"{rows} rows are too few to try it on")
    whole, dtype, want = in_precision(
        partial(converted, part), TOLERANCE, lambda whole, dtype: _run(sharing(whole), given, dtype, rows, (0, rows))
    )
    spans = list(pairwise(edges))
    parts = in_parts(
        whole,
        ThreadGroup.make(degree),
        lambda module, group: spread(module, mixture, Travel(group, 0, mixture.count)),
        lambda module, group: _run(module, given, dtype, rows, spans[group.rank]),
    )
    _compare(want, parts, {cut.name: cut for cut in mixture.cuts}, Close(TOLERANCE[dtype]))


def _run(module: nn.Module, given: Given, dtype: torch.dtype, rows: int, part: tuple[int, int]) -> PassResult:
    def own(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        x = x[slice(*part)] if x.dim() and len(x) == rows else x
        return x.detach().requires_grad_(x.is_floating_point())

    def weights(at: int, output: Tensor) -> Tensor | None:
        if not output.dim():
            return None
        times = len(output) // (part[1] - part[0])
        random = torch.Generator().manual_seed(3)
        every = torch.randn(rows * times, *output.shape[1:], generator=random, dtype=dtype)
        return every[part[0] * times : part[1] * times]

    return run_once(module, tree_map(own, given), dtype, _met, weights)


def _met(x: Tensor | None) -> None:
    if x is None:
        raise Refused("it draws random numbers, other than for dropout")


def _compare(want: PassResult, parts: list[PassResult], cuts: dict[str, Cut], close: Close) -> None:
    if any(len(part.outputs) != len(want.outputs) for part in parts) or not any(x.dim() for x in want.outputs):
        raise Refused("it returns nothing by rows that could be compared")
    for i, right in enumerate(want.outputs):
        if right.dim() and not close(torch.cat([part.outputs[i] for part in parts]), right):
            raise Refused("its output differs")
    for i, right in enumerate(want.inputs):
        grads = [part.inputs[i] for part in parts]
        got = torch.cat([grad for grad in grads if grad is not None]) if any(g is not None for g in grads) else None
        if not close.gradient(got, right):
            raise Refused("the gradient of its input differs")
    for name, right in want.parameters.items():
        grads = [part.parameters[name] for part in parts]
        if name in cuts and right is not None:
            fine = all(close.gradient(grad, cuts[name].part(right, rank)) for rank, grad in enumerate(grads))
        else:
            fine = close.gradient(summed(grads), right)
        if not fine:
            raise Refused(f"the gradient of {name} differs")
    for name, right in want.buffers.items():
        if any(not torch.equal(part.buffers[name], right) for part in parts):
            raise Refused(f"it changes {name}")
