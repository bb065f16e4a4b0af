"""The asynchronous server: each gradient is a step of its own, taken as it comes.

A step is one gradient of one worker, over its own samples: batch_size/w of them. Schedule and average go on once for
every batch_size samples, so that runs can be compared by the samples they have seen. A gradient's staleness, the
updates between the weights it was computed with and those it is applied to, is recorded for each.

No worker is more than ``staleness`` of its own steps ahead of the slowest: it gets its next weights when that one has
caught up. The first server keeps clocks and tickets; the others step when a worker says so.

Each worker reports its own steps, a few at a time. The first server remembers the last of all, so that those of a
worker that dies before it has reported them are known to who saves: no step before a checkpoint is missing.
"""

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from meshfit.events import current
from meshfit.server.client import Client, Push
from meshfit.server.clocks import Clocks, Tickets
from meshfit.server.keeper import squared
from meshfit.server.wire import Message

if TYPE_CHECKING:
    from meshfit.server.server import Server


REMEMBERED = 1000  # steps


class AsynchronousCoordinator:
    def __init__(self, server: "Server"):
        self.server, self.keeper, self.settings = server, server.keeper, server.settings
        self.tickets = Tickets.after(self.settings.first, self.settings.applied, self.settings.total)
        self.clocks = Clocks(self.settings.staleness)
        self.expected = set(range(self.settings.workers))
        """Workers that must have come before the first batch is given out."""
        self.recent_steps: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        """The last ones, as who took them would report them."""

    @property
    def finished(self) -> bool:
        return self.tickets.finished

    # Coming and going; the server's lock is held

    def join(self, client: Client) -> None:
        self.clocks.join(client.id)

    def _may_begin(self) -> bool:
        if self.expected and self.server.all_here(self.expected):
            self.expected = set()
        return not self.expected

    def lost(self, worker: int, *, left: bool) -> None:
        self.tickets.give_back(worker)
        self.clocks.leave(worker)
        self.server.lock.notify_all()

    def place(self, client: Client) -> dict[str, Any]:
        """Its next batch, once it may go on. At the end it waits until the last batch of all others is done."""
        if not self.server.coordinates:
            return self._place(client, None)
        self.server.wait(client, self._may_begin)
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
        self.tickets, self.expected = Tickets.of(facts["tickets"]), set()
