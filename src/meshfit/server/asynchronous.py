"""The asynchronous server: each gradient is a step of its own, taken as it comes.

A step is one gradient of one worker, over its own samples: batch_size/w of them. Schedule and average go on once for
every batch_size samples, so that runs can be compared by the samples they have seen. A gradient's staleness, the
updates between the weights it was computed with and those it is applied to, is recorded for each.

No worker is more than ``staleness`` of its own steps ahead of the slowest: it gets its next weights when that one has
caught up. The first server keeps clocks and tickets; the others step when a worker says so.

``Tickets`` number the batches. A worker works on the batch of its ticket; what it took and did not finish, because it
died, is given out again: so every batch is worked on once, by whoever is free.
``Clocks`` count each worker's own steps. Under a bound of k a worker that is k steps ahead of the slowest at work
waits: so it never has done more than k steps more. Of w workers a gradient is then at most 2k(w-1) updates late.

Each worker reports its own steps, a few at a time. The first server remembers the last of all, so that those of a
worker that dies before it has reported them are known to who saves: no step before a checkpoint is missing.
"""

import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshfit.events import current
from meshfit.server.client import Client, Push
from meshfit.server.keeper import squared
from meshfit.server.wire import Message

if TYPE_CHECKING:
    from meshfit.server.server import Server

REMEMBERED = 1000  # steps


@dataclass
class Tickets:
    total: int | None = None
    """Batches in all; None: as many as are asked for."""
    next: int = 0
    returned: list[int] = field(default_factory=list)
    out: dict[int, int] = field(default_factory=dict)
    """By worker: what it works on."""

    def take(self, worker: int) -> int | None:
        """The next batch for ``worker``; None: nothing is left to take, at least for now. Asked again before it is
        done, the same."""
        if worker in self.out:
            return self.out[worker]
        if self.returned:
            self.returned.sort()
            ticket = self.returned.pop(0)
        elif self.total is None or self.next < self.total:
            ticket, self.next = self.next, self.next + 1
        else:
            return None
        self.out[worker] = ticket
        return ticket

    def done(self, worker: int) -> None:
        self.out.pop(worker, None)

    def give_back(self, worker: int) -> None:
        if worker in self.out:
            self.returned.append(self.out.pop(worker))

    def close(self) -> None:
        """Give out no more."""
        self.total, self.returned = self.next, []

    @property
    def finished(self) -> bool:
        """Nothing left to take, and nothing under way."""
        return self.total is not None and self.next >= self.total and not self.returned and not self.out

    def facts(self) -> dict[str, object]:
        return {"total": self.total, "next": self.next, "returned": sorted([*self.returned, *self.out.values()])}

    @classmethod
    def after(cls, first: int, applied: Collection[int], total: int | None) -> "Tickets":
        """From ``first`` on, without those that are ``applied``."""
        upto = max(applied, default=first - 1) + 1
        return cls(total, upto, [ticket for ticket in range(first, upto) if ticket not in applied])

    @classmethod
    def of(cls, facts: dict) -> "Tickets":
        return cls(facts["total"], facts["next"], list(facts["returned"]))


@dataclass
class Clocks:
    bound: float = math.inf
    steps: dict[int, int] = field(default_factory=dict)
    """By worker at work."""

    def join(self, worker: int) -> None:
        """Start beside the slowest: a worker that comes late holds nobody up for what it missed."""
        self.steps[worker] = min(self.steps.values(), default=0)

    def leave(self, worker: int) -> None:
        self.steps.pop(worker, None)

    def advance(self, worker: int) -> None:
        if worker in self.steps:
            self.steps[worker] += 1

    def may_go(self, worker: int) -> bool:
        return worker not in self.steps or self.steps[worker] - min(self.steps.values()) < self.bound


class AsynchronousCoordinator:
    def __init__(self, server: "Server"):
        self.server, self.keeper, self.settings = server, server.keeper, server.settings
        self.tickets = Tickets.after(self.settings.first, self.settings.applied, self.settings.total)
        self.clocks = Clocks(self.settings.staleness)
        self.recent_steps: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        """The last ones, as who took them would report them."""

    @property
    def finished(self) -> bool:
        return self.tickets.finished

    # Coming and going; the server's lock is held

    def join(self, client: Client) -> None:
        self.clocks.join(client.id)

    def lost(self, worker: int, *, left: bool) -> None:
        self.tickets.give_back(worker)
        self.clocks.leave(worker)
        self.server.lock.notify_all()

    def place(self, client: Client) -> dict[str, Any]:
        """Its next batch, once it may go on. At the end it waits until the last batch of all others is done."""
        if not self.server.coordinates:
            return self._place(client, None)
        self.server.wait(client, self.server.may_begin)
        while True:
            self.server.wait(client, lambda: self.clocks.may_go(client.id))
            ticket = self.tickets.take(client.id)
            if ticket is not None or self.finished:
                return self._place(client, ticket)
            self.clocks.leave(client.id)  # it holds nobody up while there is nothing for it
            self.server.lock.notify_all()
            self.server.wait(client, lambda: self.finished or bool(self.tickets.returned))
            self.clocks.join(client.id)

    def _place(self, client: Client, ticket: int | None) -> dict[str, Any]:
        return {"ticket": ticket, "members": [client.id], "round": "", "leader": self.server.leader}

    # A step

    def meet(self, client: Client, words: dict[str, Any]) -> dict[str, Any] | None:
        return {"all": [words["said"]]}

    def push(self, client: Client, message: Message) -> dict[str, Any] | None:
        """Its own words, and the squared norm of what it sent."""
        words = message.words
        if self.server.coordinates and self.tickets.out.get(client.id) != words["ticket"]:
            return None
        client.push = push = Push(client, message)
        self.server.lock.release()  # what a norm takes, others need not wait for
        try:
            square = squared(push.gradients)
        finally:
            self.server.lock.acquire()
        own = {key: words[key] for key in ("loss", "count", "stop", "values")}
        client.record.reply = own | {"broken": [words["broken"]], "summed": [client.id], "square": square}
        return client.record.reply

    def agree(self, client: Client, workers: list[int]) -> dict[str, Any] | None:
        return None

    def step(self, client: Client, message: Message) -> bool:
        push, server = client.push, self.server
        if push is None or push.message.sequence != message.sequence:
            return False
        current().step = server.version + 1
        late, size = server.version - push.message.version, self.settings.batch_size
        ticks = (server.samples + push.words["samples"]) // size - server.samples // size
        told = {key: push.words[key] for key in ("epoch", "last", "values")} | {"loss": message.words["loss"]}
        told |= {"lr": self.keeper.update.learning_rate}
        self.keeper.load(push.gradients)
        client.push = None
        self.clocks.advance(client.id)
        self.tickets.done(client.id)
        server.step([push], [push], message.words, late=late, ticks=int(ticks))
        self.recent_steps.append(told | client.record.result | {"at": time.perf_counter()})
        server.lock.notify_all()
        return True

    def drop(self, client: Client, message: Message) -> None:
        client.push = None
        if message.words.get("stop"):
            self.tickets.give_back(client.id)
            self.tickets.close()
        self.server.lock.notify_all()

    def facts(self) -> dict[str, Any]:
        return {"tickets": self.tickets.facts()}

    def restore(self, facts: dict[str, Any]) -> None:
        self.tickets, self.server.expected = Tickets.of(facts["tickets"]), set()
