"""``meshfit.gather``: the rows of all ranks that share the batch, inside a ``step=`` or ``loss=``.

A loss over the whole batch (contrastive, ranking, over the batch's statistics) needs what other ranks computed. Each
rank gathers the rows and computes the loss of all of them, and counts it by its share of the samples: shares add up to
one, and backward sums over ranks what came to each rank's rows. So the gradient is one device's, also of a parameter
that the loss uses itself, and of a loss of which one part is over the batch and another a mean over samples.

    traffic   an all_gather of the rows in forward, a reduce_scatter of their gradient in backward
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from meshfit.axes.data import batchnorm
from meshfit.axes.spec import whole_output
from meshfit.comm.collectives import gather_rows
from meshfit.comm.group import Group
from meshfit.errors import JobError

_gather: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("gather", default=None)
"""What ``gather`` does here; None: nothing is shared."""


def gather(tensor: Tensor) -> Tensor:
    """The rows (first dim) of ``tensor`` of all devices that share the batch, in the order of the samples.

    For a loss over the whole batch, in a ``step=`` or ``loss=`` of your own: each device returns the loss of all rows.
    Differentiable; the gradients are those of one device. On one device, and outside of meshfit, it returns its
    argument. Every device must call it the same number of times.
    """
    act = _gather.get()
    if act is None:
        return tensor
    if not isinstance(tensor, Tensor) or not tensor.dim():
        what = "a single number" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise JobError("meshfit.gather takes a tensor with a row for each sample", f"it was given {what}")
    return act(tensor)


@contextmanager
def gathering(act: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Within it, ``gather`` does ``act``."""
    token = _gather.set(act)
    try:
        yield
    finally:
        _gather.reset(token)


def over(group: Group | None) -> Callable[[Tensor], Tensor] | None:
    """What gathers rows over ``group``; the rows of a rank that runs a stand-in count for nothing."""
    if group is None:
        return None

    def act(tensor: Tensor) -> Tensor:
        mine = whole_output(tensor)
        return gather_rows(mine[: None if batchnorm.counted() else 0], group)

    return act


def refusing(*facts: str) -> Callable[[Tensor], Tensor]:
    """For where rows cannot be gathered."""

    def act(tensor: Tensor) -> Tensor:
        raise JobError("meshfit.gather does not work under this plan", *facts)

    return act
