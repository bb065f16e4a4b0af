"""Several optimizers that step together: as one device's loop has them, saved and resumed under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

import meshfit
from meshfit.errors import JobError, PlanError
from tests.small import X, Y, assert_same, fit, losses

PLANS = (
    "data=2",
    "data=2 microbatches=2",
    "shard=2",
    "shard=2 zero=1",
    "tensor=2",
    "pipeline=2",
    "server=1 data=2",
    "server=2 data=2",
    "shard=2 offload=optimizer",
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [SGD(matrices, lr=0.1, momentum=0.9), AdamW(rest, lr=1e-2)]


def schedules(optimizers: list[torch.optim.Optimizer], steps: int) -> list[Any]:
    sgd, adam = optimizers
    return [CosineAnnealingLR(sgd, steps), OneCycleLR(adam, 0.02, total_steps=steps + 1)]


def train(plan: str, **how: Any) -> meshfit.Result:
    return fit(plan, model=net(), **{"optimizer": split, "steps": 6, "clip": 0.5} | how)


def loop(steps: int) -> tuple[nn.Module, list[float]]:
    model = net()
    optimizers = split(model)
    schedulers = schedules(optimizers, steps)
    found = []
    for i in range(steps):
        loss = F.cross_entropy(model(X[i * 10 : i * 10 + 10]), Y[i * 10 : i * 10 + 10])
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in (*optimizers, *schedulers):
            each.step()
        found.append(loss.item())
    return model, found


@pytest.fixture(scope="module")
def alone() -> meshfit.Result:
    return train("data=1", scheduler=schedules)


def test_as_the_usual_loop() -> None:
    got = train("data=1", scheduler=schedules, steps=5, batch_size=10, shuffle=False)
    want, found = loop(5)
    torch.testing.assert_close(torch.tensor(losses(got)), torch.tensor(found), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(got.model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_as_on_one_device(plan: str, alone: meshfit.Result) -> None:
    got = train(plan, scheduler=schedules)
    assert [step.lr for step in got.history] == [step.lr for step in alone.history]
    assert_same(got, alone)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("data=2", "pipeline=2"),
        ("shard=2", "data=1"),
        ("server=1 data=2", "tensor=2"),
        ("pipeline=2", "server=2 data=2"),
    ],
)
def test_resumes_under_another_plan(first: str, then: str, alone: meshfit.Result, tmp_path: Path) -> None:
    how = {"scheduler": schedules, "out": tmp_path / "run", "checkpoint": 2}
    half = train(first, **how, each_step=lambda step: "stop" if step.step == 4 else None)
    assert half.history[-1].step == 4
    rest = train(then, **how, resume=True)
    assert [step.step for step in rest.history] == [5, 6]
    assert [step.lr for step in rest.history] == pytest.approx([step.lr for step in alone.history[4:]])
    assert_same(rest, alone)


def test_a_list_of_schedules_and_none() -> None:
    got = train("data=2", scheduler=[lambda optimizer: StepLR(optimizer, 1, 0.5), None], steps=3)
    assert [step.lr for step in got.history] == [0.1, 0.05, 0.025]


def test_of_the_users_own() -> None:
    model = net()
    own = split(model)
    got = fit("data=2", model=model, optimizer=own, steps=6, clip=0.5)
    assert_same(got, train("data=1"))


def test_a_function_may_use_its_argument_as_the_model() -> None:
    """Whatever it calls it; what fails by itself is not called again."""
    named = lambda m: [SGD(m[2].parameters(), lr=0.1), AdamW(m.get_submodule("4").parameters(), lr=1e-2)]
    assert_same(train("data=2", optimizer=lambda net: split(net)), train("data=1"))
    with pytest.raises(AttributeError, match="'Parameter' object has no attribute 'parameters'"):
        train("data=1", optimizer=named)
    with pytest.raises(AttributeError, match="no attribute 'heads'"):
        train("data=1", optimizer=lambda net: SGD(net.heads.parameters()))


def test_another_list_is_not_resumed(tmp_path: Path) -> None:
    train("data=1", out=tmp_path / "run", checkpoint=2)
    with pytest.raises(meshfit.CheckpointError, match=r"the optimizer is Adam here, SGD \+ AdamW in the checkpoint"):
        train("data=1", optimizer=Adam, out=tmp_path / "run", checkpoint=2, resume=True, steps=8)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"optimizer": lambda model: [Adam(model.parameters()), SGD(model.parameters())]}, "is in two optimizers"),
        ({"optimizer": lambda model: [Adam(model.parameters()), 3]}, "returned something of type int"),
        ({"optimizer": []}, "a function of the parameters"),
        ({"scheduler": [lambda o: StepLR(o, 1)]}, "a list of 1, and there are 2 optimizers"),
    ],
)
def test_what_makes_no_sense(how: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        train("data=1", **how)


# Schedules that follow a metric


@pytest.mark.parametrize("plan", ["data=1", "data=2", "shard=2", "tensor=2", "pipeline=2"])
def test_a_schedule_follows_the_validation_loss(plan: str) -> None:
    plateau = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    how = {"optimizer": SGD, "scheduler": plateau, "valid": (X, Y), "valid_every": 1, "steps": 6}
    got = fit(plan, model=net(), **how)
    model, lr, best, want = net(), 1e-3, float("inf"), []
    for step in got.history:
        want.append(lr)
        assert step.valid is not None
        if step.valid["loss"] < best * 0.8:
            best = step.valid["loss"]
        else:
            lr /= 2
    assert [step.lr for step in got.history] == pytest.approx(want)
    assert want[-1] < want[0]
    assert len(list(model.parameters())) == len(list(got.model.parameters()))


def test_a_schedule_follows_a_metric_and_resumes(tmp_path: Path) -> None:
    accuracy = lambda outputs, targets: (outputs.argmax(1) == targets).float()
    how: dict[str, Any] = {
        "scheduler": [
            lambda o: ReduceLROnPlateau(o, "max", patience=0, threshold=0.3, factor=0.5),
            lambda o: StepLR(o, 1, 0.9),
        ],
        "valid": (X, Y),
        "valid_every": 1,
        "metrics": {"accuracy": accuracy},
        "best": "accuracy",
        "steps": 8,
    }
    whole = train("data=1", **how)
    assert whole.history[-1].lr < whole.history[0].lr
    saved = {**how, "out": tmp_path / "run", "checkpoint": 2}
    train("data=2", **saved, each_step=lambda step: "stop" if step.step == 4 else None)
    rest = train("shard=2", **saved, resume=True)
    assert [step.lr for step in rest.history] == pytest.approx([step.lr for step in whole.history[4:]])


def test_a_schedule_that_nobody_tells_a_metric() -> None:
    with pytest.raises(JobError, match="valid=, data to evaluate on"):
        train("data=1", scheduler=[ReduceLROnPlateau, None])
    with pytest.raises(PlanError, match="workers evaluate"):
        train("server=1 data=2", scheduler=[ReduceLROnPlateau, None], valid=(X, Y))


# Those that evaluate the loss themselves


def lbfgs(parameters: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, history_size=3, line_search_fn="strong_wolfe")


def closures(steps: int, batch: int, clip: float | None = None) -> tuple[nn.Module, list[float]]:
    """The usual loop."""
    model, found = net().double(), []
    optimizer = lbfgs(model.parameters())
    for i in range(steps):
        at = slice(i * batch, (i + 1) * batch)

        def closure(at: slice = at) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[at].double()), Y[at])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        found.append(optimizer.step(closure).item())
    return model, found


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("plan", ["data=1", "data=2", "data=2 microbatches=2", "data=3"])
def test_lbfgs_as_the_usual_loop(plan: str, clip: float | None) -> None:
    model, found = closures(3, 15, clip)
    how: dict[str, Any] = {"data": (X.double(), Y), "batch_size": 15, "steps": 3, "shuffle": False}
    got = fit(plan, model=net().double(), optimizer=lbfgs, clip=clip, **how)
    torch.testing.assert_close(torch.tensor(losses(got)), torch.tensor(found), rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(got.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_lbfgs_resumes(tmp_path: Path) -> None:
    how: dict[str, Any] = {"optimizer": lbfgs, "batch_size": 15, "shuffle": False}
    whole = fit("data=1", model=net(), steps=4, **how)
    fit("data=1", model=net(), steps=2, **how, out=tmp_path / "run", checkpoint=1)
    rest = fit("data=1", model=net(), steps=4, **how, out=tmp_path / "run", checkpoint=1, resume=True)
    assert losses(rest) == losses(whole)[2:]
    assert_same(rest, whole)


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2", "server=1 data=2", "data=2 exchange=local"])
def test_lbfgs_is_refused_where_it_would_not_be_exact(plan: str) -> None:
    with pytest.raises(PlanError, match="evaluates the loss several times a step"):
        fit(plan, model=net(), optimizer=lbfgs)


def test_lbfgs_beside_another() -> None:
    both = lambda model: [lbfgs(model[0].parameters()), SGD(model[2].parameters())]
    with pytest.raises(JobError, match="a phase of its own"):
        train("data=1", optimizer=both)
