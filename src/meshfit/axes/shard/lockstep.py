"""One order of collectives on all ranks, however differently they run: for models whose samples, or random numbers,
decide what is called (adaptive depth, early exits, layers that are skipped).

With zero=3 ranks meet where a unit is gathered, and where its gradient is scattered. Each rank follows

    a script   what all of them did in the last pass of this kind. What a rank wants is usually next in it. What is next
               and not wanted here, others may want: the rank takes part in it all the same
    rounds     beyond the script, or before there is one: each says what it wants next, and all do all of that. A rank
               that wants nothing more goes on with the others until nobody does

A script is made of what all ranks did, so it is the same on all of them, and nobody has to say so.

    traffic   one number a rank and pass; in a pass without a script, and beyond it, one for each collective
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from meshfit.torch_private.groups import gather_number

GATHER, SCATTER = 0, 1


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective over one unit: ``kind`` is GATHER or SCATTER."""

    kind: int
    unit: int

    @property
    def number(self) -> int:
        return 2 * self.unit + self.kind


class Lockstep:
    """Of the ranks of ``group``. ``serve(meeting)`` takes part in one that is not wanted here; ``ahead``: units are
    gathered ahead of their use."""

    def __init__(self, group: dist.ProcessGroup | None, serve: Callable[[Meeting], None], *, ahead: bool):
        self.group, self.serve, self.ahead = group, serve, ahead
        self._scripts: dict[tuple[str, str], list[Meeting]] = {}
        self._kind: tuple[str, str] | None = None
        """Of the pass under way, and of the one before it with the same weights, which left some units gathered."""
        self._before = ""
        self._left: deque[Meeting] = deque()
        """What all ranks are going to do."""
        self._done: list[tuple[Meeting, bool]] = []
        """What they did in this pass, and whether this one wanted it."""
        self.scripted = False
        """Whether the pass under way has one."""

    def begin(self, word: str) -> None:
        """A pass begins, "train" or "evaluate". All ranks begin the same ones."""
        self._kind, self._before = (word, self._before), word
        self.scripted = self._kind in self._scripts
        self._left = deque(self._scripts.get(self._kind, ()))
        self._done = []

    def reset(self) -> None:
        """The weights have changed: nothing is gathered."""
        self._before = ""

    def forget(self) -> None:
        """Something other will be done from now on: make new scripts."""
        self._scripts.clear()

    def turn(self, kind: int, unit: int) -> None:
        """Wait for the turn of a collective: the caller then begins it, at once."""
        if self._kind is None:  # outside of a pass all ranks do the same
            return
        wanted = Meeting(kind, unit)
        while not self._play(wanted):
            self._left.extend(self._round(wanted.number))

    def following(self) -> int | None:
        """The unit that is gathered next, if that is what comes next."""
        return self._left[0].unit if self.ahead and self._left and self._left[0].kind == GATHER else None

    def comes(self, kind: int, unit: int) -> bool:
        """Whether the script has more of it: the same answer on all ranks."""
        return Meeting(kind, unit) in self._left

    def end(self) -> None:
        """A pass is over here: go on with the others until it is over for all."""
        if self._kind is None:
            return
        unwanted = 0
        while True:
            self._play(None)
            unwanted = hash(tuple(i for i, (_, wanted) in enumerate(self._done) if not wanted)) % 2**60
            more = self._round(-1 - unwanted)
            if not more:
                break
            self._left.extend(more)
        self._remember()
        self._kind = None

    def _play(self, wanted: Meeting | None) -> bool:
        """Go on with what is to be done, up to ``wanted``; False if that is not in it."""
        while self._left:
            meeting = self._left.popleft()
            self._done.append((meeting, meeting == wanted))
            if meeting == wanted:
                return True
            self.serve(meeting)
        return False

    def _round(self, mine: int) -> list[Meeting]:
        """What the ranks want next, each once; nothing when all are done."""
        every = [mine] if self.group is None else gather_number(self.group, mine)()
        self._alike = len(set(every)) == 1
        wanted = dict.fromkeys(number for number in every if number >= 0)
        return [Meeting(number % 2, number // 2) for number in wanted]

    def _remember(self) -> None:
        """What was done becomes the script, without what no rank wanted (all say so, if they left out the same)."""
        assert self._kind is not None
        done = [meeting for meeting, wanted in self._done if wanted or not self._alike]
        if self.scripted and done == self._scripts[self._kind]:
            return
        self._scripts[self._kind] = done if self.scripted or not self.ahead else _ahead(done)


def _ahead(meetings: list[Meeting]) -> list[Meeting]:
    """The same with each gather right after the one before: it is under way while that unit computes."""
    gathers = deque(meeting for meeting in meetings if meeting.kind == GATHER)
    found = [gathers.popleft()] if gathers else []
    for meeting in meetings:
        if meeting.kind == SCATTER:
            found.append(meeting)
        elif gathers:
            found.append(gathers.popleft())
    return found
