"""All devices at once: each runs forward and backward over its own microbatches, one after another.

The gradients of the last backward are final, so exchange may sum them while it still runs.

    memory    activations of one microbatch
    bubble    none; devices meet only to sum gradients
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_watch import line_of
from meshfit.axes.buffers.step import Buffers
from meshfit.axes.buffers.watch import buffers_kept
from meshfit.axes.data.batchnorm import counting
from meshfit.axes.precision import Precision
from meshfit.axes.spec import whole_output
from meshfit.data.loader import Batch, Microbatch
from meshfit.errors import PlanError, in_short
from meshfit.events import current
from meshfit.generators import Generators
from meshfit.loss.batch_loss import BatchLoss, backward_from, leaves_of
from meshfit.loss.gather import gathering
from meshfit.passes.loss_sum import LossSum
from meshfit.python_state import PythonState
from meshfit.torch_private.autograd import in_a_function


@dataclass(slots=True)
class Passes:
    """Runs one batch: ``schedule(batch)`` leaves summed gradients in the exchange, up to ``loss.correction``."""

    model: nn.Module
    objective: Callable[[nn.Module, Any], Any]
    loss: LossSum
    precision: Precision
    device: torch.device
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around what runs the model: see ``Placed``."""
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around all that runs for a batch, likewise."""
    batch_loss: BatchLoss | None = None
    """Of a loss of the whole batch; ``objective`` then gives the model's outputs."""
    gather: Callable[[Tensor], Tensor] | None = None
    """What ``meshfit.gather`` does in the objective."""
    buffers: Buffers = field(default_factory=Buffers)
    """Those that a forward writes."""
    counters: PythonState | None = None
    """Numbers that code keeps in Python and each forward changes: all microbatches together change them once."""
    gathered: str = ""
    """The plan, where a module has its whole parameters only while it runs."""

    def __call__(self, batch: Batch, stop: Callable[[], bool] = lambda: False) -> None:
        self.loss.begin()
        if self.counters is not None:
            self.counters.take()
        with self.during():
            if self.batch_loss is None:
                self._one_by_one(batch, stop)
            else:
                self._over_batch(self.batch_loss, batch, stop)

    def _one_by_one(self, batch: Batch, stop: Callable[[], bool]) -> None:
        span = current().span
        for i, part in enumerate(batch.microbatches):
            at = {"microbatch": i} if len(batch.microbatches) > 1 else {}
            with span("forward", **at):
                with self._around(i, part), gathering(self.gather):
                    loss = self.objective(self.model, part.content)
                share = self.loss.add(loss, part, batch)
            if part is batch.microbatches[-1]:
                self._arm(stop)
            with span("backward", **at), self._explained():
                share.backward()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A Function whose backward reads parameters from a module finds slices of them there, which no graph knows."""
        try:
            yield
        except Exception as error:
            if not self.gathered or not in_a_function(error):
                raise
            raise PlanError(
                f"{self.gathered}: the backward of a torch.autograd.Function failed: {in_short(error)}",
                line_of(error),
                "if it reads parameters from a module, it finds slices of them: weights are gathered for each forward",
                "hand them to the Function: Own.apply(f, x, *f.parameters()), and their gradients are returned from it",
                "data= takes it as it is",
            ) from error

    def _over_batch(self, batch_loss: BatchLoss, batch: Batch, stop: Callable[[], bool]) -> None:
        """With a loss of the whole batch: see batch_loss.py."""
        span, parts = current().span, batch.microbatches
        if len(parts) == 1:
            with span("forward"), self._around(0, parts[0]):
                made = whole_output(self.objective(self.model, parts[0].content))
                share = self.loss.add_whole(batch_loss([(made, parts[0].content, parts[0].samples > 0)]), batch)
            self._arm(stop)
            with span("backward"):
                share.backward()
            return
        firsts, draws, copies = [], [], batch.copied().microbatches
        with torch.no_grad(), buffers_kept(self.model):
            for i, part in enumerate(copies):
                draws.append(Generators(self.device))
                with span("forward", microbatch=i), self._around(i, part, counts=False):
                    firsts.append(leaves_of(whole_output(self.objective(self.model, part.content))))
        self.buffers.drop()
        with span("forward"), self.precision.arithmetic(self.device):
            given = [(made, part.content, part.samples > 0) for (made, _), part in zip(firsts, copies, strict=True)]
            share = self.loss.add_whole(batch_loss(given), batch)
        share.backward()
        after = Generators(self.device)
        for i, part in enumerate(parts):
            draws[i].restore()
            with span("forward", microbatch=i), self._around(i, part):
                made = whole_output(self.objective(self.model, part.content))
            if part is parts[-1]:
                self._arm(stop)
            with span("backward", microbatch=i):
                made, gradients = backward_from(made, firsts[i][1])
                if made:
                    torch.autograd.backward(made, gradients)
        after.restore()

    @contextmanager
    def _around(self, at: int, part: Microbatch, *, counts: bool = True) -> Iterator[None]:
        """Around what runs the model; what it writes to buffers counts only once."""
        if self.counters is not None:
            self.counters.restore()
        writing = self.buffers.forward(at, part.samples if counts else None)
        counted = nullcontext() if part.samples else counting(False)
        with counted, writing, self.precision.arithmetic(self.device), self.inside():
            yield

    def _arm(self, stop: Callable[[], bool]) -> None:
        self.buffers.combine()
        self.loss.arm(stop)
