"""What ``plan="auto"`` stands for on the machine at hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshfit
from meshfit import Cluster, Plan, PlanError, auto
from meshfit.job import Job
from meshfit.launch.devices import Devices


class Wide(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum(1)


def asked(width: int, plan: str, devices: Any, **given: Any) -> Job:
    seen = int(given.pop("seen", width))
    data = torch.utils.data.TensorDataset(torch.randn(64, seen), torch.randn(64))
    of = {"steps": 4, "batch_size": 16, "loss": nn.MSELoss(), "optimizer": lambda p: torch.optim.Adam(p, lr=1e-3)}
    return Job(data=data, plan=plan, devices=devices, **{"model": Wide(width), **of, **given})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def of(text: str) -> None:
        monkeypatch.setattr(Cluster, "detect", staticmethod(lambda *which: Cluster.of(text)))

    return of


def test_what_is_said_stays() -> None:
    for plan in ("data=2", Plan(data=2)):
        job = asked(8, "auto", "cpu:2")
        job = type(job)(**{**vars(job), "plan": plan})
        assert auto.chosen(job) == (job, [])


def test_one_cpu_rank_has_nothing_to_choose() -> None:
    job = asked(8, "auto", "cpu:1")
    assert auto.chosen(job) == (job, [])


def test_small_models_are_copied() -> None:
    job, said = auto.chosen(asked(32, "auto microbatches=2", "cpu:4"))
    assert job.plan == Plan(data=4, microbatches=2)
    assert len(said) == 3
    assert "on each device" in said[1]
    assert "not searched for" in said[2]
    ran = meshfit.fit(**{k: v for k, v in vars(asked(32, "auto", "cpu:2")).items() if k in FIT})
    assert ran.history


FIT = ("model", "data", "plan", "devices", "loss", "optimizer", "steps")


def test_a_model_that_one_device_cannot_hold_is_cut(machine: Callable[[str], None]) -> None:
    machine("2x4xT4")
    devices = Devices("cuda", tuple(range(8)))
    job, said = auto.chosen(asked(8, "auto", devices, model=lambda: Wide(14000), seen=14000))
    plan = job.plan
    assert isinstance(plan, Plan)
    assert plan.devices == 8
    assert plan.shard > 1 or plan.pipeline > 1
    assert len(said) == 3
    assert said[0].startswith("auto: ")


def test_what_does_not_fit_is_not_started(machine: Callable[[str], None]) -> None:
    machine("1xT4")
    job = asked(8, "auto offload=none", Devices("cuda", (0,)), model=lambda: Wide(40000), seen=40000)
    with pytest.raises(PlanError, match=r"no plan of this training fits(.|\n)*of 1\d GiB"):
        auto.chosen(job)


def test_a_model_that_cannot_be_traced_is_copied(machine: Callable[[str], None]) -> None:
    machine("2xT4")

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean() * (1.0 if float(outputs.sum()) else 2.0)

    job, said = auto.chosen(asked(8, "auto", Devices("cuda", (0, 1)), loss=loss))
    assert job.plan == "auto"
    assert "no forecast" in said[0]
    assert job.settled().plan == Plan(data=2)
