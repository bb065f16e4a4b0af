"""A rank that ran out of memory: what it held, what was predicted, and the smallest change that is predicted to fit.

What fits is judged by the failure itself: the tensors that were there did fit, with what was asked for they did not.
Where more was needed than predicted, predictions of other plans are taken to be as far off.
"""

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import psutil
import torch
from torch import nn

from meshfit import auto
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.errors import PlanError, RankError, in_short, out_of_memory
from meshfit.job import Job, plan_of
from meshfit.launch.devices import Devices
from meshfit.launch.system import peak_memory
from meshfit.observe.rank import kept_memory
from meshfit.patches import unprinted
from meshfit.plan import Plan
from meshfit.planner.cluster import Cluster
from meshfit.planner.predict import TracedPredictor
from meshfit.planner.search import OFFLOADS, RECOMPUTES
from meshfit.run import Run
from meshfit.units import size

REST = "all else"
"""Kinds that a rank cannot tell apart: activations, what is gathered or rounded, gradients on their way."""
STAYS = ("weights", "gradients", "optimizer")
ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB)", re.IGNORECASE)
UNITS = {unit: 1024**i for i, unit in enumerate("bkmgt")}
LESS = 0.8
"""Of what was predicted, where it is not known what there was: what must do with less memory."""


@contextmanager
def accounted(run: Run) -> Iterator[None]:
    """Around a rank's training: an error for want of memory says what the rank held, by kind, at its most."""
    before = psutil.Process().memory_info().rss - sum(kept_memory(run).values())
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            error.held = _held(run, before)  # type: ignore[attr-defined]
        raise


def _held(run: Run, before: int) -> dict[str, int]:
    device, kept = run.world.device, kept_memory(run)
    stays = {kind: kept.get(kind, 0) for kind in STAYS}
    stays["weights"] += kept.get("buffers", 0)
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
    else:
        most = peak_memory() - before
    return {**stays, REST: max(0, most - sum(stays.values()))}


def explained(job: Job, model: nn.Module, said: str, held: Mapping[str, int]) -> list[str]:
    """Lines about a failure ``said`` of ``job``, whose rank had ``held``."""
    plan = plan_of(job)
    about = [f"under {plan}, {job.batch_size} samples a step"]
    try:
        with warnings.catch_warnings(), unprinted():
            warnings.simplefilter("ignore")
            assert isinstance(job.devices, Devices)
            cluster = Cluster.detect(plan.devices, job.devices.kind)
            predictor = auto.predictor_of(job, cluster, "cuda" if job.devices.kind == "cuda" else "cpu", model)
            told = dict(predictor.memory(plan, _batch(job)).held)
            lines = _table(told, held)
            return [*about, *lines, *_remedy(predictor, job, model, told, said, held)]
    except Exception as error:  # of the model's own code on meta, or memory again
        shown = [f"{kind} {size(count)}" for kind, count in held.items()]
        return [*about, *([f"it held {', '.join(shown)}"] if shown else []), f"no forecast: {in_short(error)}"]


def note_memory(job: Job, model: nn.Module, error: BaseException) -> None:
    """The same in the process that ran out: as a note of the user's own exception."""
    traceback.clear_frames(error.__traceback__)  # they hold on to what was made
    held = getattr(error, "held", {})
    error.add_note("\n  ".join(["meshfit: out of memory", *explained(job, model, str(error), held)]))


def with_memory(job: Job, model: nn.Module, error: RankError) -> RankError:
    return error.saying(*explained(job, model, f"{error.headline} {error.trace}", error.held))


def _batch(job: Job) -> int:
    assert isinstance(job.batch_size, int)
    return job.batch_size


def _table(told: Mapping[str, float], held: Mapping[str, int]) -> list[str]:
    """Predicted beside real, by kind."""
    inside = {kind: count for kind, count in told.items() if kind not in STAYS}
    most = ", ".join(f"{kind} {size(count)}" for kind, count in sorted(inside.items(), key=lambda item: -item[1])[:3])
    rows = [(kind, told.get(kind, 0.0), held.get(kind)) for kind in STAYS]
    rows.append((REST, sum(inside.values()), held.get(REST)))
    rows.append(("together", sum(told.values()), sum(held.values()) if held else None))
    lines = [f"{'':<10} {'predicted':>10} {'held':>10}"]
    for kind, predicted, real in rows:
        lines.append(f"{kind:<10} {size(predicted):>10} {'' if real is None else size(real):>10}".rstrip())
    return [*lines, f"{REST} is predicted as {most}"] if most else lines


def _remedy(
    predictor: TracedPredictor,
    job: Job,
    model: nn.Module,
    told: Mapping[str, float],
    said: str,
    held: Mapping[str, int],
) -> list[str]:
    """The change that costs least time, of those of fewest words, among those that are predicted to fit."""
    plan, batch = plan_of(job), _batch(job)
    there = sum(told.values())
    if held and not held.get("optimizer"):  # the first step: its state is not there yet
        there -= told.get("optimizer", 0.0)
    limit = _limit(predictor, there, said, held)
    least = (inf, plan)
    for changes in (_changes(plan, job, model), _changes(plan, job, model, twice=True)):
        fits: list[tuple[float, float, Plan]] = []
        for other in changes:
            try:
                needs = predictor.memory(other, batch).allocated
            except PlanError:  # refused for this model
                continue
            least = min(least, (needs, other), key=lambda pair: pair[0])
            if needs <= limit:
                fits.append((_seconds(predictor, other, batch), needs, other))
        if fits:
            _, needs, other = min(fits, key=lambda each: each[0])  # the first of them, where seconds are not predicted
            return [f"{_said(plan, other)} is predicted to need {size(needs)}", f'plan="{other}"']
    fewer = f"{_said(plan, least[1])} is predicted to need {size(least[0])} at least: " if least[0] < inf else ""
    return [f"{fewer}more devices, a smaller batch_size or model would be needed"]


def _limit(predictor: TracedPredictor, told: float, said: str, held: Mapping[str, int]) -> float:
    """Bytes that a plan may be predicted to need."""
    if not held:
        return min(predictor.cluster.accelerator.memory, LESS * told)
    there = sum(held.values())
    found = ASKED.search(said)
    wanted = there + (float(found[1]) * UNITS[found[2][0].lower()] if found else 0.0)
    return there * min(1.0, told / wanted)


def _seconds(predictor: TracedPredictor, plan: Plan, batch: int) -> float:
    try:
        return predictor(plan, batch).seconds
    except PlanError:  # those of servers and local steps are not predicted
        return 0.0


def _changes(plan: Plan, job: Job, model: nn.Module, *, twice: bool = False) -> Iterator[Plan]:
    """``plan`` with one word changed to save memory, or two, of which one is what is recomputed."""
    if twice:
        for word in ("full", "full+loss"):
            for other in _changes(plan, job, model):
                if other.recompute == plan.recompute and (again := _made(other, recompute=word)) is not None:
                    yield again
        return
    wanted: list[dict[str, Any]] = []
    if not batch_norms(model):  # its statistics are those of a microbatch
        counts = (plan.microbatches * 2**i for i in range(1, 12))
        wanted += [{"microbatches": count} for count in counts if count <= -(-_batch(job) // plan.shares)]
    known = RECOMPUTES.index(plan.recompute) if plan.recompute in RECOMPUTES else -1
    wanted += [{"recompute": word} for word in RECOMPUTES[known + 1 :]]
    if plan.data > 1 and not plan.server and plan.exchange == "allreduce":
        wanted += [{"data": 1, "shard": plan.data * plan.shard, "zero": zero} for zero in (1, 2, 3)]
    wanted += [{"zero": zero} for zero in range(plan.zero + 1, 4) if plan.shard > 1]
    wanted += [{"offload": word} for word in OFFLOADS] if plan.offload == "none" else []
    for words in wanted:
        if (other := _made(plan, **words)) is not None:
            yield other


def _made(plan: Plan, **words: Any) -> Plan | None:
    try:
        return replace(plan, **words)
    except PlanError:
        return None


def _said(plan: Plan, other: Plan) -> str:
    """The words that differ."""
    before = set(str(plan).split())
    return " ".join(word for word in str(other).split() if word not in before)
