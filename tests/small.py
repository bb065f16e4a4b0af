"""A training that takes a second: what the exchanges are tried on."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshfit

X = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
SCHEDULED = {
    "clip": 0.5,
    "ema": 0.9,
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "valid": (X, Y),
    "valid_every": 4,
}


def slowly(outputs: Tensor, targets: Tensor) -> Tensor:
    time.sleep(0.01)
    return F.cross_entropy(outputs, targets)


def fit(plan: str, **how: Any) -> meshfit.Result:
    """Batches of 12 of 50 samples: uneven shares, and a last batch of 2."""
    defaults = {
        "data": (X, Y),
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch_size": 12,
        "steps": 12,
        "devices": "cpu",
        "seed": 3,
        "progress": False,
    }
    return meshfit.fit(**(defaults | how), plan=plan)


def losses(result: meshfit.Result) -> list[float]:
    return [step.loss for step in result.history]


def assert_same(got: meshfit.Result, want: meshfit.Result, limit: float = 1e-5) -> None:
    theirs = want.model.state_dict()
    for name, tensor in got.model.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=limit, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_training(got: meshfit.Result, want: meshfit.Result) -> None:
    """Step by step, and in the end."""
    assert losses(got) == pytest.approx(losses(want), rel=1e-5)
    assert [s.lr for s in got.history] == pytest.approx([s.lr for s in want.history])
    assert [s.grad_norm for s in got.history] == pytest.approx([s.grad_norm for s in want.history], rel=1e-4)
    assert [s.samples for s in got.history] == [s.samples for s in want.history]
    assert [s.valid and pytest.approx(s.valid, rel=1e-5) for s in got.history] == [s.valid for s in want.history]
    assert_same(got, want)
