"""What this process is at, written where another process can read it: step, phase, collectives, times, digests.

The training writes a few bytes whenever one of them changes; nobody waits, and a rank that is stopped, holds Python's
lock, or was ended in the middle of a collective has said its last all the same. ``launch/stalls.py`` reads it.
A reader may come in the middle of a write: what it cannot make sense of, it drops.
"""

import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

SIZE = 4096
HEAD = struct.Struct("<qdqqq64s")  # step, when it began, ticks, kind of work, collectives so far, phase
STEP_AT, PHASE_AT, NAME = 0, 40, 64
NUMBER, PLACE, TICKS = struct.Struct("<q"), struct.Struct("<qd"), 16
KIND_AT, COUNT_AT = 24, 32
COLLECTIVES, COLLECTIVE, TEXT = 16, 112, 128  # how many are kept, bytes of each, where they begin
STEPS, TIMED, TIMES = 32, struct.Struct("<q5f"), TEXT + COLLECTIVES * COLLECTIVE
DIGESTS, DIGEST, DIGESTED = 8, struct.Struct("<qqqqq"), TIMES + STEPS * TIMED.size
assert DIGESTED + DIGESTS * DIGEST.size <= SIZE


class CalledCollective(NamedTuple):
    """One that was handed to a process group."""

    group: str
    number: int
    """Among those of its group; 0: a message between two ranks."""
    op: str
    what: str
    """Of one tensor: float32 [8, 4]."""
    ranks: str

    def __str__(self) -> str:
        number = f" number {self.number}" if self.number else ""
        return f"{self.op}{number} of {self.what} over ranks {self.ranks}"


class StepTimes(NamedTuple):
    """Seconds of one step of a rank."""

    step: int
    data: float
    compute: float
    """Forward and backward, without waits for other ranks."""
    update: float
    waits: float
    whole: float
    """From step to step, without evaluations and saves."""

    @property
    def own(self) -> float:
        return self.data + self.compute + self.update


class Digest(NamedTuple):
    """Of the weights and the optimizer state that a rank holds after a step: see replicas.py."""

    step: int
    weights_part: int
    """Which part of the model it is: ranks with the same number hold the same."""
    weights: int
    state_part: int
    state: int


class Seen(NamedTuple):
    """What was read."""

    step: int
    since: float
    """When the step began, by ``time.monotonic()`` of that host."""
    ticks: int
    """Grows with all that gets on."""
    kind: int
    """Ranks of one kind have the same work to do."""
    phase: str
    collectives: list[CalledCollective]
    """The last ones, oldest first."""
    times: list[StepTimes]
    digests: list[Digest]


class Live:
    """The writer's side."""

    def __init__(self) -> None:
        self.memory: memoryview = memoryview(bytearray(SIZE))
        self.counts: dict[str, int] = {}
        """Collectives so far, by group."""
        self.ticks = self._noted = 0
        self._phase = ""
        self._encoded: dict[str, bytes] = {}
        self.model: Callable[[], object] = lambda: None
        """The model that is trained, while there is one: for the names of its modules."""
        self.evaluating = False
        """Whether it is at an evaluation, which may take much longer than a step."""
        self.hang = math.inf
        """Seconds for which it may stand still."""
        self.alive: Callable[[], None] = lambda: None
        """Called by the heartbeat now and then, while this process gets on: others may wait for it."""
        self.halt: Exception | None = None
        """What the watch of this process found, to be raised before the next step."""

    def move(self, memory: memoryview) -> None:
        """From now on write there."""
        memory[:SIZE] = self.memory[:SIZE]
        self.memory = memory

    def phase(self, name: str) -> str:
        """Enter a phase; returns the one before."""
        before, self._phase = self._phase, name
        encoded = self._encoded.get(name)
        if encoded is None:
            encoded = self._encoded[name] = name.encode()[:NAME].ljust(NAME, b"\0")
        self.memory[PHASE_AT : PHASE_AT + NAME] = encoded
        self.tick()
        return before

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        before, self.evaluating = self.evaluating, True
        try:
            yield
        finally:
            self.evaluating = before

    def tick(self) -> None:
        """Something got on."""
        self.ticks += 1
        NUMBER.pack_into(self.memory, TICKS, self.ticks)

    def step(self, step: int) -> None:
        """``step`` begins."""
        if self.halt is not None:
            raise self.halt
        PLACE.pack_into(self.memory, STEP_AT, step, time.monotonic())
        self.tick()

    def kind(self, kind: int) -> None:
        NUMBER.pack_into(self.memory, KIND_AT, kind)

    def collective(self, group: str, ranks: str, op: str, what: str) -> None:
        """One is about to be handed over."""
        number = 0
        if op not in ("send", "recv"):
            number = self.counts[group] = self.counts.get(group, 0) + 1
        text = f"{group}|{number}|{op}|{what}|{ranks}".encode()[:COLLECTIVE].ljust(COLLECTIVE, b"\0")
        at = TEXT + self._noted % COLLECTIVES * COLLECTIVE
        self.memory[at : at + COLLECTIVE] = text
        self._noted += 1
        NUMBER.pack_into(self.memory, COUNT_AT, self._noted)

    def timed(self, times: StepTimes) -> None:
        TIMED.pack_into(self.memory, TIMES + times.step % STEPS * TIMED.size, *times)

    def digested(self, digest: Digest, index: int) -> None:
        """The ``index``-th of this process. The first one stays, beside the last ones: whether replicas were equal to
        begin with can then be told however late somebody looks."""
        at = index and 1 + (index - 1) % (DIGESTS - 1)
        DIGEST.pack_into(self.memory, DIGESTED + at * DIGEST.size, *digest)


def read(memory: bytes) -> Seen | None:
    """What a process wrote; None: nothing yet."""
    if len(memory) < SIZE:
        return None
    step, since, ticks, kind, noted, phase = HEAD.unpack_from(memory)
    first = max(0, noted - COLLECTIVES)
    texts = [memory[at : at + COLLECTIVE] for at in (TEXT + i % COLLECTIVES * COLLECTIVE for i in range(first, noted))]
    times = [StepTimes(*TIMED.unpack_from(memory, TIMES + i * TIMED.size)) for i in range(STEPS)]
    digests = [Digest(*DIGEST.unpack_from(memory, DIGESTED + i * DIGEST.size)) for i in range(DIGESTS)]
    return Seen(
        step,
        since,
        ticks,
        kind,
        _text(phase),
        [found for text in texts if (found := _collective(_text(text))) is not None],
        sorted(each for each in times if each.step),
        sorted(each for each in digests if each.step),
    )


def _text(some: bytes) -> str:
    return some.partition(b"\0")[0].decode(errors="replace")


def _collective(text: str) -> CalledCollective | None:
    parts: Sequence[str] = text.split("|")
    if len(parts) != 5 or not parts[1].isdecimal():
        return None
    return CalledCollective(parts[0], int(parts[1]), *parts[2:])


LIVE = Live()
"""Of this process."""
