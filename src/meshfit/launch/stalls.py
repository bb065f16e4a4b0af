"""Which ranks have stalled: found from the heartbeats of all, reported, and remembered for the error that may follow.

When one rank stops, all others wait for it, and the first of them to lose patience would be blamed. So ranks are held
against each other: one that is not heard from (stopped, or in C code that keeps Python's lock), or that neither works
nor waits for others, is the one. Where all wait for each other, or are busy with one step for ten times as long as any
before, all are told. What is said of it is in verdict.py.

A rank that has stalled for longer than ``hang`` is hung: whoever looks ends it. Before its third step, and where a
debugger holds it, it is told of and left alone: reading and planning may take their time, up to ``timeout``.
"""

import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from meshfit.errors import Died, RankError
from meshfit.launch.compare import ReplicaDifference, Replicas, Straggler, stragglers
from meshfit.launch.heartbeat import BEATS, LONGER, UNKNOWN, Beat, SharedBoard, StoreBoard, parsed
from meshfit.launch.verdict import IN_ORDER, CollectiveMismatch, differs, kernel_state, mismatch, out_of_order, verdict
from meshfit.live import WHOLE, Seen, history, read

COMPARED = 0.5  # seconds from one comparison of ranks to the next
LAST_WORDS = 5.0  # seconds that ranks have for them, at the end
NEVER_EQUAL = (
    "the {what} of replicas have not been equal bit by bit from the first step on, as where processors of ranks round "
    "otherwise: they are not compared"
)
PATIENT = 3  # times the longest of the last steps, before which no rank is ended
FIRST_STEPS = 2  # that may take their time: what they allocate, compile and open, later ones have
TIMED_OUT = ("timed out", "timeout", "has not answered for")
"""How gloo, NCCL and model servers say that another did not come."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that has stalled."""

    rank: int
    why: str
    """unheard, stopped, debugged, idle, busy, waits."""
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
            "debugged": f"{begin}: a debugger holds it; {self.process}",
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
        last = " when it was last heard from" if self.why in ("stopped", "debugged", "unheard") else ""
        return f"  where it is{last}, newest call last:\n{self.beat.stack.rstrip()}"


def judge(
    heard: dict[int, tuple[Beat | None, float]], silence: float, *, together: bool = True, group: int = 1
) -> list[Stall]:
    """Which ranks have stalled. ``heard``: by rank, its last beat, and how many seconds ago it came; ``together``:
    whether they wait for each other alone; ``group``: else so many do, unless they ask a server."""
    unheard = [
        Stall(rank, kernel_state(beat) or "unheard", ago, beat)
        for rank, (beat, ago) in heard.items()
        if ago >= silence and not (beat is not None and beat.state == "done")
    ]
    beats = [beat for beat, _ in heard.values() if beat is not None and beat.state != "done"]
    idle = [Stall(b.rank, b.state, b.still, b) for b in beats if b.state == "idle" and b.still >= silence]
    if not together:
        busy = [b for b in beats if b.state == "busy" and b.still >= max(silence, LONGER * b.slowest)]
        groups = [[b for b in beats if b.rank // group == number] for number in {b.rank // group for b in beats}]
        waits = [b for each in groups if len(each) == group > 1 and _all_wait(each, silence) for b in each]
        found = [*unheard, *idle, *(Stall(b.rank, b.state, b.still, b) for b in [*busy, *waits])]
        return sorted({stall.rank: stall for stall in found[::-1]}.values(), key=lambda stall: stall.rank)
    if unheard or idle:
        return sorted([*unheard, *idle], key=lambda stall: stall.rank)
    if not beats or len(beats) + sum(b is not None and b.state == "done" for b, _ in heard.values()) < len(heard):
        return []
    busy = [b for b in beats if b.state == "busy"]
    return [Stall(b.rank, b.state, b.still, b) for b in busy or beats] if _all_wait(beats, silence) else []


def _all_wait(beats: list[Beat], silence: float) -> bool:
    """For each other, or are busy for much longer than ever: none of them will go on."""
    if any(beat.state not in ("waits", "busy") or beat.still < silence for beat in beats):
        return False
    return not any(b.state == "busy" and b.still < LONGER * b.slowest for b in beats)


class Stalls:
    """Looks at a board now and then, and tells what it finds, once."""

    def __init__(
        self,
        board: SharedBoard | StoreBoard,
        size: int,
        tell: Callable[[Stall | None, str], None],
        *,
        silence: float,
        hang: float = math.inf,
        note: Callable[[str], None] = lambda text: None,
        role: str = "rank",
        group: int = 0,
    ):
        """``tell``: is given a rank that has stalled, and what to say of it; None with what is said of one that does
        no longer. ``hang``: seconds after which one that has stalled is hung. ``note``: is given what else is to be
        said of them, while they go on. ``group``: so many have collectives in common; 0: all."""
        self.board, self.size, self.tell, self.silence, self.role = board, size, tell, silence, role
        self.group = group or size
        self.hang = hang
        self.hung: list[Stall] = []
        """Found at the last look, and at the one before."""
        self.note = note
        self.replicas = Replicas()
        self.different: ReplicaDifference | None = None
        """Replicas that do not hold the same."""
        self.different_calls: Died | None = None
        """Ranks that call different collectives. NCCL may go on with what came of it, and no rank stalls."""
        self._wrong: CollectiveMismatch | None = None
        """At the last look: once may have been read while it was written."""
        self._slow: dict[int, Straggler] = {}
        self._suspects: Collection[int] = ()
        """That were slow at the last look: once may be chance."""
        self._compared = 0.0
        self.together = True
        """Whether they wait for each other alone: where all of them wait, none will ever go on."""
        self._heard: dict[int, tuple[Beat | None, float]] = {}
        self._looked = time.monotonic()
        self._told: dict[int, Stall] = {}
        self.stacks: dict[int, str] = {}
        """By rank: stacks that the kernel had to ask for."""

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
        self.hung = [stall for rank, stall in found.items() if rank in self._told and self._hangs(stall)]
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

    def compare(self, *, gone: Collection[int] = (), last: bool = False) -> None:
        """Hold the ranks against each other, if it is time to, or for the ``last`` time: find those that call different
        collectives, and where they work together note those that are slow, and find replicas that differ."""
        now = time.monotonic()
        if (gone and self.together) or (now - self._compared < COMPARED and not last):
            return
        self._compared = now
        seen = {rank: live for rank in range(self.size) if rank not in gone and (live := self.seen(rank)) is not None}
        before, self._wrong = self._wrong, self._mismatch(seen, ended=last)
        if self._wrong is not None and (last or self._wrong == before):
            self.different_calls = _different(self._wrong, seen, *out_of_order(self._wrong, seen, self.role))
        if not self.together:
            return
        found = {one.rank: one for one in stragglers(seen, self._slow)}
        for rank, one in found.items():
            if rank in self._suspects and rank not in self._slow:
                self._slow[rank] = one
                self.note(str(one))
        for rank in self._slow.keys() - found.keys():
            del self._slow[rank]
            self.note(f"{self.role} {rank} is as fast as the others again")
        known, self._suspects = len(self.replicas.never), found.keys()
        self.different = self.different or self.replicas.look(seen, self.size)
        if len(self.replicas.never) > known:
            self.note(NEVER_EQUAL.format(what=" and ".join(sorted(self.replicas.never))))

    def compare_at_end(self) -> None:
        """Once more, when all ranks are done. Not where one does not say so soon: it has failed."""
        until = time.monotonic() + LAST_WORDS
        with suppress(Exception):  # the store may be gone
            while time.monotonic() < until:
                beats = [parsed(self.board.get(rank)) for rank in range(self.size)]
                if all(beat is not None and beat.state == "done" for beat in beats):
                    self.compare(last=True)
                    return
                time.sleep(0.02)

    def corrupt(self) -> Died | None:
        """What to say of replicas that differ, or of ranks that call different collectives, if they do."""
        found = self.different
        if self.different_calls is not None or found is None:
            return self.different_calls
        error = Died(*differs(found, self.role))
        error.step, error.agreed = found.step, found.agreed
        return error

    def _hangs(self, stall: Stall) -> bool:
        """Not one that may be slow: in its first steps, or not yet three times as long at it as at any of the last."""
        if stall.why in ("stopped", "debugged") or stall.beat is None:
            return stall.why == "stopped" and stall.seconds >= self.hang
        usual = 0.0 if stall.beat.slowest == UNKNOWN else PATIENT * stall.beat.slowest
        return stall.beat.step > FIRST_STEPS and stall.seconds >= max(self.hang, usual)

    def verdict(self, stalls: list[Stall], gone: Collection[int] = ()) -> Died:
        """Who stands where, who waits for whom, and what to do, where ``stalls`` have been found."""
        seen = {rank: live for rank in range(self.size) if rank not in gone and (live := self.seen(rank)) is not None}
        headline, *facts = verdict(stalls, self._heard, seen, role=self.role)
        error = Died(headline, *facts, trace=stalls[0].stack)
        error.step = max((beat.step for beat, _ in self._heard.values() if beat is not None), default=0)
        if (wrong := self._mismatch(seen)) is not None:
            error.agreed = _before(wrong.step)
        elif all(stall.why == "waits" for stall in stalls):  # for collectives of several groups: they were mixed up
            error.agreed = _before(min((live.step for live in seen.values()), default=0))
        return error

    def mismatch(self, failure: str, trace: str = "") -> Died | None:
        """Where ranks have called different collectives, whatever came of it. Those that are gone by now have told
        theirs before."""
        seen = {rank: live for rank in range(self.size) if (live := self.seen(rank)) is not None}
        wrong = self._mismatch(seen)
        if wrong is None or wrong != self._mismatch(seen):  # once may have been read while it was written
            return None
        said = (*wrong.lines, f"what came of it: {failure}", f"what to do: {IN_ORDER}")
        return _different(wrong, seen, *said, trace=trace)

    def _mismatch(self, seen: dict[int, Seen], *, ended: bool = False) -> CollectiveMismatch | None:
        """The first collective that is not the same on all ranks, as far back as each has kept its own."""
        for first in range(0, self.size, self.group):
            ranks = [rank for rank in range(first, first + self.group) if rank in seen]
            found = mismatch({rank: seen[rank].collectives for rank in ranks}, self.role, ended=ended)
            if found is not None:
                with suppress(Exception):  # the store may be gone
                    longer = {rank: history(self.board.live(rank, WHOLE)) for rank in ranks}
                    found = mismatch(longer, self.role, ended=ended) or found
                return found
        return None

    def seen(self, rank: int) -> Seen | None:
        """What a rank is at, by its own last word."""
        try:
            return read(self.board.live(rank))
        except Exception:  # the store may be gone
            return None

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
            beat = self._up_to_date(rank, parsed(self.board.get(rank)) or before)
            fresh = beat is not None and (before is None or beat.number != before.number)
            self._heard[rank] = (beat, now if fresh else at)
        return judge(
            {rank: (beat, now - at) for rank, (beat, at) in self._heard.items()},
            self.silence,
            together=self.together,
            group=self.group,
        )

    def _up_to_date(self, rank: int, beat: Beat | None) -> Beat | None:
        """With the step that the rank is in, though it may have come there after its last beat: then its stack of that
        moment would mislead."""
        live = None if beat is None else self.seen(rank)
        if beat is None or live is None or live.ticks <= beat.ticks:
            return beat
        stack = self.stacks.get(rank, "")
        spot = stack.rstrip().rpartition("\n")[2].strip()
        return replace(beat, step=live.step or beat.step, stack=stack, spot=spot)

    def blame(self, gave_up: str, timeout: float, *, gone: Collection[int] = ()) -> RankError | None:
        """The error of a collective that took too long, or broke, as that of who stalled, if that is known."""
        try:
            found = [*self.now(gone), *self._told.values()]
        except Exception:  # the store may be gone, too
            found = list(self._told.values())
        causes = [stall for stall in found if stall.why != "waits"]
        if not causes:
            return None
        first = causes[0]
        said = self.verdict(list({stall.rank: stall for stall in reversed(causes)}.values())[::-1], gone)
        error = Died(
            f"{self.role} {first.rank} stalled, and the others waited for it for {timeout:g} s",
            *said.facts,
            f"so they gave up: {gave_up}",
            trace=first.stack,
        )
        error.step = said.step
        return error


def _different(wrong: CollectiveMismatch, seen: dict[int, Seen], *said: str, trace: str = "") -> Died:
    """Of ranks that call different collectives. What NCCL made of it may be in all that is of that step or later."""
    error = Died(*said, trace=trace)
    error.step = max(live.step for live in seen.values())
    error.agreed = _before(wrong.step)
    return error


def _before(step: int) -> int:
    return max(0, step - 1)


def timed_out(error: BaseException) -> bool:
    """Whether it says that another rank did not come, in time."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | RankError) and any(words in text for words in TIMED_OUT)
