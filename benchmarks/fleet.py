"""Model servers and workers as processes of their own, which can be started, slowed and killed one by one."""

import itertools
import math
import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from benchmarks.served import SECRET, Training, Work
from meshfit.events import current
from meshfit.server.settings import ServerSettings
from meshfit.server.worker import Worker

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "benchmarks.fleet"])


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a worker goes about it."""

    slow: int = 1
    """Times that it computes each gradient."""
    nap: float = 0.0
    """Seconds it sleeps before each."""
    batch_size: int | None = None
    """Of a step of its own, where workers step apart."""
    steps: int | None = None
    """After which it leaves."""
    drops: int = 0
    """Of so many answers the connection breaks before they are heard."""
    compress: str = "none"


@dataclass
class Member:
    """A process, and what it has told so far."""

    process: Any
    pipe: Connection
    told: list[tuple] = field(default_factory=list)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def hear(self) -> None:
        try:
            while self.pipe.poll():
                self.told.append(self.pipe.recv())
        except (EOFError, OSError):
            pass

    def of(self, kind: str) -> list[tuple]:
        self.hear()
        return [rest for first, *rest in self.told if first == kind]  # type: ignore[misc]

    def end(self, timeout: float = 60.0) -> dict[str, Any]:
        """What it came to; waits for it."""
        until = time.monotonic() + timeout
        while not (ended := self.of("end")):
            if failed := self.of("failed"):
                raise RuntimeError(failed[0][0])
            if time.monotonic() > until or not (self.process.is_alive() or self.pipe.poll()):
                raise TimeoutError(f"no end of process {self.process.pid}; it told {self.told[-2:]}")
            time.sleep(0.005)
        return ended[0][0]


class Fleet:
    """Servers and workers of one training, which ``make`` describes in each process."""

    def __init__(self, make: Callable[[], Training], meet: Path, *, servers: int = 1, tcp: bool = False, **terms: Any):
        self.make, self.count, self.terms = make, servers, terms
        self.addresses = [f"tcp:127.0.0.1:{_free_port()}" if tcp else f"unix:{meet}/{i}" for i in range(servers)]
        self.servers: dict[int, Member] = {}
        self.workers: dict[int, Member] = {}

    def __enter__(self) -> Self:
        for i in range(self.count):
            self.serve(i)
        return self

    def __exit__(self, *_: object) -> None:
        for member in (*self.workers.values(), *self.servers.values()):
            if member.process.is_alive():
                member.kill()

    @property
    def folders(self) -> list[Path]:
        """Where each server keeps its snapshots."""
        return [self.terms["folder"] / str(i) for i in range(self.count)]

    def serve(self, index: int = 0, upto: int | None = None) -> Member:
        """Start a server, or start it again."""
        own = {**self.terms, "folder": self.folders[index]} if "folder" in self.terms else self.terms
        terms = ServerSettings(index=index, upto=upto, **own)
        self.servers[index] = self._start(_serve, self.make, terms, self.count, self.addresses[index])
        return self.servers[index]

    def work(self, id: int, **pace: Any) -> Member:
        staleness = self.terms.get("staleness", 0)
        self.workers[id] = self._start(_work, self.make, self.addresses, id, staleness, Pace(**pace))
        return self.workers[id]

    def _start(self, target: Callable[..., None], *args: Any) -> Member:
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_told, args=(target, theirs, *args), daemon=True)
        process.start()
        theirs.close()
        return Member(process, ours)

    def steps(self, id: int) -> list[tuple]:
        """(ticket, loss, when) of each step that a worker has told of."""
        return self.workers[id].of("step")

    def until(self, true: Callable[[], bool], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not true():
            for member in (*self.workers.values(), *self.servers.values()):
                if failed := member.of("failed"):
                    raise RuntimeError(failed[0][0])
            if time.monotonic() > end:
                raise TimeoutError({id: len(self.steps(id)) for id in self.workers})
            time.sleep(0.002)


def _told(target: Callable[..., None], pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    outbox: queue.SimpleQueue = queue.SimpleQueue()  # told by a thread: a pipe that nobody empties holds up nothing

    def tell() -> None:
        while (item := outbox.get()) is not None:
            pipe.send(item)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        target(lambda *told: outbox.put(told), *args)
    except BaseException as error:
        outbox.put(("failed", f"{type(error).__name__}: {error}"))
    outbox.put(None)
    teller.join(10)


def _serve(
    tell: Callable[..., None], make: Callable[[], Training], terms: ServerSettings, servers: int, address: str
) -> None:
    server = make().server(terms, servers=servers, address=address)
    tell("up", server.version, list(server.notes))
    server.join()
    server.close()
    weights = {name: p.detach().clone().numpy() for name, p in server.keeper.parameters.items()}
    state = sum(t.nbytes for s in server.keeper.optimizer.state.values() for t in s.values() if hasattr(t, "nbytes"))
    tell(
        "end",
        {
            "version": server.version,
            "samples": server.samples,
            "said": server.notes,
            "staleness": dict(server.staleness),
            "weights": weights,
            "state": state,
            "lr": server.keeper.update.learning_rate,
            "applied": {id: record.applied for id, record in server.records.items()},
        },
    )


def _work(
    tell: Callable[..., None],
    make: Callable[[], Training],
    addresses: list[str],
    id: int,
    staleness: float,
    pace: Pace,
) -> None:
    training = make()
    model = training.build().train()
    worker = Worker(model, addresses, SECRET, id=id, staleness=staleness, compress=pace.compress)
    work = Work(training, worker, model, batch_size=pace.batch_size, slow=pace.slow)
    tell("up", worker.version, worker.ticket)
    if pace.drops:
        _break_often(worker, pace.drops)
    time.sleep(pace.nap)
    for loss in work.steps():
        tell("step", work.tickets[-1], loss, time.monotonic())
        if pace.steps is not None and len(work.losses) >= pace.steps:
            break
        time.sleep(pace.nap)
    final = {name: tensor.detach().clone().numpy() for name, tensor in model.state_dict().items()}
    worker.remove()
    tell(
        "end",
        {
            "losses": work.losses,
            "norms": work.norms,
            "tickets": work.tickets,
            "late": work.late,
            "again": worker.again,
            "weights": final,
            "up": current().traffic["push"][1],
            "down": current().traffic["pull"][1],
            "broken": getattr(worker, "broken", 0),
        },
    )


def _break_often(worker: Worker, times: int) -> None:
    """Break the connection after a question is sent, before its answer is heard: at every third or so, ``times`` times.
    By chance, since by count it would always be a push, or always a step."""
    worker.broken, chance = 0, random.Random(0)  # type: ignore[attr-defined]
    for connection in worker.connections:
        plain = connection.recv

        def recv(*given: Any, connection: Any = connection, plain: Any = plain) -> Any:
            if chance.random() < 1 / 3 and worker.broken < times:  # type: ignore[attr-defined]
                worker.broken += 1  # type: ignore[attr-defined]
                time.sleep(0.002 * (worker.broken % 2))  # type: ignore[attr-defined]  # at times the server has done it by then, at times not
                connection.close()
            return plain(*given)

        connection.recv = recv


def merged(fleet: Fleet) -> Iterator[tuple[int, int, float, float]]:
    """(worker, ticket, loss, when) of all steps that were told of, in the order of time."""
    all_steps = [(id, *step) for id in fleet.workers for step in fleet.steps(id)]
    return iter(sorted(all_steps, key=lambda step: step[3]))


def longest_pause(times: list[float], start: float, end: float) -> float:
    """Seconds without a step between ``start`` and ``end``."""
    inside = [start, *(t for t in times if start <= t <= end), end]
    return max((b - a for a, b in itertools.pairwise(inside)), default=math.inf)


def as_tensors(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in weights.items()}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
