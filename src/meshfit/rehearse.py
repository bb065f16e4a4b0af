"""``meshfit.rehearse``: the ranks of a plan, run on this machine before anyone rents the cluster.

The program of each rank that may differ from others (by stage and branch, and the first and last along the other axes)
is run for two steps in a process of its own, on real code: the model is laid out, batches are read, forward, backward,
exchange and update run, with the collectives of a rank whose peers are mostly not there (rehearsal/others.py). What
every rank issues is logged, and proven to match over all ranks of the plan (comm/order_check.py): those that did not
run issue what the nearest one did. If the user's code asks which rank it is, or ranks that should be alike are not, all
ranks run. Models too large for that go through as shapes (rehearsal/meta.py). Memory by stage is what the axes' costs
say, against that of the cluster's devices.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from meshfit.arguments import verb_of
from meshfit.axes.fill import rehearsal
from meshfit.comm.order_check import BlockedRank, Mismatch, Operation, blocked, differences
from meshfit.drive.ranked import RANK_MODULES
from meshfit.drive.training import Training
from meshfit.errors import PlanError, in_short
from meshfit.job import NO_EVALUATION, Job, plan_of
from meshfit.launch import warm
from meshfit.launch.devices import Devices
from meshfit.plan import Plan
from meshfit.planner.cluster import Cluster
from meshfit.planner.prediction import StepMemory
from meshfit.rehearsal import problems
from meshfit.rehearsal.hub import Hub
from meshfit.rehearsal.memory import stage_memory, timeline, too_large
from meshfit.rehearsal.others import Question, Said
from meshfit.rehearsal.places import Places
from meshfit.rehearsal.problems import Problem
from meshfit.rehearsal.rank import RankReport, RankWork

STEPS = 2
MOST_AT_ONCE = 16
"""Ranks beyond the first that run at once."""
MOST = 256
"""Ranks up to which all are run, where they may differ."""
LARGEST = 2**24
"""Parameters up to which ranks run with values."""

NOT_REHEARSED = {**NO_EVALUATION, "ema": None, "out": None, "checkpoint": None, "resume": False}


@dataclass(frozen=True)
class Rehearsal:
    """What came of it."""

    plan: Plan
    cluster: Cluster
    problems: list[Problem]
    """What would fail; none: the plan would start and take its first steps."""
    ran: list[int]
    """Ranks that were run; what the others issue follows from them."""
    memory: list[StepMemory] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """By share of the batch: the samples of the first step."""
    operations: int = 0
    """Collectives and messages of all ranks in two steps, which match."""
    communicators: int = 0
    values: bool = True
    """Whether tensors had values; else shapes alone."""
    drawn: Callable[[], str] = field(default=str, repr=False, compare=False)
    """Makes ``timeline``, which takes some seconds."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds that this process and those of the ranks computed."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def timeline(self) -> str:
        """A step as the planner predicts it, as SVG. A ``PlanError`` says where it predicts none."""
        try:
            return self.drawn()
        except Exception as error:  # it is known for most plans; the ranks have run all the same
            raise PlanError("the timeline of this plan is not predicted", in_short(error)) from error

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1


@dataclass(frozen=True, kw_only=True)
class RehearseArguments(Job):
    """What ``rehearse`` is asked: a job, and the cluster that it is for."""

    on: Any = None


@verb_of(RehearseArguments)
def rehearse(asked: dict[str, Any]) -> Rehearsal:
    """Run the first steps of the ranks of a plan on this machine, as they would run ``on`` a cluster: "16x8xH100", a
    file, or a ``Cluster``. The other arguments are those of ``fit``; those about evaluations, files and the end have
    no effect. The model is not changed."""
    on = asked.pop("on")
    if on is None:
        raise PlanError("on= is missing: the cluster that the plan is for", 'on="8xH100", say')
    return rehearse_job(Job(**asked).training(), Cluster.of(on))


def rehearse_job(job: Job, cluster: Cluster) -> Rehearsal:
    """The same for a job."""
    began, before = time.monotonic(), time.process_time()
    warm.warm(*RANK_MODULES, "meshfit.rehearsal.rank")
    asked = replace(job, steps=STEPS, epochs=None, **NOT_REHEARSED)
    settled = asked.settled(count=cluster.devices, kind="cuda")
    plan = plan_of(settled)
    if plan.server:
        raise PlanError(f"{plan}: model servers are not rehearsed", "they are processes beside the ranks")
    if plan.devices == 1:
        raise PlanError(f"{plan} is one device: there is nothing to rehearse", "give a plan of several: data=8, say")
    training = Training(settled, False, None)  # refuses what fit refuses
    performance = Performance(settled, cluster, _values(training))
    performance.run()
    found = performance.result(training)
    ranks = sum(report.cpu for report in performance.reports.values())
    return replace(found, seconds=time.monotonic() - began, cpu=time.process_time() - before + ranks)


def _values(training: Training) -> bool:
    """Whether ranks run with values."""
    count = sum(p.numel() for p in training.model.parameters())
    if count <= LARGEST:
        return True
    if training.deferred is None:
        raise PlanError(
            f"the model has {count:,} parameters: its ranks are rehearsed by shapes alone, on meta",
            "for that it must be built there",
            "pass a function that builds the model: model=lambda: Net()",
        )
    return False


class Performance:
    """A rehearsal under way."""

    def __init__(self, job: Job, cluster: Cluster, values: bool):
        self.job, self.cluster, self.values = job, cluster, values
        self.places = Places(plan_of(job))
        self.hub = Hub(self.places, lambda rank, message: None)
        self.reports: dict[int, RankReport] = {}
        self.notes: list[str] = []

    @property
    def size(self) -> int:
        return len(self.places.all)

    @property
    def stopped(self) -> bool:
        return any(report.failure is not None for report in self.reports.values())

    def run(self) -> None:
        """The ranks that may differ; then, if they do differ by more than what they hold, all others."""
        self._run(self.places.sample())
        why = self._may_differ()
        if self.stopped or not why:
            return
        if self.size > MOST:
            self.notes.append(f"{why}: {len(self.reports)} of {self.size} ranks were run, and others may differ")
            return
        self.notes.append(f"{why}: all ranks were run")
        wave: list[int] = []
        for column in (column for column in self.places.columns() if column[0] not in self.reports):
            if wave and len(wave) + len(column) > MOST_AT_ONCE:
                self._run(wave)
                wave = []
            wave += column
        if wave:
            self._run(wave)

    def _may_differ(self) -> str:
        asks = next((report.asked_rank for report in self.reports.values() if report.asked_rank), "")
        if asks:
            return f"{asks} asks which rank it is"
        first = self.places.column({})
        for rank, report in self.reports.items():
            like = self.places.nearest(rank, first)
            if like is not None and self.places.log_of(rank, like, self.reports[like].log) != report.log:
                return f"rank {rank} issues other collectives than rank {like}"
        return ""

    def _run(self, ranks: Sequence[int]) -> None:
        """These, at once."""
        index = {rank: i for i, rank in enumerate(ranks)}
        work = RankWork(
            job=self.job,
            ranks=tuple(ranks),
            size=self.size,
            per_host=self.cluster.devices_per_node,
            shares=self._unread(ranks),
            meta=not self.values,
            same=self.cluster.nodes == 1,
        )
        from meshfit.launch.local import LocalRanks  # of systems that fork alone

        devices = Devices("cpu", tuple(range(len(ranks))))
        with LocalRanks(work, size=len(ranks), devices=devices, joined=False) as started:
            self.hub.send = lambda rank, message: started.send(index[rank], message)
            self.hub.begin(ranks)
            for i, message in started.messages():
                if isinstance(message, Said | Question):
                    self.hub.hear(ranks[i], message)
                else:
                    self.hub.ended(ranks[i])
            self.reports |= {report.rank: report for report in started.results}

    def _unread(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """By rank: shares of the batch that no rank reads otherwise, dealt out to these."""
        plan = plan_of(self.job)
        if self.reports:
            return ((),) * len(ranks)
        taken = {self.places.share(rank) for rank in ranks}
        left = [share for share in range(plan.shares) if share not in taken]
        return tuple(tuple(left[i :: len(ranks)]) for i in range(len(ranks)))

    def logs(self) -> list[list[Operation]]:
        """Of all ranks of the plan."""
        found = []
        for rank in range(self.size):
            like = self.places.nearest(rank, self.reports)
            assert like is not None
            found.append(self.places.log_of(rank, like, self.reports[like].log))
        return found

    def problems(self, logs: list[list[Operation]]) -> list[Problem]:
        reports = [self.reports[rank] for rank in sorted(self.reports)]
        if found := problems.failures(self.places, reports):
            return found
        wrong: list[Mismatch] | list[BlockedRank] = differences(logs)
        if wrong:
            return problems.mismatches(self.places, wrong)
        if wrong := blocked(logs):
            return problems.deadlocks(self.places, wrong)
        return problems.waits(self.places, reports) or problems.unlike(self.places, reports)

    def result(self, training: Training) -> Rehearsal:
        logs = self.logs()
        found, memory = self.problems(logs), []
        try:
            valued = lambda: training.model if training.deferred is None else rehearsal(training.deferred)
            memory = stage_memory(self.job, training.model, self._found, valued)
        except Exception as error:  # it is known for most plans: the ranks have run all the same
            self.notes.append(f"memory is not predicted for this plan: {in_short(error)}")
        found += self._too_large(memory)
        reports = self.reports.values()
        return Rehearsal(
            plan=plan_of(self.job),
            cluster=self.cluster,
            problems=found,
            ran=sorted(self.reports),
            memory=memory,
            samples=dict(sorted((share, ids) for report in reports for share, ids in report.samples.items())),
            operations=sum(map(len, logs)),
            communicators=len({operation.communicator for log in logs for operation in log}),
            values=self.values,
            drawn=partial(timeline, self.job, training.model, self._found, self.cluster),
            notes=[*training.said, *self.notes, *next((report.notes for report in reports), [])],
        )

    @property
    def _found(self) -> dict[str, Any]:
        return self.reports[0].found if 0 in self.reports else {}

    def _too_large(self, memory: Sequence[StepMemory]) -> list[Problem]:
        found = []
        for each in memory:
            if why := too_large(each, self.cluster):
                ranks = self.places.stage(each.stage, each.branch)
                at = f"stage {each.stage}" if plan_of(self.job).pipeline > 1 else "each rank"
                found.append(Problem(f"{at} does not fit: {problems.ranged(ranks)}", (why,), tuple(ranks)))
        return found
