"""On a GPU: how often the host waits for it in a training step, under plans of one device; of several ranks that is
counted by benchmarks/syncs.py. Which waits there are, and why: docs/waits.md."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.transfer import HostCopy, together, upload
from tests.sync_count import counted

WIDTH, CLASSES, LENGTH, FIRST, LAST = 32, 16, 8, 4, 8
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum"), (targets >= 0).sum()


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of the whole batch: it is no mean over samples."""
    same = (targets[:, None] == targets[None]).float()
    return -((outputs @ outputs.T).log_softmax(1) * same).sum(1).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def waits(*, verb: str = "callbacks", model: Any = Words, **asked: Any) -> Counter[str]:
    """Of steps in the middle of a training."""
    ids = torch.randint(0, CLASSES, (64, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[:, :2] = -100
    data = (ids[:, :-1], targets) if model is Words else (torch.randn(64, WIDTH), ids[:, 0])
    given: dict[str, Any] = {"loss": mean, "optimizer": adamw, "batch_size": 8, "steps": LAST + 2, "devices": "cuda:0"}
    given |= {"plan": "compile=none", **asked}
    counting, found = counted(), Counter()

    def each(step: meshfit.Step) -> None:
        nonlocal found
        if step.step == FIRST:
            found = counting.__enter__()
        if step.step == LAST:
            counting.__exit__(None, None, None)

    if verb == "steps":
        for step in meshfit.steps(model(), data, **given):
            each(step)
    else:
        meshfit.fit(model(), data, progress=False, **{verb: each}, **given)
    return found


@gpu
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"verb": "each_step"},
        {"verb": "steps"},
        {"clip": 1.0},
        {"loss": pair},
        {"ema": 0.9},
        {"on_nan": "skip"},
        {"scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "clip": 1.0},
        {"plan": "precision=bf16 compile=none", "clip": 1.0},
        {"plan": "precision=fp16 compile=none", "clip": 1.0},
        {"plan": "microbatches=2 compile=none", "clip": 1.0},
        {"plan": "microbatches=2 compile=none", "loss": pair},
        {"plan": "recompute=full compile=none"},
        {"plan": "offload=optimizer compile=none", "clip": 1.0},
        {"plan": "compile=whole precision=bf16"},
        {"model": normed},
        {"model": normed, "plan": "microbatches=2 compile=none"},
        {"model": normed, "plan": "microbatches=2 compile=none", "loss": contrast},
    ],
    ids=lambda asked: " ".join(f"{word}={getattr(value, '__name__', value)}" for word, value in asked.items()),
)
def test_no_step_waits(asked: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it compiles
        assert waits(**asked) == {}


@gpu
def test_an_optimizer_without_a_fused_kernel_waits_once_a_step() -> None:
    found = waits(optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3), clip=1.0)
    assert all("exchange/update.py" in where for where in found)
    assert 0 < sum(found.values()) <= LAST - FIRST + 1


@gpu
def test_what_waits_is_seen() -> None:
    """The test of the test: a step function that reads a number."""
    step = lambda model, batch: mean(model(batch[0]), batch[1]) * (batch[1].float().mean().item() > -1e9)
    assert sum(waits(loss=None, step=step).values()) >= LAST - FIRST


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_numbers_arrive(device: str) -> None:
    where = torch.device(device)
    there = torch.full((), 2.5, device=where)
    found = together([1.0, there, True], where, torch.float64)
    assert found.device.type == device
    assert HostCopy(found).tolist() == [1.0, 2.5, 1.0]
    assert HostCopy(upload([3, 4], where)).tolist() == [3, 4]
