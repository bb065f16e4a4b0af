"""All devices at once: each runs forward and backward over its own microbatches, one after another.

The gradients of the last backward are final, so exchange may sum them while it still runs.

    memory    activations of one microbatch
    bubble    none; devices meet only to sum gradients
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.buffers.step import Buffers
from meshfit.axes.data.batchnorm import counting
from meshfit.axes.precision import LossScale, Precision
from meshfit.data.loader import Batch, Microbatch
from meshfit.events import current
from meshfit.exchange.protocol import Exchange
from meshfit.generators import Generators
from meshfit.loss.batch_loss import BatchLoss, backward_from, buffers_kept, leaves_of, whole_outputs
from meshfit.loss.gather import gathering
from meshfit.loss.objective import LossDenominator, check_scalar


@dataclass(slots=True)
class Passes:
    """Runs one batch: ``schedule(batch)`` leaves summed gradients in the exchange, up to ``correction``."""

    model: nn.Module
    objective: Callable[[nn.Module, Any], Any]
    over: LossDenominator
    precision: Precision
    scale: LossScale | None
    exchange: Exchange
    device: torch.device
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around what runs the model: see layout."""
    loss_replicas: int = 1
    """Ranks that compute the loss of the same samples: each goes backward from its part of it."""
    batch_loss: BatchLoss | None = None
    """Of a loss of the whole batch; ``objective`` then gives the model's outputs."""
    gather: Callable[[Tensor], Tensor] | None = None
    """What ``meshfit.gather`` does in the objective."""
    buffers: Buffers = field(default_factory=Buffers)
    """Those that a forward writes."""

    def __call__(self, batch: Batch, stop: Callable[[], bool] = lambda: False) -> None:
        if self.batch_loss is not None:
            self._over_batch(self.batch_loss, batch, stop)
            return
        total: Tensor | float = 0.0
        counted: Tensor | float = 0.0
        span = current().span
        for i, part in enumerate(batch.microbatches):
            at = {"microbatch": i} if len(batch.microbatches) > 1 else {}
            with span("forward", **at):
                with self._around(i, part), gathering(self.gather):
                    loss = self.objective(self.model, part.content)
                share, count = self.weigh(loss, part, batch)
                if part.samples:
                    value = share.detach()
                    if isinstance(count, Tensor):  # a mean over nothing is NaN, and weighs nothing
                        value = torch.where(count > 0, value, 0.0)
                    total, counted = total + self._read(value), counted + self._read(count)
            if part is batch.microbatches[-1]:
                self._arm(total, counted, stop)
            with span("backward", **at):
                (share if self.scale is None else share * self.scale.value).backward()

    def _over_batch(self, batch_loss: BatchLoss, batch: Batch, stop: Callable[[], bool]) -> None:
        """With a loss of the whole batch: see batch_loss.py."""
        span, parts = current().span, batch.microbatches
        if len(parts) == 1:
            with span("forward"), self._around(0, parts[0]):
                made = whole_outputs(self.objective(self.model, parts[0].content))
                share = self.share_of(batch_loss([(made, parts[0].content, parts[0].samples > 0)]), batch)
            self._arm(self._read(share.detach()), self.counted_samples(batch), stop)
            with span("backward"):
                (share if self.scale is None else share * self.scale.value).backward()
            return
        firsts, draws = [], []
        with torch.no_grad(), buffers_kept(self.model):
            for i, part in enumerate(parts):
                draws.append(Generators(self.device))
                with span("forward", microbatch=i), self._around(i, part, counts=False):
                    firsts.append(leaves_of(whole_outputs(self.objective(self.model, part.content))))
        self.buffers.drop()
        with span("forward"), self.precision.arithmetic(self.device):
            given = [(made, part.content, part.samples > 0) for (made, _), part in zip(firsts, parts, strict=True)]
            share = self.share_of(batch_loss(given), batch)
        (share if self.scale is None else share * self.scale.value).backward()
        after = Generators(self.device)
        for i, part in enumerate(parts):
            draws[i].restore()
            with span("forward", microbatch=i), self._around(i, part):
                made = whole_outputs(self.objective(self.model, part.content))
            if part is parts[-1]:
                self._arm(self._read(share.detach()), self.counted_samples(batch), stop)
            with span("backward", microbatch=i):
                made, gradients = backward_from(made, firsts[i][1])
                if made:
                    torch.autograd.backward(made, gradients)
        after.restore()

    @contextmanager
    def _around(self, at: int, part: Microbatch, *, counts: bool = True) -> Iterator[None]:
        """Around what runs the model; what it writes to buffers counts only once."""
        writing = self.buffers.forward(at, part.samples if counts else None)
        with counting(part.samples > 0), writing, self.precision.arithmetic(self.device), self.inside():
            yield

    def share_of(self, loss: Any, batch: Batch) -> Tensor:
        """What this rank adds to a loss of the whole batch, which all ranks have."""
        if isinstance(loss, tuple | list):
            loss = check_scalar(loss[0]) / loss[1]
        return check_scalar(loss) * (self.counted_samples(batch) / batch.size)

    def counted_samples(self, batch: Batch) -> float:
        return sum(part.samples for part in batch.microbatches) / self.loss_replicas

    def _arm(self, total: Tensor | float, counted: Tensor | float, stop: Callable[[], bool]) -> None:
        self.buffers.combine()
        broken = ~total.isfinite() if isinstance(total, Tensor) else not math.isfinite(total)
        self.exchange.arm(total, counted, stop=stop(), broken=broken)

    def weigh(self, loss: Any, part: Microbatch, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """What this rank adds to the batch's loss with a microbatch, and what it counts for in the mean."""
        share, count = self._share(loss, part, batch)
        if self.loss_replicas == 1:
            return share, count
        return share / self.loss_replicas, count / self.loss_replicas

    def _share(self, loss: Any, part: Microbatch, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """What this microbatch adds to the batch's loss, and what it counts for in the mean."""
        if isinstance(loss, tuple | list):
            self.over = self.over if self.over.kind == "pair" else LossDenominator(kind="pair")
            total, count = check_scalar(loss[0]), loss[1]
            if self._alone(batch):
                return total / count, 1.0
            return total / self._nominal(batch) * (part.samples > 0), count
        loss = check_scalar(loss)
        if self._alone(batch):
            return loss, 1.0
        if not part.samples:  # backward must still run: others wait for this rank in its collectives
            return loss * 0.0, 0.0
        if self.over.kind == "sum":
            return loss, part.samples
        if self.over.kind == "samples":
            return loss * (part.samples / batch.size), part.samples
        count = self.over.count(part.content)
        return loss * count / self._nominal(batch), count

    def _read(self, number: Tensor | float) -> Tensor | float:
        """A number at once on CPUs; on GPUs it stays where it is, and nobody waits."""
        return number.item() if isinstance(number, Tensor) and number.is_cpu else number

    def _alone(self, batch: Batch) -> bool:
        """The whole batch goes through at once here: its loss needs no weight."""
        return self.exchange.degree == self.loss_replicas and len(batch.microbatches) == 1

    def _nominal(self, batch: Batch) -> float:
        """What the mean would be over if every sample had its usual number of targets."""
        return batch.size * self.over.unit

    def correction(self, batch: Batch, count: Tensor | float) -> Tensor | float:
        """The factor from what was summed to the true mean, once the count over all ranks is known."""
        if self._alone(batch) or (self.over.known and self.exchange.summed):
            return 1.0
        return self._nominal(batch) / (count.double() if isinstance(count, Tensor) else count or math.nan)
