"""The plan that ``fit(plan="auto")`` takes: searched for on the machine at hand, and explained in three lines.

Copies of the model over all devices are what a search is measured against: they are taken where they fit and a search
could not win back the seconds that it takes itself. A plan that is predicted not to fit is not started.
"""

import io
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from torch import nn

from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source, sample_count
from meshfit.deferred import Unfollowable
from meshfit.errors import JobError, PlanError
from meshfit.job import Job
from meshfit.launch.devices import Devices, find
from meshfit.plan import DEGREES, Plan, settle
from meshfit.planner.cluster import Cluster
from meshfit.planner.explain import reasons
from meshfit.planner.predict import TracedPredictor
from meshfit.planner.prediction import Prediction
from meshfit.planner.search import Allowed, search
from meshfit.units import size

SAMPLES = 4
WORTH = 20.0
"""Seconds that a search must be able to save, or it is left out."""

MOST_BUILT = 1 << 28
"""Parameters up to which a model that a function builds is built to be looked at; larger ones stay on meta, where
tensor=, context= and expert= are not tried."""

UNPREDICTED = ("server", "exchange", "staleness", "every", "overlap", "compress", "late", "lost")
TRIED = ("tensor", "context", "expert", "branch")
"""Axes that take trials of the model to find: asked only where nothing else fits."""


class NoForecast(JobError):
    """A training that cannot be predicted, and why."""


class NothingFits(PlanError):
    """No plan of a training is predicted to fit."""


def predictor_of(job: Job, cluster: Cluster, device: str, model: nn.Module | None = None) -> TracedPredictor:
    """For any plan of ``job``. ``NoForecast`` where its samples have no common shape."""
    source = open_source(job.data)
    if isinstance(source, SampleStream):
        raise NoForecast("its samples come as a stream")
    few = source.few(SAMPLES)
    if tree.by_sample(few) is not None:
        raise NoForecast("its samples differ in size")
    model = looked_at(job) if model is None else model
    return TracedPredictor(model, job.objective, few, job.make_optimizer(model), cluster, device=device)


def looked_at(job: Job) -> nn.Module:
    if isinstance(job.model, nn.Module):
        return job.model
    try:
        shape = job.defer().model
    except Unfollowable:
        return job.build()
    return job.build() if sum(p.numel() for p in shape.parameters()) <= MOST_BUILT else shape


def chosen(job: Job) -> tuple[Job, list[str]]:
    """``job`` with the plan that "auto" stands for, and why; as it is, where its plan is said or there is nothing to
    choose."""
    text = job.plan
    if not isinstance(text, str) or text.split()[:1] != ["auto"]:
        return job, []
    devices = job.devices if isinstance(job.devices, Devices) else find(job.devices)
    count = devices.count or 1
    allowed = Allowed.of(text, ("fp32",))
    divides = all(count % int(allowed.fixed.get(axis, 1)) == 0 for axis in DEGREES)
    if not divides or set(allowed.fixed) & set(UNPREDICTED) or (devices.kind != "cuda" and count == 1):
        return job, []  # nothing to choose; or settle says what is wrong
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found, said = _chosen(job, allowed, devices, count)
    except NothingFits:
        raise
    except Exception as error:  # any code of the model's may fail on meta tensors
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return job, [f"auto: every device takes a share of the data; no forecast, {why}"]
    return replace(job, plan=found), said


def _chosen(job: Job, allowed: Allowed, devices: Devices, count: int) -> tuple[Plan, list[str]]:
    cluster = Cluster.detect(count)
    predictor = predictor_of(job, cluster, "cuda" if devices.kind == "cuda" else "cpu")
    degrees = [axis for axis in DEGREES if axis in allowed.fixed]
    batch = samples_of(job, count)
    if not degrees:
        usual = settle(str(job.plan), count)
        first = _tried(predictor, usual, batch)
        spare = 0.0 if first is None else (first.seconds - first.items["computing"]) * steps_of(job, batch)
        if first is not None and first.fits and (count == 1 or spare < WORTH):
            return usual, _usual(first, count)
    narrow = replace(allowed, fixed={**dict.fromkeys(TRIED, 1), **allowed.fixed})
    found = search(predictor, batch, narrow, count)
    if found.best is None:
        found = search(predictor, batch, allowed, count)
    if found.best is None:
        raise NothingFits(
            f"no plan of this training fits on {cluster.name}",
            *(f"{family.reason}; {family.remedy}" for family in found.rejected[:3]),
            'a plan that is said is started all the same: plan="data=1", say',
        )
    first, *others = reasons(found, cluster)
    return found.best.plan, [f"auto: {first}", *(f"      {text}" for text in others)]


def _tried(predictor: TracedPredictor, plan: Plan, batch: int) -> Prediction | None:
    try:
        return predictor(plan, batch)
    except PlanError:  # refused for this model
        return None


def _usual(found: Prediction, count: int) -> list[str]:
    said = f"auto: {found.plan}: {size(found.used[1])} of {size(found.capacity)} on each device"
    return [said] if count > 1 else []


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
