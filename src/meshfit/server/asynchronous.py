"""The asynchronous server: each gradient is a step of its own, taken as it comes.

A step is one gradient of one worker, over its own samples: batch_size/w of them. Schedule and average go on once for
every batch_size samples, so that runs can be compared by the samples they have seen. A gradient's staleness, the
updates between the weights it was computed with and those it is applied to, is recorded for each.

No worker is more than ``staleness`` of its own steps ahead of the slowest: it gets its next weights when that one has
caught up. The first server keeps clocks and tickets; the others step when they are told.
"""

from typing import TYPE_CHECKING, Any

from meshfit.events import current
from meshfit.server.clocks import Clocks, Tickets
from meshfit.server.keeper import squared
from meshfit.server.peer import Peer, Push
from meshfit.server.wire import Message

if TYPE_CHECKING:
    from meshfit.server.server import Server


class Apart:
    def __init__(self, server: "Server"):
        self.server, self.keeper, self.terms = server, server.keeper, server.terms
        self.tickets = Tickets(self.terms.total, self.terms.first)
        self.clocks = Clocks(self.terms.staleness)
        self.expected = self.terms.workers
        """Workers that must have come before the first batch is given out."""

    @property
    def finished(self) -> bool:
        return self.tickets.finished

    # Coming and going; the server's lock is held

    def join(self, peer: Peer) -> None:
        self.clocks.join(peer.id)
        if self.server.own >= self.expected:
            self.expected = 0

    def lost(self, worker: int, *, left: bool) -> None:
        self.tickets.give_back(worker)
        self.clocks.leave(worker)
        self.server.lock.notify_all()

    def place(self, peer: Peer) -> dict[str, Any]:
        """Its next batch, once it may go on. At the end it waits until the last batch of all others is done."""
        if not self.server.leads:
            return self._place(peer, None)
        self.server.wait(peer, lambda: not self.expected)
        while True:
            self.server.wait(peer, lambda: self.clocks.may_go(peer.id))
            ticket = self.tickets.take(peer.id)
            if ticket is not None or self.finished:
                return self._place(peer, ticket)
            self.clocks.leave(peer.id)  # it holds nobody up while there is nothing for it
            self.server.lock.notify_all()
            self.server.wait(peer, lambda: self.finished or bool(self.tickets.returned))
            self.clocks.join(peer.id)

    def _place(self, peer: Peer, ticket: int | None) -> dict[str, Any]:
        return {"ticket": ticket, "members": [peer.id], "round": "", "first": self.server.first}

    # A step

    def meet(self, peer: Peer, words: dict[str, Any]) -> dict[str, Any] | None:
        return {"all": [words["said"]]}

    def push(self, peer: Peer, message: Message) -> dict[str, Any] | None:
        """Its own words, and the squared norm of what it sent."""
        words = message.words
        if self.server.leads and self.tickets.out.get(peer.id) != words["ticket"]:
            return None
        peer.push = push = Push.of(peer, message)
        self.server.lock.release()  # what a norm takes, others need not wait for
        try:
            square = squared(push.gradients)
        finally:
            self.server.lock.acquire()
        told = {key: words[key] for key in ("loss", "count", "stop")}
        peer.record.heard = told | {"broken": [words["broken"]], "summed": [peer.id], "square": square}
        return peer.record.heard

    def agree(self, peer: Peer, workers: list[int]) -> dict[str, Any] | None:
        return None

    def step(self, peer: Peer, message: Message) -> bool:
        push, words, server = peer.push, message.words, self.server
        if push is None or push.sequence != message.sequence:
            return False
        late = server.version - push.version
        before, after = server.samples, server.samples + push.words["samples"]
        current().step = server.version + 1
        with server.turns.changing(), current().span("update"):
            self.keeper.load(push.gradients)
            updated = self.keeper.step(
                push.reached(self.keeper.parcel.names),
                loss=words["loss"],
                correction=words["correction"],
                norm=words["norm"],
                staleness=late,
                usual=server.usual_staleness,
                ticks=int(after // self.terms.batch_size - before // self.terms.batch_size),
            )
            if updated.taken:
                self.keeper.statistics.merge([push.statistics])
            record = peer.record
            record.applied = push.sequence
            record.result = {"norm": float(updated.norm), "taken": bool(updated.taken), "staleness": late}
            record.result |= {"step": server.version + 1}
            peer.push = None
            self.clocks.advance(peer.id)
            self.tickets.done(peer.id)
            server.stepped(samples=push.words["samples"], staleness=[late])
        server.lock.notify_all()
        return True

    def drop(self, peer: Peer, message: Message) -> None:
        peer.push = None
        if message.words.get("stop"):
            self.tickets.give_back(peer.id)
            self.tickets.close()
        self.server.lock.notify_all()

    def facts(self) -> dict[str, Any]:
        return {"tickets": self.tickets.facts()}

    def restore(self, facts: dict[str, Any]) -> None:
        self.tickets, self.expected = Tickets.of(facts["tickets"]), 0
