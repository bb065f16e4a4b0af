"""Ranks held against each other, by what live.py wrote: who is slower than the others, and who holds other weights.

Nothing is sent for it: whoever watches the ranks reads what each has written, and compares.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from meshfit import units
from meshfit.live import Digest, Seen, StepTimes

WINDOW = 12  # steps that are compared, by their medians
SLOWER, AGAIN = 1.8, 1.3  # times as long as the others: from here on it is told, up to here no longer
LEAST = 0.4  # seconds lost by it in the steps that are known: less may be the scheduler of a busy machine
PHASES = ("data", "compute", "update")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that all others of its kind wait for."""

    rank: int
    first: int
    last: int
    """The steps that were compared."""
    own: dict[str, float]
    """Seconds a step, by phase."""
    others: dict[str, float]
    whole: float
    """Seconds that a step takes all of them."""

    @property
    def ratio(self) -> float:
        return sum(self.own.values()) / max(1e-9, sum(self.others.values()))

    def __str__(self) -> str:
        most = max(PHASES, key=lambda name: self.own[name] - self.others[name])
        by = ", ".join(
            f"{name} {units.seconds(self.own[name])} against {units.seconds(self.others[name])}" for name in PHASES
        )
        return (
            f"rank {self.rank} is slower than the others: in steps {self.first} to {self.last} it worked "
            f"{units.seconds(sum(self.own.values()))} a step, they {units.seconds(sum(self.others.values()))} "
            f"({self.ratio:.1f} times), and waited for it; mostly in {most} ({by})"
        )


def stragglers(seen: Mapping[int, Seen], known: Mapping[int, object] = {}) -> list[Straggler]:
    """Ranks that take much longer for the same work than the others do; those ``known`` until they are as fast."""
    kinds: dict[int, dict[int, dict[int, StepTimes]]] = defaultdict(dict)
    for rank, each in seen.items():
        kinds[each.kind][rank] = {times.step: times for times in each.times}
    found = []
    for ranks in kinds.values():
        every = sorted(set.intersection(*(set(times) for times in ranks.values())))
        steps = every[-WINDOW:]
        if len(ranks) < 2 or len(steps) < WINDOW:
            continue
        middle = {
            rank: {name: median(getattr(times[step], name) for step in steps) for name in PHASES}
            for rank, times in ranks.items()
        }
        for rank, own in middle.items():
            others = {name: median(by[name] for other, by in middle.items() if other != rank) for name in PHASES}
            whole = median(ranks[rank][step].whole for step in steps)
            one = Straggler(rank, steps[0], steps[-1], own, others, whole)
            lost = sum(ranks[rank][step].own - median(ranks[r][step].own for r in ranks if r != rank) for step in every)
            slow = sum(own.values()) - sum(others.values()) > 0.2 * whole and one.ratio > SLOWER and lost > LEAST
            if slow or (rank in known and one.ratio > AGAIN):
                found.append(one)
    return found


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Replicas that do not hold the same."""

    step: int
    agreed: int
    """The last step after which they did; 0: none."""
    what: str
    """weights or optimizer state."""
    odd: tuple[int, ...]
    """Ranks that differ from most; empty where there is no majority."""
    ranks: tuple[int, ...]
    """All that hold this part."""


class Replicas:
    """Compares the digests of ranks that hold the same part of a model, each step's once."""

    def __init__(self) -> None:
        self._compared: dict[tuple[str, int], int] = {}
        """By what and part: the last step that was compared."""
        self._agreed: dict[tuple[str, int], int] = {}
        self.never: set[str] = set()
        """What has not been equal the first time it was compared: other processors round otherwise."""

    def look(self, seen: Mapping[int, Seen], size: int) -> ReplicaDifference | None:
        """The first difference. Only steps are compared of which all ``size`` ranks have told."""
        if len(seen) < size:
            return None
        told = [{digest.step: digest for digest in each.digests} for each in seen.values()]
        for step in sorted(set.intersection(*(set(each) for each in told))):
            for what, part, by in _parts({rank: digests[step] for rank, digests in zip(seen, told, strict=True)}):
                if what in self.never or step <= self._compared.get((what, part), 0):
                    continue
                first = (what, part) not in self._compared
                self._compared[what, part] = step
                if len(set(by.values())) == 1:
                    self._agreed[what, part] = step
                elif first:
                    self.never.add(what)
                else:
                    return ReplicaDifference(step, self._agreed[what, part], what, _odd(by), tuple(sorted(by)))
        return None


def _parts(digests: Mapping[int, Digest]) -> Iterator[tuple[str, int, dict[int, int]]]:
    """By what and part: the digest of each rank that holds it."""
    for what, part, value in (("weights", 1, 2), ("optimizer state", 3, 4)):
        parts: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, digest in digests.items():
            parts[digest[part]][rank] = digest[value]
        for number, by in parts.items():
            if number and len(by) > 1:
                yield what, number, by


def _odd(by: Mapping[int, int]) -> tuple[int, ...]:
    (most, count), *_ = Counter(by.values()).most_common()
    return tuple(sorted(rank for rank, value in by.items() if value != most)) if 2 * count > len(by) else ()
