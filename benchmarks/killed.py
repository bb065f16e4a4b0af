"""How long the others pause when a worker of a model server is killed: python benchmarks/killed.py

A worker (the first, which also evaluates and saves) gets SIGKILL in the middle of a training of three. The pause is the
longest time between two steps that the caller hears of, from the kill on; beside it the longest before. Workers tell
of their steps ten times a second.
"""

import os
import signal
import tempfile
import time
from itertools import pairwise
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.step import Step

PLANS = ("server=1 data=3 staleness=4", "server=1 data=3", "server=1 data=3 lost=average")
STEPS, AT, TIMES = 300, 100, 5


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))


def pauses(plan: str, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Seconds: the longest pause before the kill, and after it."""
    heard: list[float] = []
    killed: list[float] = []

    def watch(step: Step) -> None:
        heard.append(time.monotonic())
        if step.step >= AT and not killed:
            processes = [child for template in psutil.Process().children() for child in template.children()]
            os.kill(min(processes, key=lambda process: process.create_time()).pid, signal.SIGKILL)
            killed.append(time.monotonic())

    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3)}
    with tempfile.TemporaryDirectory() as out:
        how |= {"batch_size": 96, "steps": STEPS, "devices": "cpu", "progress": False, "callbacks": watch}
        meshfit.fit(build, (x, y), plan=plan, out=out, checkpoint="10 seconds", **how)
    gaps = [(later - earlier, later > killed[0]) for earlier, later in pairwise(heard)]
    return max(gap for gap, after in gaps if not after), max(gap for gap, after in gaps if after)


def main() -> None:
    x = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    y = x[:, :10].argmax(1)
    print(f"{'longest pause, s':32}{'before':>10}{'after a kill':>16}   median of {TIMES} (worst)")
    for plan in PLANS:
        found = [pauses(plan, x, y) for _ in range(TIMES)]
        before, after = (sorted(column) for column in zip(*found, strict=True))
        print(f"{plan:32}{before[TIMES // 2]:10.2f}{after[TIMES // 2]:10.2f} ({after[-1]:.2f})")


if __name__ == "__main__":
    main()
