"""Pipelines whose stages hand on tensors that are split over ranks: rows (sequence=split) or positions (context=)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshfit
from benchmarks.zoo import ZOO
from meshfit.axes.context.axis import ContextAxis, plan_context, prove
from meshfit.axes.context.piece import RULES, Piece
from meshfit.axes.find import as_number, find
from meshfit.axes.pipeline.program import Replayed
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.prove import Refused
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.loss.objective import Objective
from meshfit.passes.pipeline import Pipelined
from meshfit.plan import Plan
from meshfit.plan_cost import cost, stage_traffic
from meshfit.run import Run
from tests.distributed import distributed
from tests.few import more
from tests.ranked import assert_alike, counted_step

CELLS = {
    "tensor=2 sequence=split pipeline=2 microbatches=2": ["tied-gpt", "vit", "bert"],  # vit: 17 rows over two ranks
    "tensor=2 sequence=split pipeline=2 schedule=interleaved microbatches=2": ["llama"],
    "tensor=2 sequence=split pipeline=2 schedule=zbv microbatches=2": ["tied-gpt", "gpt2"],
    "tensor=2 sequence=split pipeline=2 schedule=gpipe recompute=full": ["tied-gpt"],
    "data=2 tensor=2 sequence=split pipeline=2 microbatches=2": ["tied-gpt", "llama"],
    "shard=2 tensor=2 sequence=split pipeline=2 microbatches=2": ["tied-gpt", "llama"],
    "context=2 pipeline=2 microbatches=2": ["tied-gpt", "t5"],
    "context=3 pipeline=2": ["vit"],
    "context=2 pipeline=2 schedule=interleaved microbatches=2": ["llama"],
    "context=2 pipeline=2 schedule=zbv microbatches=2": ["tied-gpt"],
    "context=2 pipeline=2 schedule=gpipe microbatches=2 recompute=full": ["tied-gpt"],
    "data=2 context=2 pipeline=2 microbatches=2": ["tied-gpt"],
    "shard=2 context=2 pipeline=2 microbatches=2": ["tied-gpt"],
    "context=2 tensor=2 sequence=split pipeline=2 microbatches=2": ["tied-gpt", "llama"],
}
SELDOM = {
    "tensor=2 sequence=split pipeline=2 schedule=gpipe recompute=full",
    "shard=2 tensor=2 sequence=split pipeline=2 microbatches=2",
    "data=2 tensor=2 sequence=split pipeline=2 microbatches=2",
    "data=2 context=2 pipeline=2 microbatches=2",
    "context=2 pipeline=2 microbatches=2",
    "context=2 tensor=2 sequence=split pipeline=2 microbatches=2",
}
"""Plans that are left to ``make more``, as are all models but tied-gpt."""


def cells(plans: dict[str, list[str]]) -> list[Any]:
    return [
        more(plan, name) if plan in SELDOM or name != "tied-gpt" else (plan, name)
        for plan, names in plans.items()
        for name in names
    ]


@pytest.mark.parametrize(("plan", "name"), cells(CELLS))
def test_trains_like_one_device(plan: str, name: str) -> None:
    """Losses, norms, weights, optimizer state; and what crosses a cut is split."""

    @distributed(world=Plan.parse(plan).devices, timeout=180)
    def run(plan: str, name: str) -> None:
        case = ZOO[name]
        how = {"data": case.data(18), "loss": case.loss, "clip": 1.0, "optimizer": adamw}
        assert crossing(assert_alike(case.build, plan, **how))

    run(plan=plan, name=name)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def crossing(run: Run) -> set[str]:
    """Axes over which tensors are split that cross a cut."""
    assert isinstance(run.schedule, Pipelined)
    every = [program for some in run.schedule.stages.programs._found.values() for program in some]
    layouts = [layout for program in every for some in program.layouts.values() for layout in some]
    return {spec.kind.axis for layout in layouts for spec in layout.specs}


PLANS = ["tensor=2 sequence=split pipeline=2 microbatches=2", "context=2 pipeline=2 microbatches=2"]


@pytest.mark.parametrize("plan", [PLANS[0], more(PLANS[1])])
def test_evaluates_and_predicts_like_one_device(plan: str) -> None:
    case = ZOO["tied-gpt"]
    assert case.loss is not None
    model, data, how = case.build().eval(), case.data(10), {"batch_size": 4, "plan": plan, "devices": "cpu:4"}
    want = meshfit.predict(model, data, batch_size=4)
    torch.testing.assert_close(meshfit.predict(model, data, **how), want, rtol=1e-4, atol=1e-5)
    found = meshfit.evaluate(model, data, loss=case.loss, **how)
    assert found["loss"] == pytest.approx(float(case.loss(want, data[1])), rel=1e-5)


def fit(plan: str, devices: int = 4, **asked: Any) -> list[float]:
    case = ZOO["tied-gpt"]
    how = {"loss": case.loss, "optimizer": adamw, "batch_size": 4, "steps": 4, "progress": False, **asked}
    result = meshfit.fit(how.pop("model", case.build), case.data(12), plan=plan, devices=f"cpu:{devices}", **how)
    return [step.loss for step in result.history]


def test_goes_on_under_another_plan(tmp_path: Path) -> None:
    whole = fit("data=1", 1)
    given = {"checkpoint": "2 steps", "out": tmp_path / "run"}
    first = fit(PLANS[1], steps=2, **given)
    rest = fit(PLANS[0], resume=True, **given)
    assert first + rest[-2:] == pytest.approx(whole, rel=1e-5)


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    """No mean over samples: each is held against all others."""
    rows = outputs.mean(1)
    return F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)) + 0 * targets[:, 0])


def test_a_loss_of_the_whole_batch() -> None:
    plan = PLANS[1]
    assert fit(plan, loss=contrast) == pytest.approx(fit("data=1", 1, loss=contrast), rel=1e-4)


def test_the_recorded_step_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is wrong for a piece is found out, also if only the recording calls it."""
    case = ZOO["tied-gpt"]
    objective, batch = Objective(loss=case.loss), case.data(6)
    plan = plan_context(case.build(), lambda m, some: as_number(objective(m, some)), batch, 2)
    replayed = Replayed(objective, share=0.05, atoms=[each.module for each in plan.beginnings])
    step = lambda model, some: as_number(replayed(model, some))
    model = case.build()
    assert step(model, batch).item() == as_number(objective(model, batch)).item()
    prove(model, step, batch, plan)
    monkeypatch.setitem(RULES, "relu", lambda func, x, **how: Piece(func(x.local.detach(), **how), x.span, x.group))
    with pytest.raises(Refused, match="gradient"):
        prove(model, step, batch, plan)


COUNTED = {
    "tensor=2 sequence=split pipeline=2 microbatches=2": ["tied-gpt", "vit"],  # vit: 17 rows
    "tensor=2 pipeline=2 microbatches=2": ["tied-gpt"],
    "context=2 pipeline=2 microbatches=2": ["tied-gpt", "vit"],
}
ALL = "context=2 tensor=2 sequence=split pipeline=2 microbatches=2"


@pytest.mark.parametrize(("plan", "name"), [*cells(COUNTED), more(ALL, "tied-gpt")])
def test_cost_is_what_runs(plan: str, name: str) -> None:
    """Sends and collectives of a rank, calls and bytes."""

    @distributed(world=Plan.parse(plan).devices, timeout=180)
    def run(plan: str, name: str) -> None:
        case, how = ZOO[name], Plan.parse(plan)
        (job, run, batch, seen), rank = counted_step(case, how), dist.get_rank()
        model, content, few = case.build().train(), batch.microbatches[0].content, run.loader.source.few()
        found = [find(how, model, job.objective, few, "cpu") if rank == 0 else None]
        dist.broadcast_object_list(found)
        assert found[0] is not None
        laid, acting = found[0].values, (TensorAxis(), ContextAxis())
        atoms = tuple(path for axis in acting if laid[axis.word] for path in axis.closed(laid[axis.word]))
        cut = replace(pipeline_of(how), atoms=atoms).find(model, job.objective, content, device="cpu")
        assert cut.trace is not None
        parts = {"split": laid["tensor"], "sequence": laid["context"]}
        stages = stage_traffic(cut, model, job.objective, content, **parts, ranks=run.mesh.place)
        optimizer = torch.optim.AdamW(model.parameters())
        said = cost(how, cut.trace, optimizer, found=laid, place=run.mesh.place, stages=stages)
        assert dict(seen.calls) == said.calls
        assert dict(seen.moved) == said.moved

    run(plan=plan, name=name)
