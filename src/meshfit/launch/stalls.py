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
from meshfit.launch.compare import Replicas, Straggler, stragglers
from meshfit.launch.heartbeat import BEATS, LONGER, UNKNOWN, Beat, SharedBoard, StoreBoard, parsed, silence_of
from meshfit.launch.verdict import IN_ORDER, CollectiveMismatch, differs, kernel_state, mismatch, verdict, waiting
from meshfit.live import Seen, history, read

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
        tell: Callable[[str, Stall | None], None],
        *,
        timeout: float,
        hang: float = math.inf,
        role: str = "rank",
        group: int = 0,
    ):
        """``tell``: is given what to say, and of which stall if it is one that begins. ``timeout``: seconds that a
        collective may wait; ``hang``: after which a rank that has stalled is hung. ``group``: so many ranks have
        collectives in common; 0: all."""
        self.board, self.size, self.tell, self.role = board, size, tell, role
        self.timeout, self.hang, self.group = timeout, hang, group or size
        self.silence = silence_of(timeout, hang)
        self.each = self.silence / BEATS
        """Seconds from look to look."""
        self.together = True
        """Whether they wait for each other alone: where all of them wait, none will ever go on."""
        self.notes: list[str] = []
        """What was found of ranks that went on."""
        self.stacks: dict[int, str] = {}
        """By rank: stacks that the kernel had to ask for."""
        self._heard: dict[int, tuple[Beat | None, float]] = {}
        self._looked = time.monotonic()
        self._told: dict[int, Stall] = {}
        self._compared = 0.0
        self._replicas = Replicas()
        self._slow: dict[int, Straggler] = {}
        self._suspects: Collection[int] = ()
        """That were slow at the last look: once may be chance."""
        self._wrong: CollectiveMismatch | None = None
        """At the last look: once may have been read while it was written."""
        self._mixed_up: Died | None = None
        """Ranks that call different collectives. NCCL may go on with what came of it, and no rank stalls."""
        self._differ: Died | None = None
        """Replicas that do not hold the same."""

    def look(self, gone: Collection[int] = ()) -> list[Stall]:
        """Look, if it is time to; tell what is new. Those that hang: found now, and at the look before. Ranks that are
        ``gone`` are others' business."""
        now = time.monotonic()
        if now - self._looked < self.each:
            return []
        if now - self._looked > 3 * self.each:  # nobody looked for a while: what was not heard then is nobody's fault
            self._heard = {rank: (beat, now) for rank, (beat, _) in self._heard.items()}
        self._looked = now
        found = {stall.rank: stall for stall in self.now(gone)}
        hung = [stall for rank, stall in found.items() if rank in self._told and self._hangs(stall)]
        for rank, stall in found.items():
            if rank not in self._told:
                self._told[rank] = stall
                self.tell(f"{stall.says(self.role)}\n{stall.stack}".rstrip(), stall)
        for rank in self._told.keys() - found.keys():
            beat, told = self._heard.get(rank, (None, 0.0))[0], self._told[rank].beat
            step = 0 if told is None else told.step
            if beat is not None and beat.state in ("idle", "busy") and beat.step == step:
                continue  # it moves a little, and gets nowhere
            if rank not in gone:
                self.tell(f"{self.role} {rank} goes on", None)
            del self._told[rank]
        return hung

    def compare(self, gone: Collection[int] = (), *, last: bool = False) -> Died | None:
        """Hold the ranks against each other, if it is time to, or for the ``last`` time; those that work together are
        noted where they are slow. What is wrong with them: they call different collectives, or replicas differ."""
        now = time.monotonic()
        if not (gone and self.together) and (last or now - self._compared >= COMPARED):
            self._compared = now
            seen = self._all_seen(gone)
            before, self._wrong = self._wrong, self._mismatch(seen, ended=last)
            if self._wrong is not None and (last or self._wrong == before):
                self._mixed_up = _died_of(self._wrong, seen, *waiting(sorted(seen), {}, seen, self.role))
            if self.together:
                self._compare_times(seen)
                self._compare_replicas(seen)
        return self._mixed_up or self._differ

    def _compare_times(self, seen: dict[int, Seen]) -> None:
        found = {one.rank: one for one in stragglers(seen, self._slow)}
        for rank, one in found.items():
            if rank in self._suspects and rank not in self._slow:
                self._slow[rank] = one
                self._note(str(one))
        for rank in self._slow.keys() - found.keys():
            del self._slow[rank]
            self._note(f"{self.role} {rank} is as fast as the others again")
        self._suspects = found.keys()

    def _compare_replicas(self, seen: dict[int, Seen]) -> None:
        known = len(self._replicas.never)
        found = None if self._differ is not None else self._replicas.look(seen, self.size)
        if found is not None:
            self._differ = Died(*differs(found, self.role), step=found.step, agreed=found.agreed)
        if len(self._replicas.never) > known:
            self._note(NEVER_EQUAL.format(what=" and ".join(sorted(self._replicas.never))))

    def compare_at_end(self) -> Died | None:
        """Once more, when all ranks are done. Not where one does not say so soon: it has failed."""
        until = time.monotonic() + LAST_WORDS
        with suppress(Exception):  # the store may be gone
            while time.monotonic() < until:
                beats = [parsed(self.board.get(rank)) for rank in range(self.size)]
                if all(beat is not None and beat.state == "done" for beat in beats):
                    return self.compare(last=True)
                time.sleep(0.02)
        return self._mixed_up or self._differ

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.tell(text, None)

    def _hangs(self, stall: Stall) -> bool:
        """Not one that may be slow: in its first steps, or not yet three times as long at it as at any of the last."""
        if stall.why in ("stopped", "debugged") or stall.beat is None:
            return stall.why == "stopped" and stall.seconds >= self.hang
        usual = 0.0 if stall.beat.slowest == UNKNOWN else PATIENT * stall.beat.slowest
        return stall.beat.step > FIRST_STEPS and stall.seconds >= max(self.hang, usual)

    def verdict(self, stalls: list[Stall], gone: Collection[int] = ()) -> Died:
        """Who stands where, who waits for whom, and what to do, where ``stalls`` have been found."""
        seen = self._all_seen(gone)
        said = verdict(stalls, self._heard, seen, role=self.role)
        agreed = None
        if (wrong := self._mismatch(seen)) is not None:
            agreed = _before(wrong.step)
        elif all(stall.why == "waits" for stall in stalls):  # for collectives of several groups: they were mixed up
            agreed = _before(min((live.step for live in seen.values()), default=0))
        step = max((beat.step for beat, _ in self._heard.values() if beat is not None), default=0)
        return Died(*said, trace=stalls[0].stack, step=step, agreed=agreed)

    def cause(self, failure: str, trace: str = "", *, waited: bool, gone: Collection[int] = ()) -> Died | None:
        """What a failure is a consequence of: ranks that have called different collectives, whatever came of it; or,
        where a rank has ``waited`` for another in vain, one that has stalled."""
        return self._different_calls(failure, trace) or (self._stalled(failure, gone) if waited else None)

    def _different_calls(self, failure: str, trace: str) -> Died | None:
        """Those that are gone by now have told theirs before."""
        seen = self._all_seen()
        wrong = self._mismatch(seen)
        if wrong is None or wrong != self._mismatch(seen):  # once may have been read while it was written
            return None
        return _died_of(wrong, seen, f"what came of it: {failure}", trace=trace)

    def _stalled(self, failure: str, gone: Collection[int]) -> Died | None:
        try:
            found = [*self.now(gone), *self._told.values()]
        except Exception:  # the store may be gone, too
            found = list(self._told.values())
        causes: dict[int, Stall] = {}
        for stall in found:
            if stall.why != "waits":
                causes.setdefault(stall.rank, stall)
        if not causes:
            return None
        first = next(iter(causes.values()))
        said = self.verdict(list(causes.values()), gone)
        return Died(
            f"{self.role} {first.rank} stalled, and the others waited for it for {self.timeout:g} s",
            *said.facts,
            f"so they gave up: {failure}",
            trace=first.stack,
            step=said.step,
        )

    def _mismatch(self, seen: dict[int, Seen], *, ended: bool = False) -> CollectiveMismatch | None:
        """The first collective that is not the same on all ranks, as far back as each has kept its own."""
        for first in range(0, self.size, self.group):
            ranks = [rank for rank in range(first, first + self.group) if rank in seen]
            found = mismatch({rank: seen[rank].collectives for rank in ranks}, self.role, ended=ended)
            if found is not None:
                with suppress(Exception):  # the store may be gone
                    longer = {rank: history(self.board.live(rank)) for rank in ranks}
                    found = mismatch(longer, self.role, ended=ended) or found
                return found
        return None

    def seen(self, rank: int) -> Seen | None:
        """What a rank is at, by its own last word."""
        try:
            return read(self.board.live(rank))
        except Exception:  # the store may be gone
            return None

    def _all_seen(self, gone: Collection[int] = ()) -> dict[int, Seen]:
        return {rank: live for rank in range(self.size) if rank not in gone and (live := self.seen(rank)) is not None}

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


def _died_of(wrong: CollectiveMismatch, seen: dict[int, Seen], *facts: str, trace: str = "") -> Died:
    """Of ranks that call different collectives. What NCCL made of it may be in all that is of that step or later."""
    step = max(live.step for live in seen.values())
    said = (*wrong.lines, *facts, f"what to do: {IN_ORDER}")
    return Died(*said, trace=trace, step=step, agreed=_before(wrong.step))


def _before(step: int) -> int:
    return max(0, step - 1)


def timed_out(error: BaseException) -> bool:
    """Whether it says that another rank did not come, in time."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | RankError) and any(words in text for words in TIMED_OUT)
