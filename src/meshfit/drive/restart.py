"""Whether a training whose ranks have failed is started again, and from where.

A start makes progress when it leaves a newer checkpoint than it began from. After ``most`` restarts in a row without
one the training ends, with the first cause first. What a rank raises is tried once more, and only where there is a
checkpoint: raised again in the same step, it ends the training. Refusals (a plan, a checkpoint, a loss that is not
finite) come out the same each time, and are not tried again.
"""

from contextlib import suppress
from dataclasses import dataclass, field

from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import Files
from meshfit.errors import CheckpointError, Died, JobError, MeshfitError, NonFiniteError, PlanError
from meshfit.job import Job
from meshfit.plan import Plan

MOST = 3  # restarts in a row without progress
FINAL = (CheckpointError, JobError, NonFiniteError, PlanError)


def tries_of(job: Job) -> int:
    """How often a job may be started again without progress; 0: its first failure ends it."""
    if job.checkpoint is None or job.listen is not None or job.join is not None:
        return 0  # whoever joined a run from elsewhere would have to be told
    return MOST if job.restarts == "auto" else int(job.restarts)


@dataclass
class Tries:
    """The failures of one training so far."""

    most: int
    failures: list[MeshfitError] = field(default_factory=list)
    """Since the last progress."""
    raised: dict[int, MeshfitError] = field(default_factory=dict)
    """By step."""
    begun_from: int = 0
    """The order of the checkpoint that they began from; 0: the beginning."""

    def failed(self, error: MeshfitError, newest: manifest.Manifest | None) -> None:
        """Note a failure. Raises, where the training is not to be started again."""
        reached = 0 if newest is None else manifest.order(newest.name)
        if reached > self.begun_from:
            self.failures, self.begun_from = [], reached
        self.failures.append(error)
        if not self.most or isinstance(error, FINAL):
            raise error
        raised = not isinstance(error, Died)
        if raised and newest is None:
            raise error
        place = "the beginning" if newest is None else f"step {newest.step}"
        if raised and error.step in self.raised:
            where = f" in step {error.step}" if error.step else ""
            raise self.raised[error.step].saying(f"started again from {place}, it failed again{where}")
        if raised:
            self.raised[error.step] = error
        if len(self.failures) > self.most:
            others = [f"then: {each.headline}" for each in self.failures[1:]]
            times = "once" if self.most == 1 else f"{self.most} times"
            said = f"started again {times} from {place}, it came to no newer checkpoint"
            raise self.failures[0].saying(said, *others)

    @property
    def so_far(self) -> str:
        """How often it was started again without progress, where that is more than once."""
        return f", {len(self.failures)} of at most {self.most} times in a row" if len(self.failures) > 1 else ""


def put_suspects_aside(files: Files, last: int | None) -> None:
    """Checkpoints of after the ``last`` step that is known to be right."""
    if last is None:
        return
    for found in list(manifest.complete(files)):
        if found.step > last:
            with suppress(FileNotFoundError):  # another rank has seen to it
                files.move(found.name, f"suspect-{found.name}")


def last_right(error: MeshfitError | None, plan: Plan) -> int | None:
    """The last step that is known to be right, where later ones may be wrong: see ``Died.agreed``. Of the workers of a
    synchronous server one that leaves or raises is missed before it is known why: steps may have been without it."""
    if isinstance(error, Died) and error.agreed is not None:
        return error.agreed
    return error.step - 1 if error is not None and error.step and plan.server and not plan.staleness else None
