"""Workers of other hosts that join a run: where, how they are told of it, what they ask and what they are answered.

Each runs the same job for as long as the run goes on. The run says what its plan is, and who each worker is to be; then
it is a worker as any other, over TCP. The batch is shared by those at work: so in step the weights are those of one
device whoever comes and goes. What is done once for all (evaluations, checkpoints, the folder) is done by the run that
they join. A callback's "stop" lets these workers leave; the run goes on.

``listen="10.0.0.5:7000"`` opens one port for each server, from that one upward. Nothing else of a run can be reached
from outside. The connection is authenticated, not encrypted: see server/wire.py.
"""

import shlex
import socket
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfit.errors import JobError, PlanError
from meshfit.launch import key as keys
from meshfit.plan import Plan
from meshfit.server.fingerprint import differences
from meshfit.server.wire import ConnectionLost, TurnedAway, WireError, connect, parse

PATIENCE = 5.0  # seconds for a run that is about to begin
ANSWER_SECONDS = 30.0


def addresses(at: str, servers: int) -> list[str]:
    """Of the servers of a run that listens at ``at``: "HOST:PORT"."""
    try:
        _, (host, port) = parse(f"tcp:{at}")
    except WireError:
        host, port = "", 0
    if not host or not at.rpartition(":")[0] or not 0 < port <= 65536 - servers:
        raise JobError(f"{at!r} is no place to listen or to join", "HOST:PORT, 10.0.0.5:7000 say")
    return [f"tcp:{f'[{host}]' if ':' in host else host}:{port + i}" for i in range(servers)]


def check(at: str | None, plan: Plan) -> None:
    """Refuse, before anything starts, what nobody could join."""
    if at is None:
        return
    if not plan.server:
        raise PlanError(
            f"listen={at!r}: workers join model servers, and {plan} has none", f"server=1 {plan} works, say"
        )
    if plan.devices != plan.data:
        raise PlanError(f"listen={at!r}: workers of {plan} are groups of devices", "such a run cannot be joined yet")
    for address in addresses(at, plan.server):
        family, where = parse(address)
        with closing(socket.socket(family, socket.SOCK_STREAM)) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(where)
            except OSError as error:
                raise JobError(
                    f"listen={at!r}: port {where[1]} cannot be had",
                    str(error.strerror or error),
                    f"{plan} needs one port for each server, and an address of this host",
                ) from None


def announced(at: str) -> bytes:
    """The key of the run; people are told how to join it."""
    script, *arguments = sys.argv or ["train.py"]
    command = shlex.join(["meshfit", "join", at, script or "train.py", *(["--", *arguments] if arguments else [])])
    found = keys.given()
    used = found or keys.drawn()
    said = f"the key is that of {keys.NAME}"
    if found is None:
        said = f"it asks for the key (or reads {keys.NAME}): {used.decode()}"
    text = f"meshfit: workers may join; elsewhere, where script and data are:\n  {command}\n  {said}"
    print(text, file=sys.stderr, flush=True)
    return used


@dataclass(frozen=True)
class Invitation:
    """What a run answers to workers that ask to join: its plan, and the number of each."""

    facts: dict[str, Any]
    """What one who joins must know: plain values."""
    fingerprint: dict[str, Any]
    """Of the run's job; that of a worker must be the same."""
    first: int
    """Number of the first worker that joins."""
    folder: Path
    """Where it is noted how many have: numbers are not given twice, also by a server that was started again."""

    def answer(self, job: dict[str, Any] | None) -> dict[str, Any]:
        """To one that says what it has (its ``job``), who it is to be; ``WireError`` if that is another job."""
        if job is None:
            return self.facts
        try:
            found = list(differences(self.fingerprint, job))
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise WireError("what was sent is no description of a job", f"{type(error).__name__}: {error}") from None
        if found:
            raise WireError("this job is not that of the run", *found)
        noted = self.folder / "joined"
        before = int(noted.read_text()) if noted.exists() else 0
        noted.write_text(str(before + 1))
        return self.facts | {"worker": self.first + before}


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
