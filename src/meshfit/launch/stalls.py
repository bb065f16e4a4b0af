"""Which ranks have stalled: found from the heartbeats of all, reported, and remembered for the error that may follow.

When one rank stops, all others wait for it, and the first of them to lose patience would be blamed. So ranks are held
against each other: one that is not heard from (stopped, or in C code that keeps Python's lock), or that neither works
nor waits for others, is the one. Where all wait for each other, or are busy with one step for ten times as long as any
before, all are told. Nothing is ended: that is left to ``timeout``, the limit of collectives.
"""

import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from meshfit.errors import RankError
from meshfit.launch.heartbeat import BEATS, Beat, Heart, SharedBoard, StoreBoard, parsed, silence_of

LONGER = 10  # times the longest step so far: a rank that is busy for so long with one is told of
TIMED_OUT = ("timed out", "timeout", "has not answered for")
"""How gloo, NCCL and model servers say that another did not come."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that has stalled."""

    rank: int
    why: str
    """unheard, stopped, idle, busy, waits."""
    seconds: float
    beat: Beat | None

    @property
    def process(self) -> str:
        return "" if self.beat is None else f"process {self.beat.pid} on {self.beat.host}"

    def says(self, role: str = "rank") -> str:
        """One line."""
        step = f", in step {self.beat.step}" if self.beat is not None and self.beat.step else ""
        begin = f"{role} {self.rank} has stalled for {self.seconds:.0f} s{step}"
        told = {
            "stopped": f"{begin}: it is stopped (by SIGSTOP, or a debugger); {self.process}: kill -CONT lets it go on",
            "unheard": f"{begin}: it is not heard from; {self.process or 'nor has it ever been'}",
            "idle": f"{begin}: it neither computes nor waits for others; {self.process}",
            "busy": f"{begin}: it is busy, for much longer than with any step before; {self.process}",
            "waits": f"{begin}: it waits for others, and none of them is behind; {self.process}",
        }
        return told[self.why]

    @property
    def stack(self) -> str:
        if self.beat is None or not self.beat.stack:
            return ""
        last = " when it was last heard from" if self.why in ("stopped", "unheard") else ""
        return f"  where it is{last}, newest call last:\n{self.beat.stack.rstrip()}"


def judge(heard: dict[int, tuple[Beat | None, float]], silence: float, *, together: bool = True) -> list[Stall]:
    """Which ranks have stalled. ``heard``: by rank, its last beat, and how many seconds ago it came; ``together``:
    whether they wait for each other alone."""
    unheard = [
        Stall(rank, "stopped" if _stopped(beat) else "unheard", ago, beat)
        for rank, (beat, ago) in heard.items()
        if ago >= silence and not (beat is not None and beat.state == "done")
    ]
    beats = [beat for beat, _ in heard.values() if beat is not None and beat.state != "done"]
    idle = [Stall(b.rank, b.state, b.still, b) for b in beats if b.state == "idle" and b.still >= silence]
    if unheard or idle or not together:
        return sorted([*unheard, *idle], key=lambda stall: stall.rank)
    if not beats or len(beats) + sum(b is not None and b.state == "done" for b, _ in heard.values()) < len(heard):
        return []
    if any(beat.state not in ("waits", "busy") or beat.still < silence for beat in beats):
        return []
    busy = [b for b in beats if b.state == "busy"]
    if any(b.still < LONGER * b.slowest for b in busy):
        return []
    return [Stall(b.rank, b.state, b.still, b) for b in busy or beats]


def _stopped(beat: Beat | None) -> bool:
    """Whether the kernel says so, where it is asked: on the host of the rank."""
    if beat is None or beat.host != socket.gethostname():
        return False
    with suppress(OSError), open(f"/proc/{beat.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False


class Stalls:
    """Looks at a board now and then, and tells what it finds, once."""

    def __init__(
        self,
        board: SharedBoard | StoreBoard,
        size: int,
        tell: Callable[[Stall | None, str], None],
        *,
        silence: float,
        role: str = "rank",
    ):
        """``tell``: is given a rank that has stalled, and what to say of it; None with what is said of one that does
        no longer."""
        self.board, self.size, self.tell, self.silence, self.role = board, size, tell, silence, role
        self.together = True
        """Whether they wait for each other alone: where all of them wait, none will ever go on."""
        self._heard: dict[int, tuple[Beat | None, float]] = {}
        self._looked = time.monotonic()
        self._told: dict[int, Stall] = {}

    @property
    def each(self) -> float:
        """Seconds from look to look."""
        return self.silence / BEATS

    def look(self, *, gone: Collection[int] = ()) -> None:
        """Look, if it is time to; tell what is new. Ranks that are ``gone`` are others' business."""
        now = time.monotonic()
        if now - self._looked < self.each:
            return
        if now - self._looked > 3 * self.each:  # nobody looked for a while: what was not heard then is nobody's fault
            self._heard = {rank: (beat, now) for rank, (beat, _) in self._heard.items()}
        self._looked = now
        found = {stall.rank: stall for stall in self.now(gone)}
        for rank, stall in found.items():
            if rank not in self._told:
                self._told[rank] = stall
                self.tell(stall, f"{stall.says(self.role)}\n{stall.stack}".rstrip())
        for rank in self._told.keys() - found.keys():
            beat, _ = self._heard.get(rank, (None, 0.0))
            if beat is not None and beat.state in ("idle", "busy") and beat.step == self._step_of(rank):
                continue  # it moves a little, and gets nowhere
            if rank not in gone:
                self.tell(None, f"{self.role} {rank} goes on")
            del self._told[rank]

    def _step_of(self, rank: int) -> int:
        told = self._told[rank].beat
        return 0 if told is None else told.step

    def now(self, gone: Collection[int] = ()) -> list[Stall]:
        """Which ranks have stalled."""
        now = time.monotonic()
        for rank in range(self.size):
            if rank in gone:
                self._heard.pop(rank, None)
                continue
            before, at = self._heard.get(rank, (None, now))
            beat = parsed(self.board.get(rank)) or before
            fresh = beat is not None and (before is None or beat.number != before.number)
            self._heard[rank] = (beat, now if fresh else at)
        return judge(
            {rank: (beat, now - at) for rank, (beat, at) in self._heard.items()}, self.silence, together=self.together
        )

    def blame(self, gave_up: str, timeout: float, *, gone: Collection[int] = ()) -> RankError | None:
        """The error of a collective that took too long, as that of who stalled, if that is known."""
        try:
            found = [*self.now(gone), *self._told.values()]
        except Exception:  # the store may be gone, too
            found = list(self._told.values())
        causes = [stall for stall in found if stall.why != "waits"]
        if not causes:
            return None
        first = causes[0]
        return RankError(
            f"{self.role} {first.rank} stalled, and the others waited for it for {timeout:g} s",
            first.says(self.role),
            *(also.says(self.role) for also in causes[1:] if also.rank != first.rank),
            f"so they gave up: {gave_up}",
            trace=first.stack,
        )


def timed_out(error: BaseException) -> bool:
    """Whether it says that another rank did not come, in time."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | RankError) and any(words in text for words in TIMED_OUT)


@contextmanager
def watched(rank: int, size: int, timeout: float) -> Iterator[None]:
    """Around the work of one of torchrun's ranks: those that have stalled are reported, and named where others lose
    patience with them. There is no caller that looks, so the first two ranks do."""
    if size == 1:
        yield
        return
    try:
        board, silence = StoreBoard(), silence_of(timeout)
    except (RuntimeError, KeyError, ValueError):  # no store: a process group of the user's own
        yield
        return

    def tell(stall: Stall | None, text: str) -> None:
        """The first rank does; the second looks for it where that cannot."""
        if rank == 0 or any(s.rank == 0 and s.why in ("stopped", "unheard") for s in stalls.now()):
            _say(text)

    def failed(error: Exception) -> None:
        _say(f"the store of the ranks does not answer: torchrun, or rank 0, is stopped or gone ({_headline(error)})")

    stalls = Stalls(board, size, tell, silence=silence)
    looks = {"after": stalls.look, "failed": failed} if rank < 2 else {}
    heart = Heart(board, rank, silence=silence, **looks)
    heart.start()
    try:
        yield
    except RuntimeError as error:
        named = stalls.blame(f"rank {rank} raised {_headline(error)}", timeout) if timed_out(error) else None
        if named is not None:
            raise named from error
        raise
    finally:
        heart.stop()


def _headline(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _say(text: str) -> None:
    print(f"meshfit: {text}", file=sys.stderr, flush=True)
