"""Metrics that are no means over samples: the same number under every plan."""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import meshfit
from meshfit.errors import PlanError
from meshfit.metrics import is_mean

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N, BATCH, CLASSES = 22, 7, 3  # in three ranks: two of them have no part in the last batch
PLANS = ["data=1", "data=3", "shard=2", "tensor=2", "pipeline=2 microbatches=2", "data=2 pipeline=2 microbatches=2"]


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 6, generator=draw, dtype=torch.float64)
    return x, (x[:, 0].abs() * 2).long().clamp(max=CLASSES - 1)  # classes of uneven size


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """As people write it: no mean over samples."""
    guess, each = outputs.argmax(1), []
    for c in range(CLASSES):
        hits = ((guess == c) & (targets == c)).sum()
        each.append(2 * hits / ((guess == c).sum() + (targets == c).sum()).clamp(min=1))
    return torch.stack(each).mean()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


class Spread:
    """An object with state that belongs to no library: the range of what it was shown, and in what order."""

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    __init__ = reset

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append(outputs[:, 0])

    def compute(self) -> dict[str, Any]:
        every = torch.cat(self.seen)
        return {"range": every.max() - every.min(), "ordered": every @ torch.arange(len(every), dtype=every.dtype)}


def metrics() -> dict[str, Any]:
    both = {"task": "multiclass", "num_classes": CLASSES}
    return {
        "f1": torchmetrics.F1Score(**both, average="macro"),
        "auroc": torchmetrics.AUROC(**both),
        "many": torchmetrics.MetricCollection([torchmetrics.Recall(**both), torchmetrics.Precision(**both)]),
        "by class": torchmetrics.Accuracy(**both, average=None),
        "function": macro_f1,
        "accuracy": accuracy,
        "own": Spread(),
    }


def measured(plan: str) -> dict[str, float]:
    return meshfit.evaluate(
        net(), data(), loss=F.cross_entropy, metrics=metrics(), batch_size=BATCH, plan=plan, devices="cpu"
    )


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    """By hand, without meshfit."""
    x, y = data()
    with torch.no_grad():
        outputs = net()(x)
    found: dict[str, Any] = {"loss": float(F.cross_entropy(outputs, y))}
    for name, metric in metrics().items():
        if callable(getattr(metric, "update", None)):
            for part in torch.arange(N).split(BATCH):
                metric.update(outputs[part], y[part])
            value = metric.compute()
        else:
            value = metric(outputs, y)
        if isinstance(value, dict):
            found |= {f"{name}/{key}": float(v) for key, v in value.items()}
        elif value.dim():
            found |= {f"{name}/{i}": float(v) for i, v in enumerate(value)}
        else:
            found[name] = float(value)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_metric_has_one_value_under_every_plan(plan: str, alone: dict[str, float]):
    found = measured(plan)
    assert found.keys() == alone.keys()
    assert found == pytest.approx(alone, rel=1e-12)


class InOrder(torchmetrics.Metric):
    """Keeps all that it was shown, and depends on its order."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append(outputs[:, 0])

    def compute(self) -> Tensor:
        every = torchmetrics.utilities.dim_zero_cat(self.seen)
        return every @ torch.arange(len(every), dtype=every.dtype)


def test_entries_of_a_metric_come_in_the_order_of_the_samples() -> None:
    alone, spread = (
        meshfit.evaluate(net(), data(), metrics={"in order": InOrder()}, batch_size=BATCH, plan=plan, devices="cpu")
        for plan in ("data=1", "data=3")
    )
    assert spread == pytest.approx(alone, rel=1e-9)


def test_metrics_with_state_are_measured_while_training_and_choose_the_best():
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro")
    result = meshfit.fit(
        net(),
        data(),
        valid=data(),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        metrics={"f1": f1, "own": Spread()},
        best="f1",
        batch_size=BATCH,
        epochs=3,
        plan="data=2",
        devices="cpu",
    )
    again = meshfit.evaluate(result.model, data(), metrics={"f1": f1}, batch_size=BATCH, devices="cpu")
    best = max(step.valid["f1"] for step in result.history if step.valid)
    assert again["f1"] == pytest.approx(best, rel=1e-6)
    assert f1._update_count == 0  # the user's own object is left as it was


def test_a_model_that_predicts_one_class_does_not_hide_that_f1_is_no_mean():
    outputs = torch.zeros(8, CLASSES).index_fill(1, torch.tensor([0]), 5.0)
    assert not is_mean("f1", macro_f1, outputs, torch.ones(8, dtype=torch.long))
    assert is_mean("accuracy", accuracy, outputs, torch.ones(8, dtype=torch.long))


def kept(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets)[targets != -100].double().mean()


@pytest.mark.parametrize("plan", ["data=1", "data=2"])
def test_a_mean_that_shows_later_that_it_is_none_is_an_error(plan: str):
    x, y = data()
    y[-6:-1] = -100  # ignored targets, in the last batches alone
    with pytest.raises(meshfit.DataError, match=r"(?s)'kept' is no mean over samples.*\(sum, count\)"):
        meshfit.evaluate(net(), (x, y), metrics={"kept": kept}, batch_size=BATCH, plan=plan, devices="cpu")


def fails(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("only one class is there")


def test_an_error_of_a_metric_is_the_users_own():
    with pytest.raises((meshfit.RankError, ValueError), match="only one class is there"):
        meshfit.evaluate(net(), data(), metrics={"m": fails}, batch_size=BATCH, plan="data=2", devices="cpu")


def test_what_is_no_metric_is_refused():
    with pytest.raises(meshfit.JobError, match=r"(?s)metrics\['m'\] is 3.*update, compute and reset"):
        meshfit.evaluate(net(), data(), metrics={"m": 3}, devices="cpu")


def evaluated(model: nn.Module, batch: Any) -> Any:
    """A loss that training has not, and outputs for metrics of one forward."""
    x, y = batch
    outputs = model(x)
    return F.cross_entropy(outputs, y, label_smoothing=0.1), {"largest": outputs.softmax(1).amax(1).mean()}, outputs


def test_metrics_of_a_step_that_keeps_its_outputs_are_refused_before_a_recording_trains():
    """Else the first evaluation said so, after the steps before it were trained."""
    x, y = data()
    step = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    asked = {"metrics": {"f1": macro_f1}, "valid": (x, y), "steps": 2, "optimizer": torch.optim.SGD}
    with pytest.raises(
        PlanError, match=r"outputs that step= does not return(.|\n)*let step= return \(loss, {}, outputs"
    ) as error:
        meshfit.fit(net(), (x, y), step=step, plan="pipeline=2", **asked)
    assert error.value.step == 0
    result = meshfit.fit(net(), (x, y), step=step, plan="data=2", **asked)
    assert "f1" in result.metrics


@pytest.mark.parametrize("plan", ["data=1", "data=2", "pipeline=2"])
def test_evaluations_may_run_a_step_of_their_own(plan: str):
    x, y = data()
    asked = {"metrics": {"f1": macro_f1}, "best": "largest", "steps": 2, "plan": plan, "optimizer": torch.optim.SGD}
    model = net()
    result = meshfit.fit(model, (x, y), loss=F.cross_entropy, valid=(x, y), valid_step=evaluated, **asked)
    model.eval()
    with torch.no_grad():
        loss, values, outputs = evaluated(model, (x, y))
    found = max((step.valid for step in result.history if step.valid), key=lambda valid: valid["largest"])
    assert found == pytest.approx(
        {"loss": loss.item(), "largest": values["largest"].item(), "f1": macro_f1(outputs, y).item()}, rel=1e-4
    )
