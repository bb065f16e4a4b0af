"""Pipelines whose stages hand on tensors that are split over ranks: rows (sequence=split) or positions (context=)."""

from typing import Any

import pytest
import torch

import meshfit
from benchmarks.zoo import ZOO
from meshfit.plan import Plan
from meshfit.run import Run
from meshfit.schedule.pipeline import Pipelined
from tests.distributed import distributed
from tests.ranked import assert_alike

CELLS = {
    "tensor=2 sequence=split pipeline=2 microbatches=2": ["vit", "bert"],  # 17 rows over two ranks
    "tensor=2 sequence=split pipeline=2 schedule=interleaved microbatches=2": ["llama"],
    "tensor=2 sequence=split pipeline=2 schedule=zbv microbatches=2": ["gpt2"],
    "tensor=2 sequence=split pipeline=2 schedule=gpipe recompute=full": ["tied-gpt"],
    "data=2 tensor=2 sequence=split pipeline=2 microbatches=2": ["llama"],
    "shard=2 tensor=2 sequence=split pipeline=2 microbatches=2": ["llama"],
}


@pytest.mark.parametrize(("plan", "name"), [(plan, name) for plan, names in CELLS.items() for name in names])
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


@pytest.mark.parametrize("plan", ["tensor=2 sequence=split pipeline=2 microbatches=2"])
def test_evaluates_and_predicts_like_one_device(plan: str) -> None:
    case = ZOO["tied-gpt"]
    assert case.loss is not None
    model, data, how = case.build().eval(), case.data(10), {"batch_size": 4, "plan": plan, "devices": "cpu:4"}
    want = meshfit.predict(model, data, batch_size=4)
    torch.testing.assert_close(meshfit.predict(model, data, **how), want, rtol=1e-4, atol=1e-5)
    found = meshfit.evaluate(model, data, loss=case.loss, **how)
    assert found["loss"] == pytest.approx(float(case.loss(want, data[1])), rel=1e-5)
