"""What this process is at, written where another process can read it: step, phase, collectives, times, digests.

The training writes a few bytes whenever one of them changes; nobody waits, and a rank that is stopped, holds Python's
lock, or was ended in the middle of a collective has said its last all the same. ``launch/stalls.py`` reads it.
A reader may come in the middle of a write: what it cannot make sense of, it drops.
"""

import math
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

HEAD = struct.Struct("<qdqqq64s")  # step, when it began, ticks, kind of work, collectives so far, phase
STEP_AT, PHASE_AT, NAME = 0, 40, 64
NUMBER, PLACE, TICKS = struct.Struct("<q"), struct.Struct("<qd"), 16
KIND_AT, COUNT_AT = 24, 32
STEPS, TIMED, TIMES = 32, struct.Struct("<q5f"), 128  # how many are kept, their form, where they begin
DIGESTS, DIGEST, DIGESTED = 8, struct.Struct("<qqqqq"), TIMES + STEPS * TIMED.size
COLLECTIVE, CALLED = 112, DIGESTED + DIGESTS * DIGEST.size  # bytes of each, where they begin: as many as there is room
RECENT, HISTORY = 16, 1024  # collectives: that are looked at, and that are kept where others share this memory
SIZE, WHOLE = CALLED + RECENT * COLLECTIVE, CALLED + HISTORY * COLLECTIVE
UNEVEN = ("all_to_all", "gather", "scatter", "all_gather", "reduce_scatter")
"""Operations to which ranks may give tensors of other shapes; all_gather and reduce_scatter: of torch's lists."""


class CalledCollective(NamedTuple):
    """One that was handed to a process group."""

    group: str
    number: int
    """Among those of its group; 0: a message between two ranks."""
    op: str
    what: str
    """Of one tensor: float32 [8, 4]."""
    ranks: str
    step: int = 0
    """In which it was called."""
    chain: int = 0
    """A checksum of all that its group has called up to it, on this rank, and of the steps: the same on all ranks."""

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
        self.trainings = 0
        """Begun in this process so far."""
        self._called: dict[str, tuple[int, int]] = {}
        """By group: collectives so far, and their checksum."""
        self._step = 0
        self.ticks = self.noted = 0
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
        memory[:CALLED] = self.memory[:CALLED]
        self.memory, self.noted = memory, 0
        NUMBER.pack_into(memory, COUNT_AT, 0)

    def begin(self) -> int:
        """A training begins: times and digests of another one before are no longer to be compared. Its number."""
        self.memory[TIMES:CALLED] = bytes(CALLED - TIMES)
        self.trainings += 1
        return self.trainings

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
        self._step = step
        PLACE.pack_into(self.memory, STEP_AT, step, time.monotonic())
        self.tick()

    def kind(self, kind: int) -> None:
        NUMBER.pack_into(self.memory, KIND_AT, kind)

    def collective(self, group: str, ranks: str, op: str, what: str) -> None:
        """One is about to be handed over."""
        number = chain = 0
        if op not in ("send", "recv"):
            number, chain = self._called.get(group, (0, 0))
            number, chain = number + 1, zlib.crc32(f"{self._step} {op} {'' if op in UNEVEN else what}".encode(), chain)
            self._called[group] = number, chain
        text = f"{group}|{number}|{self._step}|{chain}|{op}|{what}|{ranks}".encode()
        at = CALLED + self.noted % _room(self.memory) * COLLECTIVE
        self.memory[at : at + COLLECTIVE] = text[:COLLECTIVE].ljust(COLLECTIVE, b"\0")
        self.noted += 1
        NUMBER.pack_into(self.memory, COUNT_AT, self.noted)

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
    step, since, ticks, kind, _, phase = HEAD.unpack_from(memory)
    times = [StepTimes(*TIMED.unpack_from(memory, TIMES + i * TIMED.size)) for i in range(STEPS)]
    digests = [Digest(*DIGEST.unpack_from(memory, DIGESTED + i * DIGEST.size)) for i in range(DIGESTS)]
    return Seen(
        step,
        since,
        ticks,
        kind,
        _text(phase),
        _collectives(memory, RECENT),
        sorted(each for each in times if each.step),
        sorted(each for each in digests if each.step),
    )


def history(memory: bytes) -> list[CalledCollective]:
    """The last collectives of a process, oldest first: many more than ``read`` gives, where it has kept them."""
    return [] if len(memory) < SIZE else _collectives(memory, HISTORY)


def _room(memory: bytes | memoryview) -> int:
    return (len(memory) - CALLED) // COLLECTIVE


def _collectives(memory: bytes, most: int) -> list[CalledCollective]:
    kept, noted = _room(memory), HEAD.unpack_from(memory)[4]
    places = (CALLED + i % kept * COLLECTIVE for i in range(max(0, noted - min(kept, most)), noted))
    return [one for at in places if (one := _collective(_text(memory[at : at + COLLECTIVE]))) is not None]


def _text(some: bytes) -> str:
    return some.partition(b"\0")[0].decode(errors="replace")


def _collective(text: str) -> CalledCollective | None:
    parts: Sequence[str] = text.split("|")
    if len(parts) != 7 or not all(each.isdecimal() for each in parts[1:4]):
        return None
    group, number, step, chain, op, what, ranks = parts
    return CalledCollective(group, int(number), op, what, ranks, int(step), int(chain))


LIVE = Live()
"""Of this process."""
