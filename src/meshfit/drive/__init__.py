"""A training as the caller sees it: here in this process, or in ranks that are started for it.

Both are iterated for their steps, can be told to stop, and end with an outcome. In lockstep, a stop ends the training
with exactly the weights of the step just seen: ranks may already be at the next one, and drop it together. Without it
ranks go on meanwhile, and end after the same step, some steps later.

training     what both have in common
here         in this process
ranked       in ranks started for it, also as workers of another host's run
work         what each rank does, and reports
restart      whether ranks that failed are started again
out_of_memory  what a rank held that ran out of memory, what was predicted, what would fit
elastic      on which devices, where their number may change
everywhere   other work in each rank of a plan
"""

from meshfit import auto
from meshfit.drive.elastic import elastic_of
from meshfit.drive.everywhere import everywhere
from meshfit.drive.here import Here
from meshfit.drive.ranked import RANK_MODULES, Joined, Ranked
from meshfit.drive.training import Training
from meshfit.drive.work import Tap
from meshfit.errors import MeshfitError
from meshfit.job import Job, plan_of
from meshfit.launch import twins
from meshfit.launch.rank import refuse_training_at_import
from meshfit.launch.world import from_environment
from meshfit.plan import Plan
from meshfit.plan_words import translated
from meshfit.server import join
from meshfit.server import process as serve
from meshfit.turns import alone

__all__ = ["RANK_MODULES", "Training", "begin", "everywhere"]


def begin(job: Job, *, lockstep: bool, tap: Tap | None = None) -> "Training":
    """Check the job, and set up its training. ``lockstep``: ranks wait for the caller after each step."""
    refuse_training_at_import()
    with alone():
        return _begun(job.loaded(), lockstep, tap)


def _begun(job: Job, lockstep: bool, tap: Tap | None) -> "Training":
    if job.join is not None:
        return Joined(job, lockstep, tap)
    twins.check(independent=job.independent, devices=_named(job.plan))
    given = from_environment(job.devices)
    job, elastic = elastic_of(job, given is not None)
    if given is not None:
        serve.refuse_torchrun(job)
        job, why = auto.chosen(job, given) if elastic is None else (job, [])
        settled = job.settled(count=given.size, kind=given.device.type)
        training = Here(settled, lockstep, tap, given)
        training.said += [*_translated(job, settled), *why]
        return training
    job, why = auto.chosen(job) if elastic is None else (job, [])  # of a range "auto" takes data=
    settled = job.settled()
    join.check(settled.listen, plan_of(settled))
    alone = plan_of(settled).devices == 1 and not plan_of(settled).server and elastic is None
    training = Here(settled, lockstep, tap) if alone else Ranked(settled, lockstep, tap, elastic)
    training.said += [*_translated(job, settled), *why]
    if isinstance(job.batch_size, str):
        training.said.append(
            f"batch_size: {job.batch_size} is {settled.batch_size} over {plan_of(settled).devices} devices"
        )
    return training


def _translated(job: Job, settled: Job) -> list[str]:
    return translated(job.plan, plan_of(settled)) if isinstance(job.plan, str) else []


def _named(plan: Plan | str) -> int | None:
    """Devices that a plan names; None where it leaves that open."""
    try:
        return (plan if isinstance(plan, Plan) else Plan.parse(plan)).devices
    except MeshfitError:  # "auto", or a plan that is refused with more to say later
        return None
