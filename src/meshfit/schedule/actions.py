"""A schedule is data: for each rank the list of what it does, in order.

It prints as a grid of rank by time, is checked before anything runs, and is simulated to know its bubble and how many
activations it keeps (``simulate``). The model is cut into stages; rank ``r`` of ``p`` holds

    sequential, gpipe, 1f1b   stage r
    interleaved               stages r, p + r, 2p + r, ...   ("chunks" of them)
    zbv, dualpipev            stages r and 2p - 1 - r: down the ranks and up again
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from meshfit.errors import PlanError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Backward whole; or split: gradients of what the stage was fed, then of its weights."""

SPANS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward", WEIGHT: "weight"}
"""What they are called in a rank's events."""

V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's work on one microbatch."""

    kind: str
    """F, B, I or W."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank does in a step."""

    word: str
    ranks: int
    chunks: int
    """Stages a rank holds."""

    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    """By rank."""

    def __hash__(self) -> int:
        """Without the orders: much is remembered by schedule, and asked for again and again."""
        return hash((self.word, self.ranks, self.chunks, self.microbatches))

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        return rank_of(self.word, self.ranks, stage)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must be done before: on this rank, or on that of the stage before or after."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind == FORWARD:
            return (Action(FORWARD, stage - 1, microbatch),) if stage else ()
        if kind == WEIGHT:
            return (Action(INPUT, stage, microbatch),)
        own = (Action(FORWARD, stage, microbatch),)
        if stage == self.stages - 1:
            return own
        split = Action(INPUT, stage + 1, microbatch) in _members(self)
        return (*own, Action(INPUT if split else BACKWARD, stage + 1, microbatch))

    def __str__(self) -> str:
        """The grid: a row a rank, a column a unit of time, forward one and backward two units long."""
        from meshfit.schedule.simulate import simulate

        return simulate(self).grid()


@cache
def _members(schedule: Schedule) -> frozenset[Action]:
    return frozenset(action for order in schedule.orders for action in order)


def rank_of(word: str, ranks: int, stage: int) -> int:
    """The rank that holds ``stage``."""
    at = stage % ranks
    return ranks - 1 - at if word in V_SHAPED and stage >= ranks else at


@cache
def stages_of(word: str, ranks: int, chunks: int, rank: int) -> tuple[int, ...]:
    """The stages that ``rank`` holds."""
    later = ranks - 1 - rank if word in V_SHAPED else rank
    return (rank, *(chunk * ranks + later for chunk in range(1, chunks)))


def usual_chunks(word: str) -> int:
    """Stages a rank holds, if nothing else is said."""
    return 2 if word in (*V_SHAPED, "interleaved") else 1


def check(schedule: Schedule) -> None:
    """Refuse a schedule that is not whole or cannot run: every action once, on the rank of its stage, and an order of
    all ranks together in which each finds what it needs."""
    _check_whole(schedule)
    steps = in_order(schedule)
    if len(steps) < sum(map(len, schedule.orders)):
        done = {action for action, _, _ in steps}
        stuck = {rank: order[i] for rank, order in enumerate(schedule.orders) if (i := _first(order, done)) is not None}
        raise PlanError(
            f"the schedule {schedule.word} never ends: its ranks wait for each other",
            *(
                f"rank {rank} at {action} waits for "
                + ", ".join(str(need) for need in schedule.needs(action) if need not in done)
                for rank, action in stuck.items()
            ),
        )


Step = tuple[Action, int, tuple[tuple[int, int], ...]]
"""An action, its rank, and what it waits for: the number of that step, and the stage whose transfer lies between (-1:
none, it is on the same rank)."""


@cache
def in_order(schedule: Schedule) -> tuple[Step, ...]:
    """All actions, each after those that it waits for; without those that wait for each other."""
    number: dict[Action, int] = {}
    done: list[Step] = []
    place_of = [*map(schedule.rank_of, range(schedule.stages))]
    at, moving = [0] * schedule.ranks, True
    while moving:
        before = len(done)
        for rank, order in enumerate(schedule.orders):
            for action in order[at[rank] :]:
                needs = schedule.needs(action)
                if any(need not in number for need in needs):
                    break
                # a transfer lies between two ranks, and is named by the earlier stage
                between = (-1 if place_of[n.stage] == rank else min(n.stage, action.stage) for n in needs)
                waits = tuple(zip(map(number.__getitem__, needs), between, strict=True))
                number[action] = len(done)
                done.append((action, rank, waits))
                at[rank] += 1
        moving = len(done) > before
    return tuple(done)


def _first(order: tuple[Action, ...], done: set[Action]) -> int | None:
    """Of ``order``, what is not done."""
    return next((i for i, action in enumerate(order) if action not in done), None)


def _check_whole(schedule: Schedule) -> None:
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if schedule.rank_of(action.stage) != rank:
                raise PlanError(f"the schedule {schedule.word} has {action} on rank {rank}, which lacks that stage")
            found[action.stage, action.microbatch].append(action.kind)
    wrong = []
    for stage in range(schedule.stages):
        for i in range(schedule.microbatches):
            kinds = found.pop((stage, i), [])
            if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                wrong.append(f"stage {stage}, microbatch {i}: {' '.join(kinds) or 'nothing'}")
    wrong += [f"stage {stage}, microbatch {i} does not exist" for stage, i in found]
    if wrong:
        raise PlanError(
            f"the schedule {schedule.word} is not whole: each stage needs F and B, or F, I and W, of each microbatch",
            *wrong[:4],
        )


Message = tuple[str, int, int]
"""What is sent: "F" or "B", the stage it comes from, the microbatch."""
