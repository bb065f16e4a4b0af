"""Optimizers that need whole matrices step a model that is cut over ranks as they step it on one device."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import meshfit
from benchmarks import optimizers
from benchmarks.matrix_optimizers import LAMB, SOAP, Distance, Muon, Shampoo, matrices_and_rest
from meshfit.drive import begin
from meshfit.errors import PlanError
from meshfit.whole_step import deal
from tests.few import every_other, more
from tests.small import X, Y, assert_same, fit

PLANS = ("shard=2", "shard=2 zero=2", "shard=2 zero=1", "tensor=2", "shard=3", "shard=2 tensor=2", "pipeline=2")


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
    return layers.double()


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return [Muon(matrices), AdamW(rest, lr=1e-2)]


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.Muon(matrices, lr=0.02), AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, Any] = {
    "muon": muon,
    "torch-muon": torch_muon,
    "shampoo": Shampoo,
    "soap": SOAP,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "lamb": LAMB,
}
LIMITS = {"torch-muon": 2e-2}
"""torch's own orthogonalises in bfloat16: what is added in another order may be rounded to the next number."""


def train(plan: str, name: str, **how: Any) -> meshfit.Result:
    defaults = {"data": (X.double(), Y), "steps": 6, "clip": 0.5, "optimizer": OPTIMIZERS[name]}
    return fit(plan, model=net(), **(defaults | how))


@functools.cache
def alone(name: str) -> meshfit.Result:
    """On one device."""
    return train("data=1", name)


@pytest.mark.parametrize(("plan", "name"), every_other(PLANS, ["muon", "shampoo", "adafactor"]))
def test_as_on_one_device(plan: str, name: str) -> None:
    assert_same(train(plan, name), alone(name), 1e-8)


@pytest.mark.parametrize(("plan", "name"), every_other(["shard=2", "tensor=2"], ["torch-muon", "soap", "lamb"]))
def test_others_too(plan: str, name: str) -> None:
    assert_same(train(plan, name), alone(name), LIMITS.get(name, 1e-6))


@pytest.mark.parametrize(
    ("name", "plans"),
    every_other(["muon", "shampoo"], [("shard=2", "data=1"), ("data=2", "shard=2 zero=1"), ("tensor=2", "shard=3")]),
)
def test_resumes_under_another_plan(name: str, plans: tuple[str, str], tmp_path: Path) -> None:
    first, then = plans
    whole = alone(name)
    train(first, name, steps=4, out=tmp_path / "run", checkpoint=2)
    rest = train(then, name, out=tmp_path / "run", checkpoint=2, resume=True)
    assert [step.step for step in rest.history] == [5, 6]
    assert_same(rest, whole, 1e-8)


@pytest.mark.parametrize(
    "plan", [more("shard=2 offload=optimizer"), "shard=2 offload=parameters", "tensor=2 offload=optimizer"]
)
def test_with_states_on_the_host(plan: str) -> None:
    assert_same(train(plan, "muon"), alone("muon"), 1e-8)


@pytest.mark.parametrize("plan", ["shard=3", more("tensor=2"), "shard=2 tensor=2"])
def test_moves_what_cost_says(plan: str) -> None:
    asked = optimizers.job(plan, optimizers.OPTIMIZERS["Muon + AdamW"], 3, width=16, blocks=2)
    training = begin(asked, lockstep=False, tap=optimizers.Count(3, 16, 2))
    list(training)
    assert training.outcome is not None
    assert training.outcome.captured["foretold"]


def test_a_parameter_that_has_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = net(), nn.Linear(8, 8).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Unused()
    before = model.spare.weight.detach().clone()
    how: dict[str, Any] = {"data": (X.double(), Y), "steps": 3, "optimizer": lambda params: LAMB(params)}
    got = fit("shard=2", model=model, **how)
    assert torch.equal(got.model.spare.weight, before)
    assert_same(got, fit("data=1", model=Unused(), **how), 1e-8)


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2", "server=2 data=2"])
def test_one_that_looks_at_all_parameters_is_refused(plan: str) -> None:
    with pytest.raises(PlanError, match="Distance"):
        fit(plan, model=net(), data=(X.double(), Y), optimizer=Distance)


def test_verified() -> None:
    how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "optimizer": muon, "devices": "cpu", "batch_size": 12}
    verdict = meshfit.verify(net(), (X.double(), Y), plan="shard=2", steps=3, **how)
    assert verdict.answer == "equal", verdict


def test_dealt_evenly_among_those_that_hold_a_piece() -> None:
    whole = lambda rows: ((0, rows), (0, 4))
    held = [
        [[whole(8)], [whole(8)]],
        [[((0, 2), (0, 4))], [((2, 6), (0, 4))]],
        [[whole(4)], []],
        [[], [whole(4)]],
    ]
    owners = deal(held)
    assert owners[2:] == [0, 1]
    assert sorted(owners[:2]) == [0, 1]
