"""Work that is no training, in each rank of a plan: evaluations, predictions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshfit.comm.objects import all_gather_object
from meshfit.drive.here import as_found
from meshfit.drive.ranked import RANK_MODULES, started
from meshfit.drive.work import Silent
from meshfit.job import Job, plan_of
from meshfit.launch.devices import Devices
from meshfit.launch.system import check_ranks
from meshfit.launch.world import World, connect, from_environment
from meshfit.turns import Turn


def everywhere(job: Job, work: Callable[[Job, World], Any]) -> list[Any]:
    """What ``work`` returns in each rank of the job's plan, by rank; the job must be settled."""
    assert isinstance(job.devices, Devices)
    given = from_environment(job.devices)
    model = job.build()
    built = replace(job, model=model)
    if given is not None and given.size > 1:
        connect(given, timeout=job.timeout)
        with as_found(model):
            return all_gather_object(work(built, given))
    if plan_of(job).devices == 1:
        world = World(0, 1, job.devices.device(0))
        turn = Turn(world.device)
        with turn.under_way(), turn, as_found(model):
            return [work(built, world)]
    from meshfit.launch.warm import warm

    check_ranks(plan_of(job))
    warm(*RANK_MODULES)
    with started(job, Silent(built, work)) as ranks:
        return ranks.results
