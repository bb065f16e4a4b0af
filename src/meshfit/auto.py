"""The plan that ``fit(plan="auto")`` takes: searched for on the machine at hand, and explained in three lines.

Copies of the model over all devices are what a search is measured against: they are taken where they fit and a search
could not win back the seconds that it takes itself. Before the first search on a machine it is measured, in seconds,
and that is kept. A plan that is predicted not to fit is not started.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import nn

from meshfit.comm.first import from_first_rank
from meshfit.comm.objects import all_gather_object
from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source, sample_count
from meshfit.deferred import Unfollowable
from meshfit.errors import JobError, PlanError, in_short
from meshfit.job import Job
from meshfit.launch.devices import Devices, find
from meshfit.launch.world import World, connect, ranks_here
from meshfit.patches import unprinted
from meshfit.plan import DEGREES, Plan
from meshfit.plan_devices import settle
from meshfit.planner.calibrate import Measurement, calibrated, fitted, save
from meshfit.planner.cluster import Cluster
from meshfit.planner.detect import guessed, profile_path
from meshfit.planner.explain import largest, reasons
from meshfit.planner.predict import TRIED, TracedPredictor
from meshfit.planner.search import Allowed, search
from meshfit.units import seconds as in_words
from meshfit.units import size

SAMPLES = 4
WORTH = 20.0
"""Seconds that a search must be able to save, or it is left out."""

MOST_BUILT = 1 << 28
"""Parameters up to which a model that a function builds is built to be looked at; larger ones stay on meta, where
tensor=, context= and expert= are not tried."""

UNPREDICTED = ("server", "exchange", "staleness", "every", "overlap", "compress", "late", "lost")


class NoForecast(JobError):
    """A training that cannot be predicted, and why."""


class NothingFits(PlanError):
    """No plan of a training is predicted to fit."""


def predictor_of(job: Job, cluster: Cluster, device: str, model: nn.Module) -> TracedPredictor:
    """For any plan of ``job``. ``NoForecast`` where its samples have no common shape."""
    source = open_source(job.data)
    if isinstance(source, SampleStream):
        raise NoForecast("its samples come as a stream")
    few = source.few(SAMPLES)
    if tree.by_sample(few) is not None:
        raise NoForecast("its samples differ in size")
    return TracedPredictor(model, job.objective, few, job.make_optimizer(model), cluster, device=device)


def looked_at(job: Job) -> nn.Module:
    if isinstance(job.model, nn.Module):
        return job.model
    try:
        shape = job.defer().model
    except Unfollowable:
        return job.build()
    return job.build() if sum(p.numel() for p in shape.parameters()) <= MOST_BUILT else shape


def chosen(job: Job, world: World | None = None) -> tuple[Job, list[str]]:
    """``job`` with the plan that "auto" stands for, and why; as it is, where its plan is said or there is nothing to
    choose. ``world``: this rank of those that torchrun started, which call it together: the first of them chooses."""
    text = job.plan
    if not isinstance(text, str) or text.split()[:1] != ["auto"]:
        return job, []
    devices = job.devices if isinstance(job.devices, Devices) else find(job.devices)
    if world is not None:
        devices = Devices(world.device.type, tuple(range(world.size)))
    count = devices.count or 1
    allowed = Allowed.of(text, ("fp32",))
    divides = all(count % int(allowed.fixed.get(axis, 1)) == 0 for axis in DEGREES)
    if not divides or set(allowed.fixed) & set(UNPREDICTED) or (devices.kind != "cuda" and count == 1):
        return job, []  # nothing to choose; or settle says what is wrong
    choice = Choice(job, allowed, devices, count, None if world is None else ranks_here(world))
    group = None
    if world is not None and world.size > 1:
        connect(world, timeout=job.timeout)
        group = dist.group.WORLD
    plan, said = from_first_rank(choice.usual, group)
    if not plan and not said:
        if from_first_rank(choice.is_unmeasured, group):
            choice.measure(world)
        plan, said = from_first_rank(choice.searched, group)
    return (replace(job, plan=Plan.parse(plan)) if plan else job), said


def _or_no_forecast(
    find: Callable[["Choice"], tuple[Plan | None, list[str]]],
) -> Callable[["Choice"], tuple[str, list[str]]]:
    """The plan that ``find`` finds, as text; none, and why, where code of the model's fails on meta tensors."""

    def found(choice: "Choice") -> tuple[str, list[str]]:
        try:
            with warnings.catch_warnings(), unprinted():
                warnings.simplefilter("ignore")
                plan, said = find(choice)
        except NothingFits:
            raise
        except Exception as error:
            return "", [f"auto: every device takes a share of the data; no forecast, {in_short(error)}"]
        return "" if plan is None else str(plan), said

    return found


class Choice:
    """Of one job's plan: what is usual first, then a search on a machine that has been measured."""

    def __init__(self, job: Job, allowed: Allowed, devices: Devices, count: int, here: int | None):
        self.job, self.allowed, self.devices, self.count, self.here = job, allowed, devices, count, here
        self.batch = -(-samples_of(job, count) // count) * count  # as many as the rank with most has, on all

    def is_unmeasured(self) -> bool:
        path = profile_path(self.devices.kind)
        return path is not None and not path.is_file()

    def measure(self, world: World | None) -> None:
        """In seconds, and keep it for the next time. Without it, or where it fails, figures are guesses."""
        if world is None:
            with suppress(Exception):
                self._keep(calibrated(self.count, kind=self.devices.kind))
            return
        every = all_gather_object(Measurement()(world)) if world.size > 1 else [Measurement()(world)]
        if world.rank == 0:
            self._keep(fitted(guessed(self.count, self.devices.kind, self.here), every))

    def _keep(self, found: Cluster) -> None:
        path = profile_path(self.devices.kind)
        if path is not None:
            with suppress(OSError):
                save(found, path)

    @cached_property
    def _model(self) -> nn.Module:
        return looked_at(self.job)

    def _predictor(self) -> TracedPredictor:
        cluster = Cluster.detect(self.count, self.devices.kind, self.here)
        return predictor_of(self.job, cluster, "cuda" if self.devices.kind == "cuda" else "cpu", self._model)

    @_or_no_forecast
    def usual(self) -> tuple[Plan | None, list[str]]:
        """Copies of the model, where they fit and no search could save ``WORTH``; no plan, and why there is no
        forecast; or neither: a search is worth its time."""
        if any(axis in self.allowed.fixed for axis in DEGREES):
            return None, []
        usual = settle(str(self.job.plan), self.count)
        try:
            found = self._predictor()(usual, self.batch)
        except PlanError:  # refused for this model
            return None, []
        spare = (found.seconds - found.items["computing"]) * steps_of(self.job, self.batch)
        if not found.fits or (self.count > 1 and spare >= WORTH):
            return None, []
        needs = f"{size(found.memory.device[1])} of {size(found.capacity)}"
        guess = ", by a guess at this machine (meshfit calibrate measures it)" if self.is_unmeasured() else ""
        if self.count == 1:
            return usual, [f"auto: {needs} are predicted to be needed"]
        return usual, [
            f"auto: {usual}: {in_words(found.seconds)} a step{guess}",
            f"      {needs} on each device, most of it {largest(found.memory.held)}",
            f"      another plan could save {in_words(spare)} of the whole training at most: not searched for",
        ]

    @_or_no_forecast
    def searched(self) -> tuple[Plan | None, list[str]]:
        predictor = self._predictor()
        cluster = predictor.cluster
        # axes that are found by trials only where nothing else fits
        narrow = replace(self.allowed, fixed={**dict.fromkeys(TRIED, 1), **self.allowed.fixed})
        found = search(predictor, self.batch, narrow, self.count)
        if found.best is None:
            found = search(predictor, self.batch, self.allowed, self.count)
        if found.best is None and not found.rejected:
            raise NoForecast("the search knows no plan with these words")
        if found.best is None:
            raise NothingFits(
                f"no plan of this training fits on {cluster.name}",
                *(f"{family.reason}; {family.remedy}" for family in found.rejected[:3]),
                'a plan that is said is started all the same: plan="data=1", say',
            )
        first, *others = reasons(found, cluster)
        return found.best.plan, [f"auto: {first}", *(f"      {text}" for text in others)]


def samples_of(job: Job, count: int) -> int:
    asked = job.batch_size
    if isinstance(asked, str):
        each = asked.partition("/")[0]
        return int(each) * count if each.isdecimal() else count
    return asked or job.data.mean_size() or count


def steps_of(job: Job, batch: int) -> float:
    if job.steps is not None:
        return job.steps
    samples: Any = sample_count(job.data, "data")
    return (job.epochs or 1) * (samples or batch) / batch
