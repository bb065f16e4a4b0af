"""BatchNorm's running statistics of many workers made into one, by sample counts.

A worker sends what its statistics have become. From that and from what they were, its batch's own mean and variance
follow; those of the whole batch are their mean, and the mean variance plus the variance of the means. So the running
statistics are those that one device would have, up to the n/(n-1) of its variance.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import running_statistics
from meshfit.exchange.parcel import Parcel
from meshfit.torch_private.modules import BatchNorm


class RunningStatistics:
    """The statistics a server keeps, by name. ``momenta`` by the name of their module; None: a plain mean."""

    def __init__(self, named: Mapping[str, Tensor], momenta: Mapping[str, float | None] | None = None):
        self.parcel = Parcel.of(named)
        self.momenta = momenta or {}
        self.buffer = torch.zeros(self.parcel.bytes, dtype=torch.uint8)
        self.views = self.parcel.views(self.buffer)
        for name, tensor in named.items():
            self.views[name].copy_(tensor)

    @classmethod
    def of(cls, model: nn.Module) -> "RunningStatistics":
        momenta = {path: m.momentum for path, m in model.named_modules() if isinstance(m, BatchNorm)}
        return cls(running_statistics(model), momenta)

    @property
    def bytes(self) -> int:
        return self.parcel.bytes

    def merge(self, workers: list[tuple[float, Tensor, Tensor]]) -> None:
        """``workers``: for each its samples, the bytes it sent, and what it had been given before."""
        some = [(w, self.parcel.views(new), self.parcel.views(old)) for w, new, old in workers if w > 0]
        for path, momentum in self.momenta.items() if some else ():
            at = f"{path}." if path else ""
            if f"{at}running_mean" in self.views:
                self._merge(at, momentum, some)

    def _merge(
        self, at: str, momentum: float | None, workers: list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]
    ) -> None:
        tracked, mean, var = (self.views[at + n] for n in ("num_batches_tracked", "running_mean", "running_var"))
        told, most = [], 0
        for weight, new, old in workers:
            passes = int(new[f"{at}num_batches_tracked"] - old[f"{at}num_batches_tracked"])
            if passes <= 0:
                continue  # not in training
            share = _share(momentum, passes, int(new[f"{at}num_batches_tracked"]))
            if share == 0.0:
                continue
            own = (old[at + n] + (new[at + n] - old[at + n]) / share for n in ("running_mean", "running_var"))
            told.append((weight, *own))
            most = max(most, passes)
        if not told:
            return
        total = sum(weight for weight, _, _ in told)
        middle = torch.stack([m * (w / total) for w, m, _ in told]).sum(0)
        spread = torch.stack([(v + (m - middle).square()) * (w / total) for w, m, v in told]).sum(0)
        tracked += most
        share = _share(momentum, most, int(tracked))
        mean.lerp_(middle, share)
        var.lerp_(spread, share)


def _share(momentum: float | None, passes: int, tracked: int) -> float:
    """How much of the running value is of the last ``passes``."""
    return passes / tracked if momentum is None else 1.0 - (1.0 - momentum) ** passes
