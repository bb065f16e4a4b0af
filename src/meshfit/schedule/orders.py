"""The orders of the schedules, by their words.

With ``m`` microbatches whose backward takes twice as long as their forward, and transfers that take no time:

    schedule      idle share                 microbatches kept by the first rank
    sequential    (p - 1) / p                1: one rank works at a time, plain model parallelism
    gpipe         (p - 1) / (m + p - 1)      m
    1f1b          (p - 1) / (m + p - 1)      p
    interleaved   (p - 1) / (vm + p - 1)     p (1 + (p - 1) / vp), for v chunks
    zbv           0, nearly                  p: backward is split, and gradients of weights fill the gaps
    dualpipev     less than 1f1b             p: forward of one chunk runs beside backward of the other

The orders of ``interleaved``, ``zbv`` and ``dualpipev`` are those of ``torch.distributed.pipelining``.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache

from meshfit.errors import PlanError
from meshfit.plan import SCHEDULES
from meshfit.schedule.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Schedule,
    check,
    stages_of,
    usual_chunks,
)


@cache
def schedule(word: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule ``word``, checked; a ``PlanError`` names the nearest that works."""
    chunks = usual_chunks(word) if chunks is None else chunks
    _refuse(word, ranks, microbatches, chunks)
    orders = tuple(tuple(_ORDERS[word](rank, ranks, microbatches, chunks)) for rank in range(ranks))
    made = Schedule(word, ranks, chunks, microbatches, orders)
    check(made)
    return made


@cache
def short(like: Schedule, microbatches: int) -> Schedule:
    """For a batch too small for all microbatches: ``like`` with fewer, or where it cannot take that number all
    forwards, then all backwards, on the same stages."""
    try:
        return schedule(like.word, like.ranks, microbatches, like.chunks)
    except PlanError:
        orders = tuple(
            tuple(_all_forward(stages_of(like.word, like.ranks, like.chunks, rank), microbatches))
            for rank in range(like.ranks)
        )
        made = Schedule(like.word, like.ranks, like.chunks, microbatches, orders)
        check(made)
        return made


def _refuse(word: str, ranks: int, microbatches: int, chunks: int) -> None:
    if word not in SCHEDULES:
        raise PlanError(f"there is no schedule {word!r}", f"known: {', '.join(SCHEDULES)}")
    right = usual_chunks(word)
    if (word == "interleaved" and chunks < 2) or (word != "interleaved" and chunks != right):
        raise PlanError(
            f"schedule={word} cannot have chunks={chunks}",
            "it interleaves two stages or more on each rank" if word == "interleaved" else f"its ranks hold {right}",
            f"chunks={right} works",
        )
    why = _not_taken(word, ranks, microbatches)
    if why:
        near = sorted(range(1, 4 * (microbatches + ranks) + 1), key=lambda m: (abs(m - microbatches), -m))
        fit = next(m for m in near if not _not_taken(word, ranks, m))
        raise PlanError(
            f"schedule={word} on {ranks} ranks cannot take microbatches={microbatches}",
            why,
            f"microbatches={fit} works",
        )


def _not_taken(word: str, ranks: int, microbatches: int) -> str:
    """Why a number of microbatches does not go; nothing if it does."""
    if microbatches < 1:
        return "a batch is one microbatch or more"
    if word == "dualpipev" and microbatches < 2 * ranks:
        return f"both its directions must fill: it needs at least as many as there are stages, {2 * ranks}"
    rounds = max(1, microbatches // ranks)
    if word == "interleaved" and microbatches % rounds:
        return f"it takes them in {rounds} rounds of one size, about one microbatch a rank each"
    return ""


# Orders, each of one rank


def _one_at_a_time(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    for i in range(microbatches):
        yield Action(FORWARD, rank, i)
        yield Action(BACKWARD, rank, i)


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return _all_forward((rank,), microbatches)


def _all_forward(stages: tuple[int, ...], microbatches: int) -> Iterator[Action]:
    for stage in stages:
        yield from (Action(FORWARD, stage, i) for i in range(microbatches))
    for stage in reversed(stages):
        yield from (Action(BACKWARD, stage, i) for i in range(microbatches))


def _1f1b(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    ahead = min(ranks - rank - 1, microbatches)
    yield from (Action(FORWARD, rank, i) for i in range(ahead))
    for i in range(microbatches):
        if i + ahead < microbatches:
            yield Action(FORWARD, rank, i + ahead)
        yield Action(BACKWARD, rank, i)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    rounds = max(1, microbatches // ranks)
    wide = microbatches // rounds  # microbatches a round
    total = chunks * microbatches
    ahead = min((chunks - 1) * wide + 2 * (ranks - 1 - rank), total)

    def chunk_order(*, backward: bool) -> Iterator[tuple[int, int]]:
        seen: Counter[int] = Counter()
        for step in range(total):
            chunk = step // wide % chunks
            stage = (chunks - 1 - chunk if backward else chunk) * ranks + rank
            yield stage, seen[stage]
            seen[stage] += 1

    forward = [Action(FORWARD, *at) for at in chunk_order(backward=False)]
    backward = [Action(BACKWARD, *at) for at in chunk_order(backward=True)]
    yield from forward[:ahead]
    for i, action in enumerate(backward):
        if i + ahead < total:
            yield forward[i + ahead]
        yield action


class _Counted:
    """Gives out actions of the two stages of a rank, each kind's microbatches in order."""

    def __init__(self, rank: int, ranks: int):
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.next: Counter[tuple[str, int]] = Counter()
        self.owed: deque[Action] = deque()  # gradients of weights still to compute

    def __call__(self, kind: str, chunk: int) -> Action:
        key = (INPUT if kind == BACKWARD else kind, chunk)
        action = Action(kind, self.stages[chunk], self.next[key])
        self.next[key] += 1
        if kind == INPUT:
            self.owed.append(Action(WEIGHT, action.stage, action.microbatch))
        return action

    def split(self, chunk: int) -> Iterator[Action]:
        yield self(INPUT, chunk)
        yield self.owed.pop()


def _zbv(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    full = max(2 * ranks - 1, microbatches)  # what fills the pipeline; those that do not exist are left out
    return (action for action in _full_zbv(rank, ranks, full) if action.microbatch < microbatches)


def _full_zbv(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    do = _Counted(rank, ranks)
    yield from (do(FORWARD, 0) for _ in range(2 * (ranks - rank) - 1))
    for _ in range(rank):
        yield do(FORWARD, 1)
        yield do(FORWARD, 0)
    for _ in range(ranks - rank):
        yield do(FORWARD, 1)
        yield from do.split(1)
    while do.next[FORWARD, 1] < do.next[FORWARD, 0] or do.next[FORWARD, 0] < microbatches:
        if do.next[FORWARD, 0] < microbatches:
            yield do(FORWARD, 0)
        yield from do.split(0)
        yield do(FORWARD, 1)
        yield from do.split(1)
    for _ in range(rank):
        yield do(INPUT, 0)
        yield do(INPUT, 1)
    for _ in range(ranks - rank):
        yield do(INPUT, 0)
        first = next(action for action in do.owed if action.stage == do.stages[0])
        do.owed.remove(first)
        yield first
    yield from sorted(do.owed, key=lambda action: (-action.stage, action.microbatch))


def _dualpipev(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    do, after = _Counted(rank, ranks), ranks - rank - 1
    yield from (do(FORWARD, 0) for _ in range(2 * after))
    for _ in range(rank + 1):
        yield do(FORWARD, 0)
        yield do(FORWARD, 1)
    for _ in range(after):
        yield from do.split(1)
        yield do(FORWARD, 1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        yield do(FORWARD, 0)
        yield do(BACKWARD, 1)
        yield do(FORWARD, 1)
        yield do(BACKWARD, 0)
    for _ in range(after):
        yield do(BACKWARD, 1)
        yield do(FORWARD, 1)
        yield do(BACKWARD, 0)
    half, kinds = (rank + 1) // 2, [BACKWARD, BACKWARD]
    for i in range(rank + 1):  # from the middle on split, so that gradients of weights fill what comes after
        if i == half:
            kinds = [INPUT if rank % 2 else BACKWARD, INPUT]
        elif i > half:
            kinds = [INPUT, INPUT]
        yield do(kinds[0], 1)
        yield do(kinds[1], 0)
    for _ in range(after):
        if do.owed:
            yield do.owed.popleft()
        yield do(kinds[1], 0)
    yield from do.owed


_ORDERS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "sequential": _one_at_a_time,
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
