"""``meshfit.evaluate`` and ``meshfit.predict``: a trained model over many devices, every sample once.

Results come back on the CPU, in the order of the samples.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshfit.arguments import verb
from meshfit.axes.data.batchnorm import untracked
from meshfit.axes.expert.balance import is_apart
from meshfit.axes.mesh import Mesh
from meshfit.axes.place import Placed, place
from meshfit.axes.precision import Precision
from meshfit.data import tree
from meshfit.data.datasets import open_source
from meshfit.data.loader import Loader
from meshfit.drive import everywhere
from meshfit.errors import JobError
from meshfit.evaluation import measure, outputs_of
from meshfit.job import Job
from meshfit.launch.devices import Devices
from meshfit.launch.world import World, from_environment
from meshfit.loss import batch_loss
from meshfit.loss.objective import TARGETS, LossDenominator, Objective, call, split
from meshfit.loss.probe import LARGEST, find_denominator
from meshfit.plan import Plan


@verb
def evaluate(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    metrics: Mapping[str, Any] | None = None,
    batch_size: int | str | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    plan: Plan | str = "auto",
    devices: Devices | str | int = "auto",
) -> dict[str, float]:
    """The loss and the metrics of ``model`` over ``data``: means in which every sample counts once. The arguments are
    those of ``fit``."""
    job = settle(Job(**dict(locals()), valid=data))
    return everywhere(job, _evaluate)[0]


@verb
def predict(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    batch_size: int | str | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    plan: Plan | str = "auto",
    devices: Devices | str | int = "auto",
) -> Any:
    """``model``'s outputs for every sample of ``data``, in order, on the CPU; where batches were padded to lengths of
    their own, a list of one tensor for each sample.

    ``data`` is given as to ``fit``: the last of a tuple is its targets, and left out, where the model takes so many
    arguments; where it needs all of the tuple it is given all, and where it may be called both ways the question is
    refused: ``predict(model, x)`` and ``predict(model, ((a, b),))`` are clear. The other arguments are
    those of ``fit``.
    """
    job = settle(Job(**dict(locals()), valid=data))
    parts = [part for found in everywhere(job, _predict) for part in found]
    return tree.concatenate([outputs for _, outputs in sorted(parts, key=lambda part: part[0])], ragged=True)


Inputs = Callable[[Any], Any]


def settle(job: Job) -> Job:
    """With the plan and the batch size of the devices that there are."""
    world = from_environment(job.devices)
    return job.settled() if world is None else job.settled(count=world.size, kind=world.device.type)


def _evaluate(job: Job, world: World) -> dict[str, float]:
    plan, mesh, loader = _prepared(job, world)
    objective, precision = _objective(job, loader.source.few()), Precision(plan.precision)
    if objective is None and not job.metrics:
        raise JobError("evaluate has nothing to measure", "give loss=, or metrics={name: function}")
    over = LossDenominator() if objective is None else None

    def find_over(model: nn.Module, inside: Callable[[], AbstractContextManager[None]] | None = None) -> None:
        """The denominator of the loss. Of a small model, or one whose modules are partitioned, it is found before the
        model is laid out, maybe in host memory."""
        nonlocal over
        small = sum(p.numel() for p in model.parameters()) <= LARGEST
        if objective is None or (inside is None and not small and not plan.partitions_modules):
            return
        try:
            over = find_denominator(
                objective,
                model,
                loader.source.few(),
                loader.device,
                inside,
                auxiliary=is_apart(plan),
                precision=precision,
                microbatch=loader.batch_size // loader.ranks,
            )
        except Exception:
            if loader.ranks > 1:
                raise
            over = LossDenominator()  # whole batches: measuring will say what is wrong

    placed = _placed(plan, job.build(), mesh, loader, _first, find_over)
    if over is None:
        find_over(placed.model, placed.inside)
    assert over is not None
    if objective is not None and loader.ranks > 1:
        batch_loss.check(plan, over, objective)
    measured = measure(placed, loader, objective=objective, over=over, metrics=job.metrics or {}, precision=precision)
    placed.undo()
    return measured


def _objective(job: Job, few: Any) -> Objective | None:
    """The loss, if there is one: a model's own needs targets among what it is given."""
    own = job.loss is None and job.step is None
    known = not own or (isinstance(few, Mapping) and any(key in few for key in TARGETS))
    return job.objective if known else None


def _predict(job: Job, world: World) -> list[tuple[int, Any]]:
    plan, mesh, loader = _prepared(job, world)
    model = job.build()
    inputs = _inputs(model, loader.source.few(2))
    placed = _placed(plan, model, mesh, loader, inputs)
    outputs = list(outputs_of(placed, loader, Precision(plan.precision), inputs))
    placed.undo()
    return outputs


def _first(batch: Any) -> Any:
    """What the model is called with: all but the targets."""
    return split(batch)[0]


def _inputs(model: nn.Module, few: Any) -> Inputs:
    """What of a batch the model is called with, to predict: all but the targets, if it holds some."""
    if (
        isinstance(few, tree.PerSample)
        or not isinstance(few, tuple | list)
        or len(few) < 2
        or not isinstance(few[0], Tensor)
    ):
        return _first
    least, most = _takes(model)
    count, kind = len(few), type(model).__name__
    if not least <= count <= most:
        return _first
    if count - 1 < least:
        return tuple
    raise JobError(
        f"the samples are {count} tensors, and {kind} may be called with {count - 1} or {count} of them",
        "is the last one a target or an input?",
        "an input: predict(model, ((a, b),)), a tuple of one; a target: predict(model, x)",
        "of a data set: meshfit.data.memory(data).map(lambda batch: batch[0]) gives the inputs alone",
    )


def _takes(model: nn.Module) -> tuple[float, float]:
    """The least and the most tensors that the model can be called with by position. What is True, False, a number or a
    word by default is no tensor."""
    try:
        given = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return 1, 1
    placed = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in placed)
    most = next((i for i, p in enumerate(placed) if p.default is not p.empty and p.default is not None), len(placed))
    return least, float("inf") if any(p.kind is p.VAR_POSITIONAL for p in given) else most


def _prepared(job: Job, world: World) -> tuple[Plan, Mesh, Loader]:
    assert isinstance(job.batch_size, int)
    plan = _plan(job)
    mesh = Mesh.of(plan, world.rank, world.size)
    loader = Loader(
        source=open_source(job.valid),  # also what a DataLoader leaves out with drop_last=True
        batch_size=job.batch_size,
        rank=mesh.share,
        ranks=plan.shares,
        device=world.device,
        shuffle=False,
    )
    return plan, mesh, loader


def _placed(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh,
    loader: Loader,
    inputs: Inputs,
    before: Callable[[nn.Module], None] = lambda model: None,
) -> Placed:
    """``before`` is called with the model while it is whole."""
    return place(
        plan if untracked(model) else replace(plan, batchnorm="local"),
        model,
        mesh,
        loader.device,
        objective=lambda model, batch: call(model, inputs(batch)),
        few=loader.source.few,
        same=from_environment() is None,
        before_cut=lambda tried: before(tried()),
        trains=False,
    )


def _plan(job: Job) -> Plan:
    """Nothing goes backward: one stage on each rank will do, whatever the schedule of the training."""
    assert isinstance(job.plan, Plan)
    plan = replace(job.plan, recompute="none", schedule="1f1b", chunks=0, microbatches=1)
    plan = replace(
        plan, server=0, staleness=0, late="none", compress="none", lost="redo", exchange="allreduce", every=1, overlap=0
    )
    return replace(plan, cut=plan.cut if plan.cut.count(",") + 2 == plan.pipeline else "")
