"""What one rank adds to the loss of a batch, summed over its microbatches."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.precision import LossScale
from meshfit.axes.spec import whole_output
from meshfit.data.loader import Batch, Microbatch
from meshfit.errors import DataError
from meshfit.exchange.protocol import Exchange, StepScalars
from meshfit.loss.logged import weighed
from meshfit.loss.objective import LossDenominator, check_scalar
from meshfit.step import parted
from meshfit.transfer import wide


class LossSum:
    """``add`` weighs the loss of a microbatch as one device would weigh its samples in the batch, and gives what to go
    backward from. ``loss_replicas``: ranks that compute the loss of the same samples; each takes its part of it.
    ``names``: of the values that every step logs; None: any."""

    def __init__(
        self,
        over: LossDenominator,
        exchange: Exchange,
        scale: LossScale | None = None,
        *,
        loss_replicas: int = 1,
        names: Sequence[str] | None = None,
    ):
        self.over, self.exchange, self.scale, self.loss_replicas = over, exchange, scale, loss_replicas
        self.names = names
        self.values: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        """Logged by this rank: totals, and what they are over."""
        self.total: Tensor | float = 0.0
        self.count: Tensor | float = 0.0
        """What the total is a mean over."""

    def begin(self) -> None:
        """Of the next batch."""
        self.total = self.count = 0.0
        self.values = {}

    def add(self, loss: Any, part: Microbatch, batch: Batch) -> Tensor:
        """A microbatch's loss, or (sum, count); and values to log."""
        loss, values = parted(loss)
        share, count = self._share(loss, part, batch)
        if values:
            self._log(values, part.samples, count)
        if self.loss_replicas > 1:
            share, count = share / self.loss_replicas, count / self.loss_replicas
        if part.samples:
            value = share.detach()
            if isinstance(count, Tensor):  # a mean over nothing is NaN, and weighs nothing
                value = torch.where(count > 0, value, 0.0)
            self.total, self.count = self.total + _read(value), self.count + _read(count)
        return self._scaled(share)

    def add_whole(self, loss: Any, batch: Batch) -> Tensor:
        """A loss of the whole batch, which all ranks have."""
        loss, values = parted(loss)
        self._log(values, 1.0, 1.0, whole=True)
        if isinstance(loss, tuple | list):
            loss = check_scalar(loss[0]) / loss[1]
        self.count = sum(part.samples for part in batch.microbatches) / self.loss_replicas
        share = check_scalar(loss) * (self.count / batch.size)
        self.total = _read(share.detach())
        return self._scaled(share)

    def arm(self, stop: Callable[[], bool]) -> None:
        """The next backward is the last of the batch."""
        total = self.total
        broken = ~total.isfinite() if isinstance(total, Tensor) else not math.isfinite(total)
        values = [number for name in self._names for number in self.values.get(name, (0.0, 0.0))]
        self.exchange.arm(StepScalars(total, self.count, float(stop()), [broken], values))

    def logged(self, sums: Sequence[Tensor | float]) -> dict[str, Tensor | float]:
        """The values of the batch by name, from what was summed over all ranks."""
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return dict(zip(self._names, (_mean(total, count) for total, count in pairs), strict=True))

    @property
    def _names(self) -> Sequence[str]:
        return list(self.values) if self.names is None else self.names

    def _log(self, values: Mapping[str, Any], samples: float, count: Tensor | float, *, whole: bool = False) -> None:
        if self.names is not None and set(values) != set(self.names):
            now, first = (", ".join(sorted(names)) or "nothing" for names in (values, self.names))
            raise DataError(
                f"the step logs {now}, and logged {first} when it was tried",
                "ranks sum what all of them log: return the same names at every step",
            )
        if not samples:
            return
        for name, value in whole_output(dict(values)).items():
            over = "loss" if whole else self.over.kind_of(name)
            total, weight = weighed(name, value, over, samples if over == "samples" else count)
            if over == "sum":
                total = total / self.loss_replicas
            before = self.values.get(name, (0.0, 0.0))
            self.values[name] = before[0] + _read(total), before[1] + _read(weight)

    def correction(self, batch: Batch, count: Tensor | float) -> Tensor | float:
        """The factor from what was summed to the true mean, once the count over all ranks is known."""
        if self._alone(batch) or (self.over.known and self.exchange.summed):
            return 1.0
        return self._nominal(batch) / (wide(count) if isinstance(count, Tensor) else count or math.nan)

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

    def _scaled(self, share: Tensor) -> Tensor:
        return share if self.scale is None else share * self.scale.value

    def _alone(self, batch: Batch) -> bool:
        """The whole batch goes through at once here: its loss needs no weight."""
        return self.exchange.degree == self.loss_replicas and len(batch.microbatches) == 1

    def _nominal(self, batch: Batch) -> float:
        """What the mean would be over if every sample had its usual number of targets."""
        return batch.size * self.over.unit


def _mean(total: Tensor | float, count: Tensor | float) -> Tensor | float:
    """``total`` over ``count``, or itself where that is 0."""
    if isinstance(total, Tensor) or isinstance(count, Tensor):
        total, count = torch.as_tensor(total), torch.as_tensor(count)
        return torch.where(count != 0, total / count, total)
    return total / count if count else total


def _read(number: Tensor | float) -> Tensor | float:
    """A number at once on CPUs; on GPUs it stays where it is, and nobody waits."""
    return number.item() if isinstance(number, Tensor) and number.is_cpu else number
