"""The synchronous round: the server waits for the gradients of all its workers, and steps once with their sum.

A round is one batch (its ticket) and the workers that share it. Gradients are summed in the order of the workers, not
of their arrival: the same sum each time. A worker whose connection is lost before its gradient has come is

    average   left out: the step is taken over the samples of those left
    redo      done without: those left share the batch anew, so the step is that of the whole batch

A worker that comes late, or comes back, is part of the next round. One that leaves takes nothing along: its round is
done again. In the middle of a batch workers may ``meet``: each sends something, and gets what all have sent.
"""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshfit.events import current
from meshfit.server.client import Client, Push
from meshfit.server.wire import Message

if TYPE_CHECKING:
    from meshfit.server.server import Server


@dataclass
class Round:
    name: str
    """Given by the first server; the others know a round by it."""
    ticket: int
    members: tuple[int, ...]
    lost: set[int] = field(default_factory=set)
    pushes: dict[int, Push] = field(default_factory=dict)
    meetings: dict[int, dict[int, str]] = field(default_factory=dict)
    """By number: what each worker said."""
    reply: dict[str, Any] | None = None
    dead: bool = False
    """To be done again, by others or otherwise shared."""
    began: float = field(default_factory=time.monotonic)
    """When its first gradient came."""

    @property
    def missing(self) -> set[int]:
        return set(self.members) - self.pushes.keys() - self.lost


class SynchronousCoordinator:
    recent_steps = ()
    """Known to the leader, who reports them all."""

    def __init__(self, server: "Server"):
        self.server, self.keeper, self.settings = server, server.keeper, server.settings
        self.round: Round | None = None
        self.stopped = False
        self._rounds = 0

    @property
    def ticket(self) -> int | None:
        """The batch that is next; None after the last."""
        number = self.server.version - self.settings.step + self.settings.first
        done = self.stopped or (self.settings.total is not None and number >= self.settings.total)
        return None if done else number

    @property
    def finished(self) -> bool:
        return self.ticket is None

    # Coming and going; the server's lock is held

    def join(self, client: Client) -> None:
        if self.round is None or not any(id in self.server.clients for id in self.round.members):
            self._begin()

    def lost(self, worker: int, *, left: bool) -> None:
        round = self.round
        if round is None or worker not in round.missing or round.reply is not None:
            return
        if self.settings.lost == "redo" or left:
            if self.server.coordinates and not left and not round.dead:
                self.server.note(f"step {self.server.version + 1} is done again by those left")
            self._void(round)
        else:
            round.lost.add(worker)
            self._complete(round)

    def _void(self, round: Round) -> None:
        """Have the batch done again, by those that are here now."""
        round.dead = True
        self._begin()

    def _begin(self) -> None:
        server = self.server
        if server.coordinates and self.ticket is not None and server.own and server.may_begin():
            self._rounds += 1
            self.round = Round(f"{server.incarnation}/{self._rounds}", self.ticket, tuple(server.ready))
        elif server.coordinates:
            self.round = None
        server.lock.notify_all()

    def place(self, client: Client) -> dict[str, Any]:
        """Which batch is next for this worker, and with whom it shares it; waits until there is one."""
        ready = lambda: self.finished or (self.round is not None and client.id in self.round.members)
        self.server.wait(client, ready, tick=self._begin_without)
        if self.finished:
            return {"ticket": None, "members": [client.id], "round": "", "leader": self.server.leader}
        assert self.round is not None
        members = list(self.round.members)
        return {"ticket": self.round.ticket, "members": members, "round": self.round.name, "leader": members[0]}

    def _begin_without(self) -> None:
        """Those that are waited for, and have died meanwhile."""
        if self.round is None:
            self._begin()

    # A step

    def meet(self, client: Client, words: dict[str, Any]) -> dict[str, Any] | None:
        """What all workers say, in their order; None: the batch is to be done again, since one is gone."""
        round, number, since = self.round, words["number"], time.monotonic()
        if round is None or round.dead or round.name != words["round"]:
            return None
        meeting = round.meetings.setdefault(number, {})
        meeting[client.id] = words["said"]
        if len(meeting) == len(round.members):
            round.meetings.pop(number - 1, None)  # who is here has it
            self.server.lock.notify_all()
        absent = lambda: set(round.members) - meeting.keys()
        ready = lambda: not absent() or round.dead or not absent().isdisjoint(round.lost)
        self.server.wait(client, ready, tick=lambda: self._hung(round, absent(), since))
        if not absent():
            return {"all": [meeting[id] for id in round.members]}
        if not round.dead:
            self._void(round)
        return None

    def push(self, client: Client, message: Message) -> dict[str, Any] | None:
        """What all workers have to say, once all have spoken; None: the batch is to be done again."""
        if not self.server.coordinates:
            self._follow(message.words)
        round = self.round
        if round is None or round.dead or round.name != message.words["round"]:
            return None
        if not round.pushes:
            round.began = time.monotonic()
        round.pushes[client.id] = Push(client, message)
        round.lost.discard(client.id)
        self._complete(round)
        self.server.wait(
            client,
            lambda: round.reply is not None or round.dead,
            tick=lambda: self._hung(round, round.missing, round.began),
        )
        return round.reply  # also if others have gone on since: their step was this worker's too

    def _follow(self, words: dict[str, Any]) -> None:
        """Be in the round that the first server has begun."""
        if self.round is None or self.round.name != words["round"]:
            if self.round is not None:
                self._void(self.round)
            self.round = Round(words["round"], words["ticket"], tuple(words["members"]))
        gone = {id for id in self.round.missing if id not in self.server.clients}
        if gone and self.settings.lost == "redo":
            self._void(self.round)
        self.round.lost |= gone

    def _hung(self, round: Round, missing: set[int], since: float) -> None:
        """Give up on those that are connected, but neither send nor get on."""
        late = time.monotonic() - self.settings.patience
        if since < late and round.reply is None and not round.dead:
            for client in [self.server.clients[worker] for worker in missing if worker in self.server.clients]:
                if client.heard < late:
                    self.server.drop(client, f"was not heard from for {self.settings.patience:g} s")

    def _complete(self, round: Round) -> None:
        if round.reply is None and not round.dead and not round.missing and round.pushes:
            self._sum(round, [id for id in round.members if id in round.pushes])

    def _sum(self, round: Round, workers: list[int]) -> None:
        pushes = [round.pushes[id] for id in workers]
        current().step = self.server.version + 1
        with current().span("sum"):
            for i, push in enumerate(pushes):
                self.keeper.load(push.gradients, add=i > 0)
        sent = [push.words for push in pushes]
        losses = [words["loss"] for words in sent]
        broken = {push.client.id: push.words["broken"] for push in pushes}
        round.reply = {
            "loss": math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan,
            "count": sum(words["count"] for words in sent),
            "stop": sum(words["stop"] for words in sent),
            "broken": [broken.get(id, 0.0) for id in round.members],
            "values": [sum(each) for each in zip(*(words["values"] for words in sent), strict=False)],
            "summed": workers,
            "square": self.keeper.square(),
        }
        self.server.lock.notify_all()

    def agree(self, client: Client, workers: list[int]) -> dict[str, Any] | None:
        """Sum over ``workers`` alone: another server has lost the others before they had sent it their share."""
        round = self.round
        if round is None or round.dead or client.id not in round.pushes or round.reply is None:
            return None
        if round.reply["summed"] != workers:
            self._sum(round, workers)
        return round.reply

    def step(self, client: Client, message: Message) -> bool:
        """Step, if no other worker's word has made it so. False: the batch is to be done again."""
        round = self.round
        if round is None or round.dead or round.reply is None or client.id not in round.pushes:
            return False
        summed = [round.pushes[id] for id in round.reply["summed"]]
        for push in round.pushes.values():
            push.client.record.reply = round.reply
        self.server.step(summed, round.pushes.values(), message.words)
        samples = sum(push.words["samples"] for push in summed)
        if self.server.coordinates and len(summed) < len(round.members):
            self.server.note(f"step {self.server.version} was averaged over the {samples:g} samples of those left")
        self._begin()
        return True

    def drop(self, client: Client, message: Message) -> None:
        """A worker does not want the step; as all got the same reply, none does."""
        self.stopped |= bool(message.words.get("stop"))
        round = self.round
        if self.stopped and round is not None and round.reply is None:
            round.dead = True
        push = None if round is None else round.pushes.get(client.id)
        if round is not None and push is not None and push.message.sequence == message.sequence:
            self._void(round)
        self.server.lock.notify_all()

    def facts(self) -> dict[str, Any]:
        return {"workers": self.server.own}

    def restore(self, facts: dict[str, Any]) -> None:
        self.server.expected = set(facts["workers"])
