"""A model server: owns weights and optimizer, and steps for all its workers.

Each worker has one connection, and one thread here that listens to it; so a worker that dies is noticed at once, and
by its own thread alone. What a worker asks for:

    hello     who it is, how its payload is laid out, its shared memory        welcome
    where     which batch is next, and who shares it                           place
    meet      what it says to the others in the middle of a batch              heard, or again
    push      its gradient, and what rides along                               heard, or again
    step      take the step; the factor and the norm, now that all is known    weights
    drop      do not
    pull      the weights, or the averaged ones                                weights
    state     all that it keeps, as a snapshot in its folder                   state
    after     at the end: wait until those before it are gone                  heard
    leave

Before that, over an address that was opened to other hosts, one that is no worker yet may ask to ``join``: it is told
who it is to be, or why not.

Between ``push`` and ``step`` workers learn the sums of all: the count that the mean is over, and the norm of the
gradients of all servers. So servers need not talk to each other. How gradients of several workers become a step is in
together.py and apart.py.

    traffic   for each worker and step: its gradients up, the weights down (P bytes each, over all servers)
    memory    weights, a gradient and the optimizer state: P, P, and for AdamW 2P; nothing for each worker on this host
"""

import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from meshfit.server.asynchronous import Apart
from meshfit.server.compress import Codec
from meshfit.server.invitation import Offer
from meshfit.server.keeper import Keeper
from meshfit.server.messages import check as check_words
from meshfit.server.packing import behind
from meshfit.server.peer import Peer, Record, Turns
from meshfit.server.settings import Terms
from meshfit.server.shared_memory import Region, view
from meshfit.server.snapshot import newest, write
from meshfit.server.synchronous import Together
from meshfit.server.wire import Gone, Listener, Message, Wire, WireError

LOOK_SECONDS = 0.2  # how often a thread that waits for others looks whether its own worker is still there
GREETING_SECONDS = 5.0


class Server:
    """Serves from the moment it is built until ``close``; goes on from the newest snapshot in its folder, if any."""

    def __init__(
        self,
        keeper: Keeper,
        terms: Terms,
        *,
        address: str,
        secret: bytes,
        tell: Callable[[str], None] = lambda what: None,
    ):
        self.keeper, self.terms, self._tell = keeper, terms, tell
        self.codec = Codec(terms.compress, keeper.parcel)
        self.incarnation = secrets.token_hex(8)
        """Another one for each start: who knew an earlier one must look again."""
        self.leads = terms.index == 0
        self.lock = threading.Condition()
        self.turns = Turns()
        self.peers: dict[int, Peer] = {}
        self.records: dict[int, Record] = {}
        self.version, self.samples = terms.step, terms.samples
        self.staleness: Counter[int] = Counter()
        """How many gradients were applied with which staleness."""
        self.said: list[str] = []
        """What happened, in words."""
        self.left: set[int] = set()
        self.failed: Exception | None = None
        """What made it give up; ``join`` raises it."""
        self._alone_since = time.monotonic()
        self._writing: threading.Thread | None = None
        self._closed = False
        self.conduct = Together(self) if terms.staleness == 0 else Apart(self)
        self._resume()
        self.offer: Offer | None = None
        """To workers that come later, from elsewhere."""
        self._listeners = [Listener(address, secret, self._serve)]

    def open(self, address: str, key: bytes, offer: Offer | None) -> None:
        """Listen to other hosts too."""
        self.offer = offer
        self._listeners.append(Listener(address, key, self._serve))

    @property
    def address(self) -> str:
        return self._listeners[0].address

    @property
    def usual_staleness(self) -> float:
        total = sum(self.staleness.values())
        return sum(late * count for late, count in self.staleness.items()) / total if total else 0.0

    @property
    def up_bytes(self) -> int:
        return behind(self.codec.bytes) + self.keeper.statistics.bytes

    # For those who wait for it

    def join(self, timeout: float | None = None, *, alone: float = math.inf) -> None:
        """Wait until all is done and every worker has left. ``alone``: seconds without any worker that end it too."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self.lock:
            while not self.failed and not (self.left and not self.peers and (self.conduct.finished or not self.leads)):
                if time.monotonic() > until:
                    raise TimeoutError("the server still has work, or workers")
                if not self.peers and time.monotonic() - self._alone_since > alone:
                    self.say(f"no worker for {alone:g} s: the server ends at step {self.version}")
                    return
                self.lock.wait(LOOK_SECONDS)
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self.lock:
            self._closed = True
            for peer in self.peers.values():
                peer.wire.close()
            self.lock.notify_all()
        if self._writing is not None:
            self._writing.join()

    # One worker's thread

    def _serve(self, wire: Wire) -> None:
        peer = None
        try:
            peer = self._meet(wire)
            if peer is None:
                return
            while self._answer(peer, peer.wire.recv(self._into(peer), check=lambda m: self._check(peer, m))):
                pass
            self.drop(peer.id, "", peer)
        except (Gone, TimeoutError) as error:
            if peer is not None:
                self._lost(peer, str(error))
        except WireError as error:
            self._refuse(wire, error)
            if peer is not None:
                self.drop(peer.id, str(error), peer)
        except Exception as error:  # an optimizer that raises, say: no step can follow
            self._fail(error)
        finally:
            wire.close()

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self.failed = self.failed or error
            why = WireError("the server has failed", f"{type(error).__name__}: {error}")
            for peer in self.peers.values():
                self._refuse(peer.wire, why)
                peer.wire.close()
            self.lock.notify_all()

    def _into(self, peer: Peer) -> memoryview | None:
        """Where a gradient goes that comes over the connection; a shared one is there already."""
        return view(peer.region.up) if not peer.wire.local else None

    def _check(self, peer: Peer, message: Message) -> None:
        if message.worker != peer.id:
            raise WireError(f"worker {peer.id} speaks as worker {message.worker}")
        if message.payload and message.kind != "push":
            raise WireError(f"a {message.kind!r} with a payload that was not due")
        check_words(message)

    def _refuse(self, wire: Wire, error: WireError) -> None:
        with suppress(Gone):
            wire.send("error", words={"headline": error.headline, "facts": list(error.facts)})

    def _meet(self, wire: Wire) -> Peer | None:
        hello = wire.recv(timeout=GREETING_SECONDS, check=check_words)
        words = hello.words
        if hello.kind == "join" and self.offer is not None:
            self._invite(wire, words, self.offer)
            return None
        mine = [self.keeper.parcel.digest, self.keeper.statistics.parcel.digest, self.codec.word]
        if hello.kind != "hello" or words.get("layout") != mine:
            for fd in hello.fds:
                os.close(fd)
            raise WireError(
                "a worker holds another model than the server, or another part of it",
                "names, shapes, dtypes and strides of all trained parameters must be the same, and compress=",
            )
        if hello.fds:
            region = Region.map(hello.fds[0], self.up_bytes, self.keeper.bytes)
        else:
            region = Region.own(self.up_bytes, self.keeper.bytes)
        wire.local = bool(hello.fds)
        wire.worker = worker = hello.worker
        with self.lock:
            if worker in self.peers:  # its old connection is of no use to it any more
                self.peers[worker].wire.close()
                self._forget(self.peers[worker])
            record = self.records.setdefault(worker, Record())
            peer = Peer(worker, wire, region, self.codec, record)
            lost = words["version"] - self.version
            if lost > 0 and words["incarnation"] != self.incarnation:
                self.say(f"worker {worker} had seen step {words['version']}: {lost} steps were lost and are done again")
            returns = words["incarnation"] == self.incarnation  # and has the weights that it was given
            if not returns:
                self._fill(peer)
            if worker >= self.terms.workers and self.leads:
                self.say(f"worker {worker} joined after step {self.version}, from {wire.host}")
            self.peers[worker] = peer
            self.left.discard(worker)
            self.conduct.join(peer)
            self.lock.notify_all()
        wire.send(
            "welcome",
            version=self.version,
            words={"incarnation": self.incarnation, "applied": record.applied} | self._facts(),
            payload=() if hello.fds or returns else [view(region.down)],
        )
        return peer

    def _invite(self, wire: Wire, words: dict[str, Any], offer: Offer) -> None:
        """Say what this run is; to one that says what it has, also who it is to be."""
        with self.lock:
            if self.conduct.finished:
                raise WireError("the run is over", f"step {self.version} was its last")
            number = offer.number(words["job"]) if "job" in words else None
        wire.send("welcome", version=self.version, words=offer.terms | {"worker": number})

    @property
    def own(self) -> int:
        """Workers that are here, without those that have joined."""
        return sum(worker < self.terms.workers for worker in self.peers)

    def _answer(self, peer: Peer, message: Message) -> bool:
        """Do what a worker asks, and say so. False: it has left."""
        words, sequence = message.words, message.sequence
        match message.kind:
            case "push":
                with self.lock:
                    done = sequence <= peer.record.applied
                    heard = peer.record.heard if done else self.conduct.push(peer, message)
                self._say(peer, "again" if heard is None else "heard", sequence, heard)
            case "meet":
                with self.lock:
                    heard = self.conduct.meet(peer, words)
                self._say(peer, "again" if heard is None else "heard", sequence, heard)
            case "after":
                with self.lock:
                    self.wait(peer, lambda: peer.id == min(self.peers))
                    done = any(worker < peer.id for worker in self.left)
                self._say(peer, "heard", sequence, {"done": done})
            case "agree":
                with self.lock:
                    heard = self.conduct.agree(peer, words["summed"])
                self._say(peer, "again" if heard is None else "heard", sequence, heard)
            case "step":
                with self.lock:
                    done = sequence <= peer.record.applied or self.conduct.step(peer, message)
                    result = dict(peer.record.result)
                if not done:
                    self._say(peer, "again", sequence)
                elif words["pull"]:
                    self._deliver(peer, sequence, result)
                else:
                    self._say(peer, "place", sequence, result | self._facts())
            case "drop":
                with self.lock:
                    self.conduct.drop(peer, message)
            case "pull":
                self._deliver(peer, sequence, {}, averaged=words.get("averaged", False), place=False)
            case "state":
                with self.lock:
                    path = self._write_state(peer)
                self._say(peer, "state", sequence, {"path": path})
            case "where":
                with self.lock:
                    place = self.conduct.place(peer)
                self._say(peer, "place", sequence, place)
            case "leave":
                return False
            case _:
                raise WireError(f"a worker sent {message.kind!r}, which is for servers to say")
        return True

    def _deliver(
        self, peer: Peer, sequence: int, words: dict[str, Any], *, averaged: bool = False, place: bool = True
    ) -> None:
        """Send the weights, as they are once the worker may go on."""
        if place and self.leads:
            with self.lock:
                words = words | self.conduct.place(peer)
        with self.turns.reading():
            version = self.version
            self._fill(peer, averaged=averaged)
        peer.wire.send(
            "weights",
            sequence=sequence,
            version=version,
            words=words | self._facts(),
            payload=() if peer.wire.local else [view(peer.region.down)],
        )

    def _fill(self, peer: Peer, *, averaged: bool = False) -> None:
        self.keeper.fill(peer.region.down, averaged=averaged)
        peer.record.given = self.keeper.statistics.buffer.clone()

    def _facts(self) -> dict[str, Any]:
        return {"lr": self.keeper.update.learning_rate, "samples": self.samples, "steps": self.version}

    def _say(self, peer: Peer, kind: str, sequence: int, words: dict[str, Any] | None = None) -> None:
        peer.wire.send(kind, sequence=sequence, version=self.version, words=words)

    # Called by the conduct, the lock held

    def wait(self, peer: Peer, ready: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Until ``ready``; as long as this worker is there to hear of it."""
        while not ready():
            if self._closed or self.failed or self.peers.get(peer.id) is not peer or peer.wire.gone():
                raise Gone("left while it waited for others")
            self.lock.wait(LOOK_SECONDS)
            tick()

    def stepped(self, *, samples: float, staleness: list[int]) -> None:
        self.version += 1
        self.samples += samples
        self.staleness.update(staleness)
        if self.terms.every and self.version % self.terms.every == 0:
            self._snapshot()

    @property
    def first(self) -> int:
        """Of the workers: it does what one does for all, or has done it and left."""
        return min(self.peers.keys() | self.left, default=0)

    def say(self, what: str) -> None:
        self.said.append(what)
        self._tell(what)

    def drop(self, worker: int, why: str, peer: Peer | None = None) -> None:
        """Count a worker as gone: it left, or was lost because of ``why``."""
        with self.lock:
            here = self.peers.get(worker)
            if here is None or (peer is not None and here is not peer):
                return
            here.wire.close()
            self._forget(here)
            if why:
                self.say(f"worker {worker} was lost at step {self.version}: {why}")
            else:
                self.left.add(worker)
                if worker >= self.terms.workers and self.leads and not self.conduct.finished:
                    self.say(f"worker {worker} left after step {self.version}")
            self.conduct.lost(worker, left=not why)
            self.lock.notify_all()

    def _forget(self, peer: Peer) -> None:
        self.peers.pop(peer.id, None)
        if not self.peers:
            self._alone_since = time.monotonic()

    def _lost(self, peer: Peer, why: str) -> None:
        """Its connection broke. It may be back within the grace it is given."""
        until = time.monotonic() + self.terms.grace
        with self.lock:
            while time.monotonic() < until and self.peers.get(peer.id) is peer and not self._closed:
                self.lock.wait(until - time.monotonic())
        if not self._closed:
            self.drop(peer.id, why, peer)

    # Snapshots

    def _snapshot(self) -> None:
        """Copy what there is now; write it while others go on."""
        assert self.terms.folder is not None
        if self._writing is not None:
            self._writing.join()
        work = threading.Thread(target=write, args=(self.terms.folder, self.version, *self._state()))
        work.start()
        self._writing = work

    def _write_state(self, peer: Peer) -> str:
        """The folder in which the one who asks, and nobody else, finds all that is kept here, as it is now."""
        assert self.terms.folder is not None
        folder = self.terms.folder / f"asked{peer.id}"
        write(folder, self.version, *self._state())
        return str(folder)

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        with self.turns.reading():
            tensors, kept = self.keeper.state()
        return tensors, {
            "version": self.version,
            "samples": self.samples,
            "keeper": kept,
            "conduct": self.conduct.facts(),
            "applied": {str(worker): record.applied for worker, record in self.records.items()},
            "staleness": {str(late): count for late, count in self.staleness.items()},
        }

    def _resume(self) -> None:
        found = None if self.terms.folder is None else newest(self.terms.folder, self.terms.upto)
        if found is None:
            return
        tensors, facts = found
        self.keeper.restore(tensors, facts["keeper"])
        self.conduct.restore(facts["conduct"])
        self.version, self.samples = facts["version"], facts["samples"]
        self.records = {int(worker): Record(applied) for worker, applied in facts["applied"].items()}
        self.staleness.update({int(late): count for late, count in facts["staleness"].items()})
        self.say(f"goes on from its snapshot of step {self.version}")
