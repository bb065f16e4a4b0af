"""Values that a step logs beside its loss: the same under every plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.errors import DataError
from tests.small import X, Y, assert_same, fit, losses

PLANS = (
    "data=2",
    "data=2 microbatches=2",
    "shard=2",
    "shard=2 zero=1",
    "offload=parameters",
    "tensor=2",
    "pipeline=2",
    "server=1 data=2",
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def step(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    outputs = model(x)
    logged = {
        "accuracy": (outputs.argmax(1) == y).float().mean(),
        "right": (outputs.argmax(1) == y).sum(),
        "temperature": 2.0,
        "positives": ((outputs.argmax(1) * y).sum(), y.sum()),
    }
    return F.cross_entropy(outputs, y), logged


def train(plan: str, **how: Any) -> meshfit.Result:
    return fit(plan, model=net, loss=None, step=step, **how)


def values(result: meshfit.Result) -> list[list[float]]:
    return [[*each.values.values()] for each in result.history]


@pytest.fixture(scope="module")
def alone() -> meshfit.Result:
    return train("data=1", steps=6)


@pytest.mark.parametrize("plan", PLANS)
def test_as_on_one_device(plan: str, alone: meshfit.Result) -> None:
    got = train(plan, steps=6)
    assert [*got.history[0].values] == ["accuracy", "right", "temperature", "positives"]
    torch.testing.assert_close(torch.tensor(values(got)), torch.tensor(values(alone)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(losses(got)), torch.tensor(losses(alone)), rtol=1e-5, atol=1e-6)
    assert_same(got, alone)


def test_of_an_evaluation_too() -> None:
    alone, spread = (train(plan, steps=4, valid=(X[:13], Y[:13]), valid_every=2) for plan in ("data=1", "data=2"))
    assert [*alone.metrics] == ["loss", "accuracy", "right", "temperature", "positives"]
    assert alone.metrics == pytest.approx(spread.metrics, rel=1e-5)


def test_sum_and_count_as_loss() -> None:
    def summed(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each[y > 0].sum(), (y > 0).sum()), {"largest": each.detach()[y > 0].mean()}

    alone, spread = (fit(plan, model=net, loss=None, step=summed, steps=4) for plan in ("data=1", "data=2"))
    torch.testing.assert_close(torch.tensor(values(alone)), torch.tensor(values(spread)), rtol=1e-5, atol=1e-6)


def test_a_loss_of_outputs_and_targets_may_log() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        return F.mse_loss(outputs[:, 0], targets.float()), {"mean": outputs.mean()}

    alone, spread = (fit(plan, model=net, loss=loss, steps=3) for plan in ("data=1", "data=2 microbatches=2"))
    torch.testing.assert_close(torch.tensor(values(alone)), torch.tensor(values(spread)), rtol=1e-5, atol=1e-6)


def test_a_loss_of_the_whole_batch_may_log() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        spread = outputs.std(0).mean()
        return spread, {"spread": spread.detach()}

    alone, spread = (fit(plan, model=net, loss=loss, steps=3) for plan in ("data=1", "data=2"))
    torch.testing.assert_close(torch.tensor(values(alone)), torch.tensor(values(spread)), rtol=1e-5, atol=1e-6)


def test_written_and_drawn(tmp_path: Path) -> None:
    train("data=2", steps=5, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(set(line["values"]) == {"accuracy", "right", "temperature", "positives"} for line in lines)
    assert "value-accuracy" in (tmp_path / "run" / "report.html").read_text()


def test_other_names_later_are_refused() -> None:
    def changing(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1]), {f"of{len(batch[0]) < 3}": 1.0}

    with pytest.raises(DataError, match=r"the same names at every step"):
        fit("data=2", model=net, loss=None, step=changing, steps=6)


def test_more_than_one_number_is_refused() -> None:
    with pytest.raises(DataError, match=r"'logits', to be logged"):
        fit("data=1", model=net, loss=None, step=lambda m, b: (m(b[0]).mean(), {"logits": m(b[0])}))
