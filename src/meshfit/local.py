"""A training by local steps: each rank steps for itself, weights are averaged every so often (exchange/local.py).

What all ranks must have alike is made so where it is needed: evaluations and checkpoints are of the mean of all ranks'
weights; a stop, also for a NaN that one rank alone has met, is agreed when they meet; the outcome is averaged. The
losses told are those of the first rank's share.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.exchange.local import Local, Outer
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.run import Run


class LocalRun(Run):
    """``Run`` with weights averaged in place of gradients summed."""

    def __init__(self, job: Job, world: World, *, folder: Path | None = None, same: bool = True):
        super().__init__(job, world, folder=folder, same=same)
        self.may_stop = True
        if batch_norms(self.model) and self.plan.batchnorm == "global":
            self.notes.append(f"batchnorm: over each rank's own samples, with exchange={self.plan.exchange}")

    def _make_exchange(self) -> Local:  # type: ignore[override]
        plan = self.plan
        outer = Outer() if plan.exchange == "diloco" else None
        self.averaging = Local(
            self.model, self.mesh.over("data"), self.world.device, every=plan.every, outer=outer, overlap=plan.overlap
        )
        return self.averaging

    def evaluate(self) -> dict[str, float]:
        with self.averaging.agreed():
            return super().evaluate()

    def whole(self) -> AbstractContextManager[None]:
        return self.averaging.agreed()

    def resumed(self) -> None:
        """What was saved is what all ranks have in common; an outer optimizer's momentum begins anew."""
        self.averaging.begin()
        self.averaging.step = self.step

    def finish(self) -> None:
        self.averaging.settle()
