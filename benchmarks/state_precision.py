"""Weights and optimizer states in lower precision: the loss of a small GPT beside fp32, and what a rank holds.

    python benchmarks/state_precision.py [--steps 300] [--devices cpu] [--width 64] [--blocks 2]

The text is this repository's own documentation, byte by byte. Every row trains the same model on the same batches, on
one device; *loss* is the mean of the last tenth of the steps. *nearest* is what stochastic rounding is for: the same
weights and states rounded to the nearest number of bf16 after each step. Rows of libraries that are not installed are
left out. On a GPU the time of a step is of interest too: ``--devices cuda --width 2048 --blocks 8``.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshfit
from benchmarks.optimizers import Block

TOKENS, BATCH = 64, 16


class Bytes(nn.Module):
    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(outputs: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Nearest(torch.optim.AdamW):
    """AdamW whose weights and states are rounded to the nearest number of bf16 after each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                for tensor in (p, self.state[p].get("exp_avg"), self.state[p].get("exp_avg_sq")):
                    if tensor is not None and p.dim() > 1:
                        tensor.copy_(tensor.bfloat16())


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def ways() -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {
        "fp32": ("precision=fp32", adamw),
        "bf16 arithmetic, fp32 weights": ("precision=bf16", adamw),
        "bf16 weights": ("precision=bf16-true", adamw),
        "bf16 weights and states": ("precision=bf16-true states=bf16", adamw),
        "bf16 states": ("states=bf16", adamw),
        "linear layers in fp8": ("precision=fp8", adamw),
        "bf16 weights and states, nearest": ("precision=bf16", lambda params: Nearest(params, lr=3e-3)),
    }
    try:
        import bitsandbytes

        found["8-bit states, bitsandbytes"] = "precision=fp32", lambda ps: bitsandbytes.optim.AdamW8bit(ps, lr=3e-3)
    except ImportError:
        pass
    return found


def text() -> Tensor:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    every = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
    rows = len(every) // TOKENS
    return every[: rows * TOKENS].view(rows, TOKENS).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    asked = parser.parse_args()
    ids, console = text(), Console()
    rows = Table("way", "plan", "loss", "beside fp32", "ms a step")
    first = 0.0
    for name, (plan, optimizer) in ways().items():
        torch.manual_seed(0)
        model, began = Bytes(asked.width, asked.blocks), time.perf_counter()
        how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "batch_size": BATCH, "steps": asked.steps}
        result = meshfit.fit(model, (ids, ids), plan=plan, devices=asked.devices, progress=False, clip=1.0, **how)
        last = [step.loss for step in result.history][-max(1, asked.steps // 10) :]
        mean, took = sum(last) / len(last), (time.perf_counter() - began) / asked.steps
        first = first or mean
        rows.add_row(name, plan, f"{mean:.4f}", f"{mean / first - 1:+.2%}", f"{1000 * took:.1f}")
        console.print(name, f"{mean:.4f}")
    console.print(rows)


if __name__ == "__main__":
    main()
