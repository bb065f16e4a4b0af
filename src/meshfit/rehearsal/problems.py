"""What a rehearsal found wrong, in words: which rank, what it did, what the others did."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshfit.anatomy.shares import as_ranges
from meshfit.comm.order_check import BlockedRank, Mismatch, Operation
from meshfit.rehearsal.places import Places
from meshfit.rehearsal.rank import Failure, RankReport

MOST = 4
"""Problems of one kind that are listed one by one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that would fail on the cluster."""

    headline: str
    facts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    """That fail; none: all of them."""
    trace: str = ""

    def __str__(self) -> str:
        return "\n  ".join((self.headline, *self.facts))


def failures(places: Places, reports: Iterable[RankReport]) -> list[Problem]:
    """Of ranks that raised; those that raised the same are one."""
    found: dict[tuple[str, str, str], list[RankReport]] = {}
    for report in reports:
        if report.failure is not None and not report.failure.waits:
            failure = report.failure
            found.setdefault((failure.phase, failure.headline, failure.where), []).append(report)
    return [_failed(places, some) for some in found.values()]


def _failed(places: Places, some: Sequence[RankReport]) -> Problem:
    failure = some[0].failure
    assert failure is not None
    ranks = tuple(report.rank for report in some)
    if (share := failure.share) is not None:
        ranks = tuple(rank for rank in range(len(places.all)) if places.share(rank) == share)
    who = places.named(ranks[0]) if len(ranks) == 1 else f"{ranged(ranks)}"
    facts = (*failure.facts, f"while {PHASES[failure.phase]}", *([f"at {failure.where}"] if failure.where else []))
    return Problem(f"{who}: {failure.headline}", facts, ranks, failure.trace)


PHASES = {
    "building": "its model was laid out, before the first step",
    "data": "its samples were read",
    "first step": "it took the first step",
    "second step": "it took the second step",
}


def mismatches(places: Places, found: Sequence[Mismatch]) -> list[Problem]:
    """Of each communicator the first operation in which its ranks differ."""
    first: dict[str, int] = {}
    for each in found:
        first[each.communicator] = min(each.number, first.get(each.communicator, each.number))
    problems = []
    for name, number in first.items():
        differ = [each for each in found if each.communicator == name and each.number == number]
        members = [int(r) for r in name.partition("#")[0].split(",")]
        by = {each.rank: each.mine for each in differ}
        groups: dict[Operation | None, list[int]] = {}
        for rank in members:
            groups.setdefault(by.get(rank, differ[0].theirs), []).append(rank)
        few = min(groups.items(), key=lambda item: (len(item[1]), item[0] is None))
        facts = [_issues(ranks, operation) for operation, ranks in sorted(groups.items(), key=lambda item: item[1])]
        axes = " and ".join(places.differing(members)) or "a rank with itself"
        who = places.named(few[1][0]) if len(few[1]) == 1 else ranged(few[1])
        problems.append(
            Problem(
                f"{who}: collectives do not match, all wait for ever",
                (f"in the group of {axes} ({ranged(members)}), operation {number + 1}:", *facts),
                tuple(few[1]),
            )
        )
    return _most(problems)


def _issues(ranks: Sequence[int], operation: Operation | None) -> str:
    if operation is None:
        return f"  {ranged(ranks)}: nothing more"
    return f"  {ranged(ranks)}: {operation.what}" + (f", at {operation.where}" if operation.where else "")


def deadlocks(places: Places, found: Sequence[BlockedRank]) -> list[Problem]:
    facts = [f"  rank {each.rank} in {each.operation.what} with {ranged(each.operation.ranks)}" for each in found[:8]]
    more = [f"  and {len(found) - 8} more"] if len(found) > 8 else []
    return [
        Problem(
            f"{places.named(found[0].rank)}: all wait for each other, if each operation blocks in the order of issue",
            (*facts, *more),
            tuple(each.rank for each in found),
        )
    ]


def waits(places: Places, reports: Iterable[RankReport]) -> list[Problem]:
    """Of ranks that waited in vain, where nothing else says why."""
    found = [(report.rank, report.failure) for report in reports if report.failure is not None]
    return _most([Problem(f"{places.named(rank)}: {_waited(failure)}", (), (rank,)) for rank, failure in found])


def _waited(failure: Failure) -> str:
    return failure.headline + (f", at {failure.where}" if failure.where else "")


def unlike(places: Places, reports: Sequence[RankReport]) -> list[Problem]:
    """Of ranks that share samples and do not have the same ones, and of shares with tensors of other shapes."""
    problems = []
    by: dict[int, RankReport] = {}
    for report in reports:
        for share, ids in report.samples.items():
            first = by.setdefault(share, report)
            if first.samples[share] != ids or first.shapes[share] != report.shapes[share]:
                who = f"{places.named(report.rank)} has other samples than rank {first.rank}, which shares them"
                shapes = f"{first.shapes[share][:1]} there, {report.shapes[share][:1]} here"
                problems.append(Problem(who, (shapes,), (report.rank,)))
    return _most(problems)


def _most(problems: list[Problem]) -> list[Problem]:
    left = len(problems) - MOST
    return problems if left <= 0 else [*problems[:MOST], Problem(f"and {left} more of this kind")]


def ranged(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0 to 3, 8"."""
    runs = as_ranges(sorted(set(ranks)))
    texts = [str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in runs]
    shown = ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")
    return f"rank{'s' * (len(set(ranks)) > 1)} {shown}"
