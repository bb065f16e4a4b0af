"""A rank that runs out of memory says what it held beside what was predicted, and what would fit."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit import Plan
from meshfit.errors import RankError
from meshfit.units import size
from tests import command

WIDE, DEEP, SAMPLES = 256, 12, 8192
ROOM = 60 << 20
"""Bytes beside what the process has when it begins to train: weights and their kin are 12 MiB, activations 200."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Limited(nn.Module):
    """Allows itself so much memory, once it trains in earnest, in the process that it is in."""

    def __init__(self, room: int):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(DEEP)))
        self.room = room

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.room and x.device.type != "meta" and len(x) >= SAMPLES // 2:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + self.room, resource.RLIM_INFINITY))
        return self.layers(x)


def fit(plan: str, **how: Any) -> Any:
    model, data = Limited(ROOM), (torch.zeros(SAMPLES, WIDE), torch.zeros(SAMPLES, WIDE))
    how = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.AdamW(p), "devices": "cpu", "steps": 2, **how}
    return meshfit.fit(model, data, batch_size=SAMPLES, plan=plan, **how)


def test_the_error_compares_and_says_what_would_fit() -> None:
    with pytest.raises(RankError, match="ran out of memory") as found:
        fit("data=2")
    said = str(found.value)
    weights = sum(p.nbytes for p in Limited(0).parameters())
    rows = {line.split()[0]: line.split()[1:] for line in found.value.facts if line.strip()}
    assert rows["weights"] == [*size(weights).split(), *size(weights).split()]
    assert rows["optimizer"][2:] == ["0", "B"]  # it died in the first step
    assert rows["under"][0] == "data=2,"
    remedy = next(line for line in found.value.facts if "is predicted to need" in line)
    told = next(line for line in found.value.facts if line.startswith("plan="))
    plan = Plan.parse(told.removeprefix("plan=").strip('"'))
    assert plan.microbatches > 1 or plan.recompute != "none", said
    assert "MiB" in remedy
    assert "line" in found.value.trace


ALONE = """
from tests.test_out_of_memory import fit
try:
    fit("data=1")
except RuntimeError as error:
    print(type(error).__name__, error, *error.__notes__, sep="\\n")
"""


def test_in_one_process_it_is_a_note_of_the_same_exception() -> None:
    """In a process of its own: one that has run other tests may have kept enough memory."""
    done = command.run("-c", ALONE)
    kind, said, *note = done.stdout.splitlines()
    assert kind == "RuntimeError", done.stderr
    assert "allocate memory" in said
    assert any("predicted" in line for line in note)
    assert any('plan="' in line for line in note)
