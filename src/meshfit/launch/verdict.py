"""What is said of a training that hangs: which rank stands where, who waits for whom, what to do.

Ranks number the collectives of each process group, and write each down before it is handed over (live.py). All ranks of
a group must call the same ones in the same order. So where the numbers differ, those behind are waited for; where one
number is another operation or another shape on one rank than on another, that is the cause.
"""

import signal
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from meshfit.launch.compare import ReplicaDifference
from meshfit.launch.heartbeat import Beat
from meshfit.launch.system import process_state
from meshfit.live import CalledCollective, Seen

if TYPE_CHECKING:
    from meshfit.launch.stalls import Stall

MOST_RANKS = 8

Heard = Mapping[int, tuple[Beat | None, float]]


def verdict(stalls: "Sequence[Stall]", heard: Heard, seen: Mapping[int, Seen], *, role: str = "rank") -> list[str]:
    """A headline, and a fact a line."""
    first = stalls[0]
    causes = [stall for stall in stalls if stall.why != "waits"]
    wrong = mismatch({rank: each.collectives for rank, each in seen.items()}, role)
    if wrong is not None:
        headline, advice = wrong.headline, IN_ORDER
    elif causes:
        names = _ranks([stall.rank for stall in causes], role)
        headline = f"{names} {'hangs' if len(causes) == 1 else 'hang'}{_step(first)}"
        advice = ADVICE[causes[0].why]
    else:
        who = "all ranks" if len(stalls) == len(heard) else _ranks([stall.rank for stall in stalls], role)
        headline, advice = f"{who} wait for each other{_step(first)}", ADVICE["waits"]
    lines = [headline] if wrong is None else wrong.lines
    for stall in causes[:MOST_RANKS]:
        lines.append(f"{stall.says(role)}{_at(stall.beat, seen.get(stall.rank))}")
    waits = sorted(seen.keys() - {stall.rank for stall in causes})
    lines += waiting(waits, heard, seen, role)
    return [*lines, f"what to do: {advice}"]


IN_ORDER = "all ranks must call the same collectives in the same order: look for an if by rank"
ADVICE = {
    "stopped": "find who stops processes on this host (a debugger, a job control, a memory guard)",
    "debugged": "let the debugger go on",
    "unheard": "its stack is above: a call into C that keeps Python's lock, or a kernel that does not answer (a disk)",
    "idle": "look at that line: what it waits for (a file system, a network, a lock) does not come",
    "busy": "look at that line: a loop that does not end; a step that may take so long needs a larger hang_timeout",
    "waits": "a network that drops packets, or ranks in different code: the stacks say where each is",
}


class CollectiveMismatch(NamedTuple):
    """The first collective that is not the same on all ranks of its group."""

    headline: str
    where: str
    step: int
    """In which the first of them called it; 0: in one that is not known any more."""

    @property
    def lines(self) -> list[str]:
        return [self.headline, self.where]


def mismatch(
    called: Mapping[int, Sequence[CalledCollective]], role: str = "rank", *, ended: bool = False
) -> CollectiveMismatch | None:
    """By rank, its last collectives. Where the first that differs is no longer among them, their checksums still tell.
    ``ended``: none will call another."""
    numbered: dict[tuple[str, str, int], dict[int, CalledCollective]] = defaultdict(dict)
    for rank, calls in called.items():
        for one in calls:
            if one.number:
                numbered[one.group, one.ranks, one.number][rank] = one
    for (group, over, number), by in sorted(numbered.items(), key=lambda item: item[0][2]):
        kinds: dict[int, list[int]] = defaultdict(list)
        for rank, one in sorted(by.items()):
            kinds[one.chain].append(rank)
        if len(kinds) > 1:
            ones = [by[ranks[0]] for ranks in kinds.values()]
            said = [f"{one.op} of {one.what}" for one in ones]
            if len(set(said)) == 1 and len({one.step for one in ones}) > 1:
                said = [f"{one.op} of {one.what} in step {one.step}" for one in ones]
            each = "; ".join(f"{_ranks(ranks, role)}: {call}" for ranks, call in zip(kinds.values(), said, strict=True))
            where, alike = f"number {number} over ranks {over}", len(set(said)) == 1
            if not alike and (number == 1 or by.keys() <= numbered[group, over, number - 1].keys()):  # it is the first
                step = min(one.step for one in ones)
                return CollectiveMismatch(f"ranks call different collectives: {each}", where, step)
            before = f"before {where}, which is {said[0] + ' on all of them' if alike else 'for ' + each}"
            return CollectiveMismatch(f"{_ranks(sorted(by), role)} have called different collectives", before, 0)
    return _one_more(called, role) if ended else None


def _one_more(called: Mapping[int, Sequence[CalledCollective]], role: str) -> CollectiveMismatch | None:
    """The first collective that some ranks of a group have called, and others never will."""
    last: dict[tuple[str, str], dict[int, CalledCollective]] = defaultdict(dict)
    for rank, calls in called.items():
        for one in calls:
            if one.number:
                last[one.group, one.ranks][rank] = one
    for (_, over), by in last.items():
        most = max(by.values(), key=lambda one: one.number)
        if ahead := [rank for rank, one in sorted(by.items()) if one.number > min(o.number for o in by.values())]:
            behind = _ranks([rank for rank in sorted(by) if rank not in ahead], role)
            where = f"number {most.number} over ranks {over}: {most.op} of {most.what}, to which {behind} never came"
            return CollectiveMismatch(f"{_ranks(ahead, role)} called more collectives than {behind}", where, most.step)
    return None


def differs(found: ReplicaDifference, role: str = "rank") -> list[str]:
    """Of replicas that do not hold the same."""
    rest = [rank for rank in found.ranks if rank not in found.odd]
    if found.odd:
        verb = "holds" if len(found.odd) == 1 else "hold"
        headline = (
            f"{_ranks(found.odd, role)} {verb} other {found.what} than {_ranks(rest, role)} after step {found.step}"
        )
    else:
        headline = f"{_ranks(found.ranks, role)} hold different {found.what} after step {found.step}"
    return [
        headline,
        f"they hold the same part of the model, are updated alike, and were equal after step {found.agreed}",
        "" if found.odd else "there is no majority: which of them is wrong cannot be told",
        "what to do: look at the memory and processor of that machine (its log of corrected errors); "
        f"checkpoints of after step {found.agreed} may hold what is wrong",
    ]


def waiting(waits: list[int], heard: Heard, seen: Mapping[int, Seen], role: str) -> list[str]:
    """A line for ranks that wait alike: in which collective, and who has not come to it."""
    last: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in waits:
        each = seen[rank]
        beat = heard.get(rank, (None, 0.0))[0]
        one = each.collectives[-1] if each.collectives and (beat is None or beat.state == "waits") else None
        behind = "" if one is None else _behind(one, rank, seen, role)
        said = f"in {each.phase or 'no phase'}, at {one}" if one is not None else f"in {each.phase or 'no phase'}"
        if one is None and beat is not None and beat.spot:
            said += f": {beat.spot}"
        last[said, behind].append(rank)
    lines = []
    for (said, behind), ranks in list(last.items())[:MOST_RANKS]:
        verb = "waits" if len(ranks) == 1 else "wait"
        what = f"{verb} {said}" if "at " in said else f"{'is' if len(ranks) == 1 else 'are'} {said}"
        lines.append(f"{_ranks(ranks, role)} {what}{behind}")
    return lines


def _behind(one: CalledCollective, rank: int, seen: Mapping[int, Seen], role: str) -> str:
    """Who of the ranks of a collective has not come to it."""
    late = []
    for other, each in seen.items():
        known = [c.number for c in each.collectives if c.group == one.group]
        if other != rank and other in _members(one.ranks) and max(known, default=0) < one.number:
            late.append(other)
    if not late or not one.number:
        return ""
    return f", to which {_ranks(sorted(late), role)} {'has' if len(late) == 1 else 'have'} not come"


def _members(ranks: str) -> set[int]:
    found: set[int] = set()
    for part in ranks.split(", "):
        first, _, last = part.partition("-")
        with suppress(ValueError):  # the text was cut
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _at(beat: Beat | None, seen: Seen | None) -> str:
    """Where a rank stands: phase, line, the collective it called last."""
    parts = []
    if seen is not None and seen.phase:
        parts.append(f"in {seen.phase}")
    if beat is not None and beat.spot:
        parts.append(f"at {beat.spot}")
    return f"; it stands {', '.join(parts)}" if parts else ""


def _step(stall: "Stall") -> str:
    return f" in step {stall.beat.step}" if stall.beat is not None and stall.beat.step else ""


def _ranks(ranks: Sequence[int], role: str = "rank") -> str:
    """rank 1; ranks 0, 2 and 3."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    if len(ranks) > MOST_RANKS:
        return f"{role}s {', '.join(map(str, ranks[: MOST_RANKS - 1]))} and {len(ranks) - MOST_RANKS + 1} more"
    return f"{role}s {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def kernel_state(beat: Beat | None) -> str:
    """What the kernel says of a rank that is not heard from, where it is asked: on the host of the rank. Stopped,
    debugged, or nothing of the kind."""
    if beat is None or beat.host != socket.gethostname():
        return ""
    traced, state = 0, process_state(beat.pid)
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{beat.pid}/status") as file:
        traced = next((int(line.split()[1]) for line in file if line.startswith("TracerPid:")), 0)
    return "debugged" if traced or state == "t" else "stopped" if state == "T" else ""


def death(who: str, code: int, step: int) -> tuple[str, str]:
    """What is said of a process that ended with an exit code: a headline, and what may explain it."""
    if code >= 0:
        return f"{who} left{f' at step {step}' if step else ''} with exit code {code} before its work was done", ""
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "unknown"
    why = "if nobody sent it, the machine ran out of memory" if code == -signal.SIGKILL else ""
    return f"{who} was killed by signal {-code} ({name})", why
