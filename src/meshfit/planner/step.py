"""The work of a step, as lists of what devices compute and communicate, and its seconds, item by item: computing,
collectives that are waited for, the pipeline's bubble, the update.

``transformer.py`` makes the work of a decoder that is described by its sizes, ``plan_work.py`` that of a traced model.

Every action of the pipeline's schedule is simulated with the seconds of its stage (``meshfit.schedule``). After a few
rounds all microbatches take the same, so that the simulation takes two lengths of the schedule and goes on in a line.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshfit.anatomy.operations import Operation, kernels_of
from meshfit.errors import PlanError
from meshfit.planner.cluster import Cluster
from meshfit.planner.collectives import CollectiveCall, beside, seconds
from meshfit.planner.operations import Timing
from meshfit.planner.software import Software
from meshfit.schedule.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule, rank_of, stages_of
from meshfit.schedule.orders import schedule
from meshfit.schedule.simulate import Simulated, duration, simulate


@dataclass(frozen=True)
class StageWork:
    """One stage's work on one microbatch."""

    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()
    again: tuple[Operation, ...] = ()
    """Of the forward, computed again in backward."""

    weights: float = 0.5
    """Share of backward that the gradients of weights take: what schedules that split backward put off."""

    calls: tuple[CollectiveCall, ...] = ()
    """Collectives of the microbatch, with their phase; those of ``again`` are in backward."""


@dataclass(frozen=True)
class StepWork:
    """What the ranks of one pipeline do in a step; of ranks that do the same, one."""

    stages: tuple[StageWork, ...]
    microbatches: int = 1
    schedule: str = "1f1b"
    ranks: int = 1
    """Of the pipeline. ``stages`` holds as many as there are chunks on all of them."""

    sent: float = 0.0
    """Bytes from a stage to the next, and of the gradient back."""

    stride: int = 1
    """Ranks from a stage to the next."""

    calls: tuple[CollectiveCall, ...] = ()
    """Collectives of the step: gradients, gathered weights."""

    update: tuple[Operation, ...] = ()
    """The optimizer's, on the rank that has most."""

    tokens: float = 0.0
    samples: float = 0.0
    model_flops: float = 0.0
    """Of all devices together, without what is computed again."""


@dataclass(frozen=True)
class StepTime:
    """A step, in seconds."""

    seconds: float
    items: dict[str, float]
    """computing, collectives (those that are waited for), bubble, update, slack: they add up to ``seconds``."""


StageTime = tuple[float, float, float, float]
"""Of a microbatch: forward, what is waited for beside it; backward, what is waited for beside that."""


class StepModel:
    """Seconds of steps on one cluster, by one family of software."""

    def __init__(self, cluster: Cluster, software: Software, timing: Timing | None = None):
        self.cluster, self.software = cluster, software
        self.timing = timing or Timing(cluster.accelerator)
        self._computed: dict[int, tuple[tuple[Operation, ...], float]] = {}

    def __call__(self, work: StepWork) -> StepTime:
        each = self.stages(work)
        pipeline = self._pipeline(work, each)
        slowest = self._slowest(work, each)
        waited = self._waited(work, each)
        update = self._computing(work.update)
        computing = work.microbatches * slowest[0]
        exposed = work.microbatches * slowest[1] + waited
        bubble = max(0.0, pipeline - computing - work.microbatches * slowest[1])
        total = pipeline + waited + update
        items = {"computing": computing, "collectives": exposed, "bubble": bubble, "update": update}
        items["slack"] = total * (self.software.slack - 1)
        return StepTime(total * self.software.slack, items)

    def at_least(self, work: StepWork) -> float:
        """Seconds that no schedule can go below, without simulating it: what the busiest rank does, and the way of the
        first microbatch to it and of the last gradient from it, where backward is not split."""
        each, splits = self.stages(work), work.schedule not in ("1f1b", "gpipe", "interleaved")
        whole, chunks = list(map(sum, each)), len(each) // max(1, work.ranks)
        ahead, found = 0.0, 0.0
        for rank in range(work.ranks):
            own = sum(whole[stage] for stage in stages_of(work.schedule, work.ranks, chunks, rank))
            found = max(found, ahead + work.microbatches * own)
            ahead += sum(each[rank][:2] if splits else each[rank])
        return (found + self._waited(work, each) + self._computing(work.update)) * self.software.slack

    def stages(self, work: StepWork) -> list[StageTime]:
        times = {key: self._stage(stage) for key, stage in {id(stage): stage for stage in work.stages}.items()}
        return [times[id(stage)] for stage in work.stages]

    def _computing(self, operations: tuple[Operation, ...]) -> float:
        """On the device, or as long as the host takes to launch it."""
        known = self._computed.get(id(operations))
        if known is None:
            counts = Counter(map(id, operations))  # a stage has the same layer many times
            each = [(op, counts[key]) for key, op in {id(op): op for op in operations}.items()]
            host = self.software.host * sum(kernels_of(op) * count for op, count in each)
            device = sum(self.timing(op) * count for op, count in each)
            known = self._computed[id(operations)] = (operations, max(device, host))
        return known[1]  # kept with its operations, so that no others get their id

    def _stage(self, stage: StageWork) -> StageTime:
        forward = self._computing(stage.forward)
        backward = self._computing(stage.backward) + self._computing(stage.again)
        ahead = [call for call in stage.calls if call.phase == "forward"]
        back = [call for call in stage.calls if call.phase == "backward"]
        return forward, self._exposed(forward, ahead), backward, self._exposed(backward, back)

    def _exposed(self, computing: float, calls: list[CollectiveCall]) -> float:
        """Seconds that ``calls`` add to ``computing``."""
        open_, hidden, kind = 0.0, 0.0, "nvlink"
        for call in calls:
            took = seconds(call, self.cluster)
            if call.hidden:
                hidden += took
                kind = self.cluster.link(call.degree, call.stride).kind
            else:
                open_ += took
        open_ += self.software.exposed * hidden
        hidden *= 1 - self.software.exposed
        return open_ + (beside(computing, hidden, kind) - computing if hidden else 0.0)

    def _slowest(self, work: StepWork, each: list[StageTime]) -> tuple[float, float]:
        """Of the busiest rank, one microbatch: computing, and what is waited for."""
        ranks = [[0.0, 0.0] for _ in range(work.ranks)]
        for stage, (forward, ahead, backward, back) in enumerate(each):
            rank = rank_of(work.schedule, work.ranks, stage)
            ranks[rank][0] += forward + backward
            ranks[rank][1] += ahead + back
        computing, waited = max(ranks, key=sum)
        return computing, waited

    def _waited(self, work: StepWork, each: list[StageTime]) -> float:
        """For the collectives of the step; hidden ones run beside the backward of the last microbatch, or the forward
        of the first."""
        slots = {"backward": max(e[2] for e in each), "forward": max(e[0] for e in each), "step": 0.0}
        found = 0.0
        for phase, slot in slots.items():
            calls = [call for call in work.calls if call.phase == phase]
            chunks = len(each) // max(1, work.ranks)
            found += self._exposed(slot * chunks, calls)
        return found

    def waited_by_axis(self, calls: Iterable[CollectiveCall], total: float) -> dict[str, float]:
        """``total`` seconds of waiting, by axis: in proportion to what its collectives take that are not hidden."""
        took: dict[str, float] = {}
        for call in calls:
            if call.name != "send":
                share = self.software.exposed if call.hidden else 1.0
                took[call.axis] = took.get(call.axis, 0.0) + share * seconds(call, self.cluster)
        whole = sum(took.values())
        return {axis: total * each / whole for axis, each in took.items()} if whole else {}

    def _pipeline(self, work: StepWork, each: list[StageTime]) -> float:
        """Seconds from the first forward to the last backward."""
        if work.ranks == 1:
            return work.microbatches * sum(map(sum, each))
        if work.schedule in ("zb1p", "zb2p"):
            return self._zero_bubble(work, each)
        transfer, waits = self._transfer(work)
        takes = self._takes(work, each, waits)
        length = lambda count: duration(_schedule(work, count), takes, transfer - waits)
        short, longer = (2 * work.ranks, 3 * work.ranks) if work.ranks <= 16 else (work.ranks, 2 * work.ranks)
        if work.microbatches <= longer:
            try:
                return length(work.microbatches)
            except PlanError:
                short, longer = work.ranks, 2 * work.ranks
        a, b = length(short), length(longer)
        return a + (b - a) / (longer - short) * (work.microbatches - short)

    def _transfer(self, work: StepWork) -> tuple[float, float]:
        """Seconds from a stage to the next, and those of them that both ranks wait."""
        transfer = seconds(CollectiveCall("send", work.sent, 2, work.stride), self.cluster)
        return transfer, transfer if self.software.blocks_sends else 0.0

    def _takes(self, work: StepWork, each: list[StageTime], waits: float) -> Callable[[Action], float]:
        """Seconds of an action, with what its rank waits for a transfer."""
        table: dict[tuple[str, int], float] = {}
        for stage, (forward, ahead, backward, back) in enumerate(each):
            share = work.stages[stage].weights
            table[FORWARD, stage], table[BACKWARD, stage] = forward + ahead + waits, backward + back + waits
            table[INPUT, stage] = (backward + back) * (1 - share) + waits
            table[WEIGHT, stage] = (backward + back) * share
        return lambda action: table[action.kind, action.stage]

    def timeline(self, work: StepWork, most: int) -> Simulated:
        """Forward and backward of every rank of the pipeline, of ``most`` microbatches."""
        transfer, waits = self._transfer(work)
        made = _schedule(work, min(work.microbatches, most))
        return simulate(made, self._takes(work, self.stages(work), waits), transfer - waits)

    def _zero_bubble(self, work: StepWork, each: list[StageTime]) -> float:
        """ZB-H1 and ZB-H2 by their formulas (Qi et al. 2024): 1f1b's bubble less what gradients of weights fill."""
        transfer, waits = self._transfer(work)
        slowest = max(sum(e) for e in each) + 2 * waits
        forward, back = max(e[0] + e[1] for e in each), max(e[2] + e[3] for e in each)
        weights = back * max(stage.weights for stage in work.stages)
        filled = weights * (1 if work.schedule == "zb1p" else 2)
        bubble = max(0.0, forward + back - weights - filled)
        return work.microbatches * slowest + (work.ranks - 1) * (bubble + 2 * transfer)


def _schedule(work: StepWork, microbatches: int) -> Schedule:
    chunks = len(work.stages) // work.ranks
    word = "interleaved" if chunks > 1 and work.schedule == "1f1b" else work.schedule
    return schedule(word, work.ranks, microbatches, chunks)
