"""Seconds of a step, item by item: computing, collectives that are waited for, the pipeline's bubble, the update.

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
from meshfit.planner.work import StageWork, StepWork
from meshfit.schedule.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule, rank_of, stages_of
from meshfit.schedule.orders import schedule
from meshfit.schedule.simulate import Simulated, duration, simulate


@dataclass(frozen=True)
class StepTime:
    """A step, in seconds."""

    seconds: float
    items: dict[str, float]
    """computing, collectives (those that are waited for), bubble, update, slack: they add up to ``seconds``."""

    tokens: float = 0.0
    model_flops: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


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
        return StepTime(total * self.software.slack, items, work.tokens, work.model_flops)

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

    def stages(self, work: StepWork) -> list[tuple[float, float, float, float]]:
        """Of each stage, a microbatch's forward and backward: computing, and what is waited for beside it."""
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

    def _stage(self, stage: StageWork) -> tuple[float, float, float, float]:
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

    def _slowest(self, work: StepWork, each: list[tuple[float, float, float, float]]) -> tuple[float, float]:
        """Of the busiest rank, one microbatch: computing, and what is waited for."""
        ranks = [[0.0, 0.0] for _ in range(work.ranks)]
        for stage, (forward, ahead, backward, back) in enumerate(each):
            rank = rank_of(work.schedule, work.ranks, stage)
            ranks[rank][0] += forward + backward
            ranks[rank][1] += ahead + back
        computing, waited = max(ranks, key=sum)
        return computing, waited

    def _waited(self, work: StepWork, each: list[tuple[float, float, float, float]]) -> float:
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

    def _pipeline(self, work: StepWork, each: list[tuple[float, float, float, float]]) -> float:
        """Seconds from the first forward to the last backward."""
        if work.ranks == 1:
            return work.microbatches * sum(map(sum, each))
        send = CollectiveCall("send", work.sent, 2, work.stride)
        transfer = seconds(send, self.cluster)
        waits = transfer if self.software.blocks_sends else 0.0
        takes = self._takes(work, each, waits)

        def length(made: Schedule) -> float:
            return duration(made, takes, transfer - waits)

        if work.schedule in ("zb1p", "zb2p"):
            return self._zero_bubble(work, each, transfer)
        chunks = len(each) // work.ranks
        word = "interleaved" if chunks > 1 and work.schedule == "1f1b" else work.schedule
        short, longer = (2 * work.ranks, 3 * work.ranks) if work.ranks <= 16 else (work.ranks, 2 * work.ranks)
        if work.microbatches <= longer:
            try:
                return length(schedule(word, work.ranks, work.microbatches, chunks))
            except PlanError:
                short, longer = work.ranks, 2 * work.ranks
        a, b = (length(schedule(word, work.ranks, count, chunks)) for count in (short, longer))
        return a + (b - a) / (longer - short) * (work.microbatches - short)

    def _takes(
        self, work: StepWork, each: list[tuple[float, float, float, float]], waits: float
    ) -> Callable[[Action], float]:
        """Seconds of an action, with what its rank waits for a transfer."""
        table: dict[tuple[str, int], float] = {}
        for stage, (forward, ahead, backward, back) in enumerate(each):
            share = work.stages[stage].weights
            table[FORWARD, stage], table[BACKWARD, stage] = forward + ahead + waits, backward + back + waits
            table[INPUT, stage] = (backward + back) * (1 - share) + waits
            table[WEIGHT, stage] = (backward + back) * share
        return lambda action: table[action.kind, action.stage]

    def timeline(self, work: StepWork, most: int = 0) -> Simulated:
        """Forward and backward of every rank of the pipeline, of ``most`` microbatches (0: all of them)."""
        transfer = seconds(CollectiveCall("send", work.sent, 2, work.stride), self.cluster)
        waits = transfer if self.software.blocks_sends else 0.0
        chunks, count = len(work.stages) // work.ranks, min(work.microbatches, most or work.microbatches)
        word = "interleaved" if chunks > 1 and work.schedule == "1f1b" else work.schedule
        made = schedule(word, work.ranks, count, chunks)
        return simulate(made, self._takes(work, self.stages(work), waits), transfer - waits)

    def _zero_bubble(self, work: StepWork, each: list[tuple[float, float, float, float]], transfer: float) -> float:
        """ZB-H1 and ZB-H2 by their formulas (Qi et al. 2024): 1f1b's bubble less what gradients of weights fill."""
        waits = transfer if self.software.blocks_sends else 0.0
        slowest = max(sum(e) for e in each) + 2 * waits
        forward, back = max(e[0] + e[1] for e in each), max(e[2] + e[3] for e in each)
        weights = back * max(stage.weights for stage in work.stages)
        filled = weights * (1 if work.schedule == "zb1p" else 2)
        bubble = max(0.0, forward + back - weights - filled)
        return work.microbatches * slowest + (work.ranks - 1) * (bubble + 2 * transfer)
