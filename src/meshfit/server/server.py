"""A model server: owns weights and optimizer, and steps for all its workers.

Each worker has one connection, and one thread here that listens to it; so a worker that dies is noticed at once, and
by its own thread alone. What a worker may ask for: messages.py.

Who waits here for others is told every few seconds that it does (``waits``): so it has no need to know how long an
evaluation may take. Others are dropped that have not been heard from for ``patience`` seconds.

Between ``push`` and ``step`` workers learn the sums of all: the count that the mean is over, and the norm of the
gradients of all servers. So servers need not talk to each other. How gradients of several workers become a step is in
synchronous.py and asynchronous.py.

    traffic   for each worker and step: its gradients up, the weights down (P bytes each, over all servers)
    memory    weights, a gradient and the optimizer state: P, P, and for AdamW 2P; nothing for each worker on this host
"""

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from meshfit.events import current
from meshfit.exchange.compress import Codec
from meshfit.server.asynchronous import AsynchronousCoordinator
from meshfit.server.client import Client, ClientRecord, Push, ReadWriteLock
from meshfit.server.join import Invitation
from meshfit.server.keeper import Keeper
from meshfit.server.messages import check, check_from
from meshfit.server.settings import ServerSettings, gone_mark
from meshfit.server.shared_memory import SharedMemory, view
from meshfit.server.snapshot import SnapshotWriter, newest, write
from meshfit.server.synchronous import SynchronousCoordinator
from meshfit.server.wire import ConnectionLost, Listener, Message, Wire, WireError

LOOK_SECONDS = 0.2  # how often a thread that waits for others looks whether its own worker is still there
SIGN_SECONDS = 5.0  # how often that worker is told that it waits
GREETING_SECONDS = 5.0


class Server:
    """Serves from the moment it is built until ``close``; goes on from the newest snapshot in its folder, if any."""

    def __init__(
        self,
        keeper: Keeper,
        settings: ServerSettings,
        *,
        address: str,
        secret: bytes,
        report: Callable[[str], None] = lambda what: None,
    ):
        self.keeper, self.settings, self._report = keeper, settings, report
        self.codec = Codec(settings.compress, keeper.parcel)
        self.incarnation = secrets.token_hex(8)
        """Another one for each start: who knew an earlier one must look again."""
        self.coordinates = settings.index == 0
        self.expected = set(range(settings.workers))
        """Workers that must have come before the first batch is given out."""
        self.lock = threading.Condition()
        self.access = ReadWriteLock()
        self.clients: dict[int, Client] = {}
        self.records: dict[int, ClientRecord] = {}
        self.version, self.samples = settings.step, settings.samples
        self.staleness: Counter[int] = Counter()
        """How many gradients were applied with which staleness."""
        self.notes: list[str] = []
        """What happened, in words."""
        self.left: set[int] = set()
        self.failed: Exception | None = None
        """What made it give up; ``join`` raises it."""
        self._writer = SnapshotWriter()
        self._closed = False
        self.coordinator = SynchronousCoordinator(self) if settings.staleness == 0 else AsynchronousCoordinator(self)
        self._resume()
        self.invitation: Invitation | None = None
        """To workers that come later, from elsewhere."""
        self._listeners = [Listener(address, secret, self._serve)]

    def open(self, address: str, key: bytes, invitation: Invitation | None) -> None:
        """Listen to other hosts too."""
        self.invitation = invitation
        self._listeners.append(Listener(address, key, self._serve))

    @property
    def address(self) -> str:
        return self._listeners[0].address

    # For those who wait for it

    def join(self, timeout: float | None = None) -> None:
        """Wait until all is done and every worker has left."""
        done = lambda: (self.coordinator.finished or not self.coordinates) and self.left and not self.clients
        with self.lock:
            if not self.lock.wait_for(lambda: self.failed or done(), timeout):
                raise TimeoutError("the server still has work, or workers")
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self.lock:
            self._closed = True
            for client in self.clients.values():
                client.wire.close()
            self.lock.notify_all()
        self._writer.join()

    # One worker's thread

    def _serve(self, wire: Wire) -> None:
        client = None
        with ExitStack() as turn:
            turn.callback(wire.close)
            try:
                hello = self._hello(wire)
                if hello is None:
                    return
                client = self._client(wire, hello)
                turn.enter_context(client.record.turn)
                self._admit(client, hello.words)
                into = None if wire.local else view(client.memory.up)  # a gradient that is shared is there already
                while self._answer(client, wire.recv(into, check=partial(check_from, client.id))):
                    client.heard = time.monotonic()
                self.drop(client, "")
            except (ConnectionLost, TimeoutError, WireError) as error:
                if isinstance(error, WireError):
                    self._refuse(wire, error)
                if client is not None:
                    self.drop(client, str(error))
            except (Exception, SystemExit) as error:  # of an optimizer, say: no step can follow
                self._fail(error if isinstance(error, Exception) else RuntimeError(f"left by sys.exit({error})"))

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self.failed = self.failed or error
            why = WireError("the server has failed", f"{type(error).__name__}: {error}")
            for client in self.clients.values():
                self._refuse(client.wire, why)
                client.wire.close()
            self.lock.notify_all()

    def _refuse(self, wire: Wire, error: WireError) -> None:
        with suppress(ConnectionLost):
            wire.send("error", words={"headline": error.headline, "facts": list(error.facts)})

    def _hello(self, wire: Wire) -> Message | None:
        """The first words of a worker that holds the same model. None: it wanted to know what this run is."""
        hello = wire.recv(timeout=GREETING_SECONDS, check=check)
        if hello.kind == "join" and self.invitation is not None:
            with self.lock:
                if self.coordinator.finished:
                    raise WireError("the run is over", f"step {self.version} was its last")
                answer = self.invitation.answer(hello.words.get("job"))
            wire.send("welcome", version=self.version, words=answer)
            return None
        mine = [self.keeper.parcel.digest, self.keeper.statistics.parcel.digest, self.codec.word]
        if hello.kind != "hello" or hello.words.get("layout") != mine:
            for fd in hello.fds:
                os.close(fd)
            raise WireError(
                "a worker holds another model than the server, or another part of it",
                "names, shapes, dtypes and strides of all trained parameters must be the same, and compress=",
            )
        return hello

    def _client(self, wire: Wire, hello: Message) -> Client:
        """The worker. Its old connection is closed, and what was under way there is carried out to its end before a new
        request is heard, in its turn: both have the same memory."""
        sizes = self.codec.bytes + self.keeper.statistics.bytes, self.keeper.bytes
        memory = SharedMemory.map(hello.fds[0], *sizes) if hello.fds else SharedMemory.own(*sizes)
        wire.local, wire.worker = bool(hello.fds), hello.worker
        with self.lock:
            record = self.records.setdefault(hello.worker, ClientRecord())
            if (old := self.clients.get(hello.worker)) is not None:
                old.replaced = True
                old.wire.close()
                self.lock.notify_all()
        return Client(hello.worker, wire, memory, self.codec, record)

    def _admit(self, client: Client, words: dict[str, Any]) -> None:
        worker, wire = client.id, client.wire
        returns = words["incarnation"] == self.incarnation  # and has the weights that it was given
        with self.lock:
            if self._closed:
                raise ConnectionLost("the server is closed")
            lost = words["version"] - self.version
            if lost > 0 and not returns:
                self.note(
                    f"worker {worker} had seen step {words['version']}: {lost} steps were lost and are done again"
                )
            if not returns:
                self._fill(client)
            if worker >= self.settings.workers and self.coordinates:
                self.note(f"worker {worker} joined after step {self.version}, from {wire.host}")
            self.clients[worker] = client
            self.left.discard(worker)
            if returns:
                self._join(client)
            self.lock.notify_all()
        wire.send(
            "welcome",
            version=self.version,
            words={"incarnation": self.incarnation, "applied": client.record.applied} | self._facts(),
            payload=None if wire.local or returns else view(client.memory.down),
        )

    def _join(self, client: Client) -> None:
        if not client.ready:
            client.ready = True
            self.coordinator.join(client)

    @property
    def ready(self) -> list[int]:
        """Workers that are here, and have reached all servers."""
        return sorted(worker for worker, client in self.clients.items() if client.ready)

    @property
    def own(self) -> list[int]:
        """Those, without the ones that came later, from elsewhere."""
        return [worker for worker in self.ready if worker < self.settings.workers]

    def may_begin(self) -> bool:
        """Whether all that are expected have come, but for those that died before they were ready, and will not."""
        absent, at = self.expected.difference(self.ready), self.settings.meeting
        if not absent or (at is not None and all(gone_mark(at, worker).exists() for worker in absent)):
            self.expected = set()
        return not self.expected

    def _answer(self, client: Client, message: Message) -> bool:
        """Do what a worker asks, and say so. False: it has left."""
        kind, words, sequence = message.kind, message.words, message.sequence
        if kind in ("leave", "progress"):
            return kind == "progress"
        if kind == "pull":
            self._deliver(client, sequence, {}, averaged=words.get("averaged", False))
            return True
        with self.lock:
            done = sequence <= client.record.applied
            match kind:
                case "push":
                    reply = client.record.reply if done else self.coordinator.push(client, message)
                case "step":
                    stepped = done or self.coordinator.step(client, message)
                    reply = client.record.result | self._facts() if stepped else None
                case "meet":
                    reply = self.coordinator.meet(client, words)
                case "agree":
                    reply = self.coordinator.agree(client, words["summed"])
                case "wait":
                    self.wait(client, lambda: client.id == min(self.clients))
                    reply = {"done": any(worker < client.id for worker in self.left)}
                case "state":
                    reply = {"path": self._write_state(client)}
                case "where":
                    self._join(client)
                    reply = self.coordinator.place(client)
                case "drop":
                    self.coordinator.drop(client, message)
                    return True
                case _:
                    raise WireError(f"a worker sent {kind!r}, which is for servers to say")
        if kind == "step" and reply is not None and words["pull"]:
            if self.coordinates:
                with self.lock:
                    reply |= self.coordinator.place(client)  # it waits until it may go on
            self._deliver(client, sequence, reply)
        else:
            answer = "again" if reply is None else "reply"
            client.wire.send(answer, sequence=sequence, version=self.version, words=reply)
        return True

    def _deliver(self, client: Client, sequence: int, words: dict[str, Any], *, averaged: bool = False) -> None:
        """Send the weights as they are now."""
        with self.access.reading():
            version = self.version
            self._fill(client, averaged=averaged)
        client.wire.send(
            "weights",
            sequence=sequence,
            version=version,
            words=words | self._facts(),
            payload=None if client.wire.local else view(client.memory.down),
        )

    def _fill(self, client: Client, *, averaged: bool = False) -> None:
        self.keeper.fill(client.memory.down, averaged=averaged)
        client.record.given = self.keeper.statistics.buffer.clone()

    def _facts(self) -> dict[str, Any]:
        return {"lr": self.keeper.update.learning_rate, "samples": self.samples, "steps": self.version}

    # Called by the coordinator, the lock held

    def wait(self, client: Client, ready: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Until ``ready``, as long as this worker is connected."""
        signed = time.monotonic()
        while not ready():
            here = self.clients.get(client.id) is client and not client.replaced
            if self._closed or self.failed or not here or client.wire.gone():
                raise ConnectionLost("left while it waited for others")
            self.lock.wait(LOOK_SECONDS)
            tick()
            if time.monotonic() - signed > SIGN_SECONDS:
                signed = time.monotonic()
                client.wire.sign("waits")

    def step(
        self, summed: list[Push], answered: Iterable[Push], words: dict[str, Any], *, late: int = 0, ticks: int = 1
    ) -> None:
        """Step with the sum of the gradients ``summed``, which are ``late`` updates late; the requests ``answered`` are
        then done. ``ticks``: steps of the schedule."""
        names, number = self.keeper.parcel.names, self.version + 1
        reached = set().union(*(push.reached(names) for push in summed))
        scalars = {key: words[key] for key in ("loss", "correction", "norm")}
        usual = sum(each * count for each, count in self.staleness.items()) / max(1, self.staleness.total())
        with self.access.changing(), current().span("update"):
            updated = self.keeper.step(reached, **scalars, staleness=late, usual=usual, ticks=ticks)
            if updated.taken:
                self.keeper.statistics.merge([push.statistics for push in summed])
            self.version = number
            self.samples += sum(push.words["samples"] for push in summed)
            result = {"norm": float(updated.norm), "taken": bool(updated.taken), "staleness": late, "step": number}
            result |= {"seen": self.samples}
            for push in answered:
                push.client.record.applied, push.client.record.result = push.message.sequence, result
            self.staleness[late] += 1
            if self.settings.every and self.version % self.settings.every == 0:
                assert self.settings.folder is not None
                self._writer.start(self.settings.folder, self.version, *self._state())

    @property
    def leader(self) -> int:
        """Of the workers: it does what one does for all, or has done it and left."""
        return min(self.clients.keys() | self.left, default=0)

    def note(self, what: str) -> None:
        self.notes.append(what)
        self._report(what)

    def drop(self, client: Client, why: str) -> None:
        """Count a worker as gone: it left, or was lost because of ``why``."""
        worker = client.id
        with self.lock:
            if self.clients.get(worker) is not client or client.replaced or self._closed:
                return
            self.clients.pop(worker).wire.close()
            if why:
                self.note(f"worker {worker} was lost at step {self.version}: {why}")
            else:
                self.left.add(worker)
                if worker >= self.settings.workers and self.coordinates and not self.coordinator.finished:
                    self.note(f"worker {worker} left after step {self.version}")
            self.coordinator.lost(worker, left=not why)
            self.lock.notify_all()

    # Snapshots

    def _write_state(self, client: Client) -> str:
        """The folder in which the one who asks, and nobody else, finds all that is kept here, as it is now."""
        assert self.settings.folder is not None
        folder = self.settings.folder / f"asked{client.id}"
        tensors, facts = self._state()
        write(folder, self.version, tensors, facts | {"recent_steps": list(self.coordinator.recent_steps)})
        return str(folder)

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        with self.access.reading():
            tensors, kept = self.keeper.state()
        return tensors, {
            "version": self.version,
            "samples": self.samples,
            "keeper": kept,
            "coordinator": self.coordinator.facts(),
            "applied": {str(worker): record.applied for worker, record in self.records.items()},
            "staleness": {str(late): count for late, count in self.staleness.items()},
        }

    def _resume(self) -> None:
        found = None if self.settings.folder is None else newest(self.settings.folder, self.settings.upto)
        if found is None:
            return
        tensors, facts = found
        self.keeper.restore(tensors, facts["keeper"])
        self.coordinator.restore(facts["coordinator"])
        self.version, self.samples = facts["version"], facts["samples"]
        self.records = {int(worker): ClientRecord(applied) for worker, applied in facts["applied"].items()}
        self.staleness.update({int(late): count for late, count in facts["staleness"].items()})
        self.note(f"goes on from its snapshot of step {self.version}")
