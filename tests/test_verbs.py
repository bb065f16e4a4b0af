"""The verbs over ranks that share a model in every way: evaluate, predict, best, callbacks, broken samples."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.plan import Plan
from tests.ranked import ADAMW, X, Y

METRICS = {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()}
PLANS = ["tensor=2", "data=2 tensor=2", "pipeline=2", "data=2 pipeline=2 schedule=zbv", "tensor=2 pipeline=2"]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def over(plan: str) -> dict[str, str]:
    return {"plan": plan, "devices": f"cpu:{Plan.parse(plan).devices}"}


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_and_prediction(plan: str) -> None:
    model, y = network(), Y.argmax(1)
    alone = meshfit.evaluate(model, (X, y), loss=F.cross_entropy, metrics=METRICS, batch_size=7)
    outputs = meshfit.predict(model, (X, y), batch_size=7)
    found = meshfit.evaluate(model, (X, y), loss=F.cross_entropy, metrics=METRICS, batch_size=7, **over(plan))
    assert found == pytest.approx(alone)
    torch.testing.assert_close(meshfit.predict(model, (X, y), batch_size=7, **over(plan)), outputs)


@pytest.mark.parametrize("plan", ["data=2 tensor=2", "data=2 pipeline=2"])
def test_validation_best_and_average(plan: str) -> None:
    def fit(**how: Any) -> tuple[list[Any], nn.Module]:
        model = network()
        given = {"loss": F.mse_loss, "optimizer": ADAMW, "batch_size": 8, "epochs": 4, "shuffle": False}
        result = meshfit.fit(model, (X, Y), valid=(X[:5], Y[:5]), best="-loss", ema=0.5, **given, **how)
        return [step.valid["loss"] for step in result.history if step.valid], model

    want, alone = fit(devices="cpu")
    got, model = fit(**over(plan))
    assert got == pytest.approx(want, rel=1e-4)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2"])
def test_a_callback_stops_all_ranks(plan: str) -> None:
    stop = lambda step: "stop" if step.step == 3 else None
    how = {"loss": F.mse_loss, "optimizer": ADAMW, "batch_size": 8, **over(plan)}
    assert len(meshfit.fit(network(), (X, Y), steps=50, each_step=stop, **how).history) == 3


@pytest.mark.parametrize("plan", ["data=2 tensor=2", "pipeline=2"])
def test_a_broken_sample_is_named(plan: str) -> None:
    x = X.clone()
    x[13] = float("nan")
    how = {"loss": F.mse_loss, "optimizer": ADAMW, "batch_size": 8, "shuffle": False, "epochs": 1, **over(plan)}
    with pytest.raises(meshfit.NonFiniteError, match="sample 13"):
        meshfit.fit(network(), (x, Y), **how)
