"""Workers that join a run of another host: the same job, run here for as long as that run goes on.

The run says what its plan is, and who each worker is to be; then it is a worker as any other, over TCP. The batch is
shared by those at work: so in step the weights are those of one device whoever comes and goes. What is done once for
all (evaluations, checkpoints, the folder) is done there. A callback's "stop" lets these workers leave; the run goes on.
"""

from typing import Any

import torch

from meshfit.errors import JobError
from meshfit.job import Job
from meshfit.launch import key as keys
from meshfit.launch.world import World, cores
from meshfit.run import Run
from meshfit.server.coordination import ServerCoordination
from meshfit.server.fingerprint import facts_of
from meshfit.server.listen import addresses
from meshfit.server.process import plan_of
from meshfit.server.wire import ConnectionLost, TurnedAway, WireError, connect

PATIENCE = 5.0  # seconds for a run that is about to begin
ANSWER_SECONDS = 30.0


def ask(at: str, key: bytes, job: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the run that listens at ``at`` says to one who would join it with ``job``; None: what its plan is."""
    (address,) = addresses(at, 1)
    try:
        wire = connect(address, key, patience=PATIENCE)
        try:
            wire.send("join", words={} if job is None else {"job": job})
            answer = wire.recv(timeout=ANSWER_SECONDS)
        finally:
            wire.close()
    except TurnedAway:
        raise JobError(
            f"the run at {at} has another key", f"it is the one that the first host printed, or its {keys.NAME}"
        ) from None
    except (ConnectionLost, TimeoutError) as error:
        why = str(error).partition(": ")[2] or str(error)
        raise JobError(
            f"no run listens at {at}, for {PATIENCE:g} s", why, "it may be over; it is begun by meshfit train --listen"
        ) from None
    except WireError as error:
        raise JobError(f"what listens at {at} is no run to join", error.headline, *error.facts) from None
    if answer.kind == "error":
        raise JobError(f"{answer.words['headline']} at {at}", *answer.words["facts"])
    return answer.words


def joined_run(job: Job, world: World, key: bytes) -> Run:
    """The run of worker ``world.rank`` of those on this host."""
    if world.device.type == "cpu":
        torch.set_num_threads(max(1, cores() // world.size))
    at, servers = job.join, plan_of(job).server
    assert at is not None

    def register(run: Run) -> int:
        return ask(at, key, facts_of(job, run.model, run.loader.source))["worker"]

    return Run(
        job,
        World(0, 1, world.device, world.folder),
        coordinate=lambda run: ServerCoordination(
            run, addresses(at, servers), key, worker=world.rank, register=register
        ),
    )
