"""What happens when a loss or gradient is NaN or infinite.

All ranks see it in the same step, because it is in the gradients they summed, and none of them changes its
weights by it. The watch then stops the run, or lets it go on without that step, and says which samples it was:
those with a NaN in them, where that is so; else the share of the rank whose loss broke; else the batch. On a
GPU the news arrives a step later.
"""

import math
from collections import deque
from typing import TYPE_CHECKING

import torch

from meshfit.data import tree
from meshfit.data.loader import Batch, shares
from meshfit.errors import NonFiniteError
from meshfit.step import Reading

if TYPE_CHECKING:
    from meshfit.run import Run


class NonFiniteWatch:
    def __init__(self, run: "Run"):
        self.run = run
        self.coming: deque[tuple[int, str, Reading, Batch, list]] = deque()
        self._stop: int | None = None
        """The step in which a rank asked to stop."""

    @property
    def stopped(self) -> bool:
        """Whether to end after this step: a rank asked to stop in an earlier one. Not in this one, whose reading has
        arrived at some ranks and at others has not."""
        return self._stop is not None and self.run.step > self._stop

    def see(self, reading: Reading, batch: Batch, statistics: list, phase: str = "") -> None:
        """Look at the readings that have arrived; all but the newest must have.

        ``statistics`` are BatchNorm's from before the step. With steps to be skipped they are put back before the
        next step adds to them, so then the newest is waited for too.
        """
        self.coming.append((self.run.step + 1, phase, reading, batch, statistics))
        wait = self.run.job.on_nan == "skip" and bool(statistics)
        while self.coming and (wait or self.coming[0][2].ready or len(self.coming) > 1):
            self._judge(*self.coming.popleft())

    def finish(self) -> None:
        while self.coming:
            self._judge(*self.coming.popleft())
        self.run.coordination.agree()

    def _judge(self, step: int, phase: str, reading: Reading, batch: Batch, statistics: list) -> None:
        loss, norm, taken, stop, *broken = reading.values
        if stop and self._stop is None:
            self._stop = step
        if taken:
            return
        self.run.statistics.restore(statistics)
        overflow = self.run.precision.word == "fp16" and math.isfinite(loss)
        if overflow or self.run.job.on_nan == "skip":
            return
        what = f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        error = NonFiniteError(
            f"step {step}{phase and f', {phase}'}: {what}",
            self._samples(batch, sorted({rank // self.run.plan.context for rank, flag in enumerate(broken) if flag})),
            "the weights are as they were before that step",
            'on_nan="skip" would leave such steps out; a smaller learning rate or clip=1.0 may prevent them',
        )
        self.run.coordination.met(error)

    def _samples(self, batch: Batch, broken: list[int]) -> str:
        bad = self._samples_with_nan(batch)
        if bad:
            return f"data holds NaN or Inf in sample{'s' * (len(bad) > 1)} {_listed(bad)}"
        plan = self.run.plan
        if 0 < len(broken) < plan.shares:
            parts = [at for one in broken for at in shares(batch.size, one, plan.shares, len(batch.microbatches))]
            ids = [i for at in parts for i in batch.ids[at].tolist()]
            who = f"rank {', '.join(str(one * plan.devices // plan.shares) for one in broken)}"
            return f"it came from {who}, samples {_listed(ids)} of epoch {batch.epoch}"
        return f"samples {_listed(batch.ids.tolist())} of epoch {batch.epoch}"

    def _samples_with_nan(self, batch: Batch) -> list[int]:
        """Samples of the whole batch that are not finite themselves; read again, since it happens once."""
        fetch = getattr(self.run.loader.source, "fetch", None)
        if fetch is None:
            return []
        bad: set[int] = set()
        for tensor in tree.tensors(fetch(batch.ids)):
            if tensor.is_floating_point() and len(tensor) == batch.size:
                broken = ~torch.isfinite(tensor.reshape(batch.size, -1)).all(1)
                bad.update(batch.ids[broken.cpu().numpy()].tolist())
        return sorted(bad)


def _listed(ids: list[int], most: int = 12) -> str:
    shown = ", ".join(map(str, ids[:most]))
    return shown if len(ids) <= most else f"{shown} and {len(ids) - most} more"
