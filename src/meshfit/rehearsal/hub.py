"""The caller's part of a rehearsal: messages between ranks go through here, and a rank that
waits in vain gets an answer that says so.

Ranks that have not ended either run or wait. Where all that are left wait, and nothing that was said answers any of
them, nothing ever will.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from meshfit.comm.order_check import communicator
from meshfit.rehearsal.others import Key, Never, Question, Said
from meshfit.rehearsal.places import Places


@dataclass
class Waiting:
    """A rank that asked, and from whom it will hear what, under which keys."""

    asked: Question
    who: list[tuple[Key, int]]
    missing: set[tuple[Key, int]]


@dataclass
class Hub:
    """``send``: to a rank that runs."""

    places: Places
    send: Callable[[int, Any], None]
    said: dict[tuple[Key, int], Any] = field(default_factory=dict)
    """By key and rank."""
    _running: set[int] = field(default_factory=set)
    _waiting: dict[int, Waiting] = field(default_factory=dict)
    _here: frozenset[int] = frozenset()

    def begin(self, ranks: Iterable[int]) -> None:
        """These run now; what others have said before stays said."""
        self._here = frozenset(ranks)
        self._running = set(self._here)
        self._waiting.clear()
        if kept := {key: value for key, value in self.said.items() if key[0][0] == "broadcast"}:
            self.said = {key: value for key, value in kept.items() if key[1] not in self._here}

    def hear(self, rank: int, message: Said | Question) -> None:
        if isinstance(message, Said):
            self.said[message.key, rank] = message.value
            for waiting in self._waiting.values():
                waiting.missing.discard((message.key, rank))
        else:
            who = [self._in_place_of(other, message) for other in message.ranks]
            self._waiting[rank] = Waiting(message, who, {each for each in who if each not in self.said})
            self._running.discard(rank)
        self._answer()

    def ended(self, rank: int) -> None:
        self._running.discard(rank)
        self._answer()

    def _answer(self) -> None:
        for rank, waiting in list(self._waiting.items()):
            if not waiting.missing:
                take = self.said.pop if waiting.asked.key[0] == "send" else self.said.__getitem__  # one receives it
                self._reply(rank, [take(each) for each in waiting.who])
        if not self._running:
            for rank, waiting in list(self._waiting.items()):
                who = zip(waiting.asked.ranks, waiting.who, strict=True)
                missing = {other for other, each in who if each in waiting.missing}
                self._reply(rank, Never(tuple(sorted(missing & self._here or missing))))

    def _in_place_of(self, rank: int, asked: Question) -> tuple[Key, int]:
        """Who speaks for ``rank``, and under which key: itself if it runs, or has said it before; else one of those
        that take part; of a broadcast, the rank with its place in another group like this one."""
        if rank in self._here or (asked.key, rank) in self.said:
            return asked.key, rank
        if asked.key[0] != "broadcast":
            nearest = self.places.nearest(rank, self._here.intersection(asked.group))
            return asked.key, rank if nearest is None else nearest
        word, name, number = asked.key
        at, varying = self.places.all, self.places.differing(asked.group)
        alike = [other for other in self._here if all(at[other][axis] == at[rank][axis] for axis in varying)]
        nearest = self.places.nearest(rank, alike)
        if nearest is None:
            return asked.key, rank
        group = self.places.moved(asked.group, rank, nearest)
        return (word, communicator(group, int(name.partition("#")[2])), number), nearest

    def _reply(self, rank: int, answer: Any) -> None:
        del self._waiting[rank]
        if not isinstance(answer, Never):
            self._running.add(rank)
        self.send(rank, answer)
