"""``meshfit.evaluate`` and ``meshfit.predict``: a trained model over many devices, every sample once.

Results come back on the CPU, in the order of the samples.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshfit.data import tree
from meshfit.data.loader import Loader
from meshfit.data.source import open_source
from meshfit.drive import everywhere
from meshfit.errors import JobError, clearly, did_you_mean
from meshfit.evaluation import measure, outputs_of
from meshfit.job import Job
from meshfit.launch.world import World, from_environment
from meshfit.layout.mesh import Mesh
from meshfit.layout.place import Placed, place
from meshfit.layout.precision import Precision
from meshfit.objective import TARGETS, Objective, Over, call, find_over, split
from meshfit.plan import Plan


@clearly
def evaluate(model: Any, data: Any, **asked: Any) -> dict[str, float]:
    """The loss and the metrics of ``model`` over ``data``: means in which every sample counts once.

    Takes of ``fit``'s keywords: loss, step, metrics, batch_size, plan, devices, precision.
    """
    job = _settled({"model": model, "data": data, "valid": data}, asked, "evaluate")
    if job.loss is None and job.step is None and not job.metrics and not isinstance(data, Mapping):
        raise JobError("evaluate has nothing to measure", "give loss=, or metrics={name: function}")
    return everywhere(job, _evaluate)[0]


@clearly
def predict(model: Any, data: Any, **asked: Any) -> Any:
    """``model``'s outputs for every sample of ``data``, in order, on the CPU.

    ``data`` is given as to ``fit``: targets, the last of a tuple, are left out. Takes batch_size, plan, devices,
    precision.
    """
    job = _settled({"model": model, "data": data}, asked, "predict")
    parts = [part for found in everywhere(job, _predict) for part in found]
    return tree.concatenate([outputs for _, outputs in sorted(parts, key=lambda part: part[0])])


TAKES = {
    "predict": ("batch_size", "seed", "plan", "devices", "precision"),
    "evaluate": ("loss", "step", "metrics", "batch_size", "seed", "plan", "devices", "precision"),
}


def _settled(given: dict[str, Any], asked: dict[str, Any], verb: str) -> Job:
    for key in asked:
        if key not in TAKES[verb]:
            raise JobError(f"{verb} has no argument {key!r}", did_you_mean(key, TAKES[verb]))
    world = from_environment()
    job = Job.of({**given, **asked})
    return job.settled() if world is None else job.settled(count=world.size, kind=world.device.type)


def _evaluate(job: Job, world: World) -> dict[str, float]:
    found: list[Over] = []
    loader, precision, placed = _prepare(job, world, lambda *whole: found.append(_over(job, *whole)))
    objective = _objective(job, loader.source.few())
    over = found[0] if placed.apart else _over(job, placed.model, loader, placed.tried)
    measured = measure(placed, loader, objective=objective, over=over, metrics=job.metrics, precision=precision)
    placed.undo()
    return measured


def _objective(job: Job, few: Any) -> Objective | None:
    """The loss, if there is one: a model's own needs targets among what it is given."""
    own = job.loss is None and job.step is None
    known = not own or (isinstance(few, Mapping) and any(key in few for key in TARGETS))
    return job.objective if known else None


def _over(
    job: Job, model: nn.Module, loader: Loader, inside: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Over:
    """What it is a mean over. A model that is to be taken apart is asked before, in host memory."""
    few, device = loader.source.few(), torch.device("cpu") if inside is nullcontext else loader.device
    objective = _objective(job, few)
    return Over() if objective is None else find_over(objective, model, few, device, inside)


def _predict(job: Job, world: World) -> list[tuple[int, Any]]:
    loader, precision, placed = _prepare(job, world)
    outputs = list(outputs_of(placed, loader, precision))
    placed.undo()
    return outputs


def _prepare(
    job: Job, world: World, before: Callable[[nn.Module, Loader], None] = lambda model, loader: None
) -> tuple[Loader, Precision, Placed]:
    """``before`` is called with the model while it is whole, if it is to be taken apart."""
    assert isinstance(job.plan, Plan)
    assert isinstance(job.batch_size, int)
    # Nothing goes backward: one stage on each rank will do, whatever the schedule of the training
    plan = replace(job.plan, recompute="none", batchnorm="local", schedule="1f1b", chunks=0, microbatches=1)
    plan = replace(
        plan, server=0, staleness=0, late="none", compress="none", lost="redo", exchange="allreduce", every=1, overlap=0
    )
    plan = replace(plan, cut=plan.cut if plan.cut.count(",") + 2 == plan.pipeline else "")
    mesh = Mesh.of(plan, world.rank, world.size)
    loader = Loader(
        source=open_source(job.data),
        batch_size=job.batch_size,
        rank=mesh.share,
        ranks=job.plan.shares,
        device=world.device,
        shuffle=False,
    )
    model = job.build()
    placed = place(
        plan,
        model,
        mesh,
        world.device,
        objective=lambda model, batch: call(model, split(batch)[0]),
        few=loader.source.few,
        same=from_environment() is None,
        before_cut=lambda: None if not plan.apart else before(model, loader),
    )
    return loader, Precision(job.plan.precision), placed
