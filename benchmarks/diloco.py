"""A small GPT on tiny Shakespeare: all-reduce, local steps and DiLoCo at equal samples, with what each has to send.

    python benchmarks/diloco.py --data tinyshakespeare.txt [--steps 1200] [--every 32] [--workers 2] [--only diloco]

Every way sees the same batches: in each step every worker takes its share. All use the same AdamW, learning rate and
schedule; DiLoCo's outer optimizer is what ``exchange=diloco`` has, unless told otherwise. The last tenth of the text is
kept for the final loss, of the averaged weights. Exits with 1 if DiLoCo's is more than 2 % above that of all-reduce.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.traffic import counted
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.local import Local, Outer
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.update import Update
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World

LENGTH, BATCH = 64, 32
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.two(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, layers: int = 3):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def read(path: str) -> tuple[Tensor, Tensor, int]:
    """Characters as numbers: to train on, to test on, and how many kinds there are."""
    text = Path(path).read_text()
    kinds = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([kinds[c] for c in text])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(kinds)


def loss_of(model: nn.Module, ids: Tensor, starts: Tensor) -> Tensor:
    rows = ids[starts[:, None] + torch.arange(LENGTH + 1)]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@dataclass(frozen=True)
class Way:
    name: str
    make: Callable[[nn.Module], Any]


def ways(every: int, outer: Outer) -> list[Way]:
    world = lambda: dist.group.WORLD
    local = lambda **how: lambda model: Local(model, world(), CPU, every=every, **how)
    return [
        Way("all-reduce", lambda model: AllReduce(model.parameters(), world(), CPU)),
        Way(f"exchange=local every={every}", local()),
        Way(f"exchange=diloco every={every}", local(outer=outer)),
        Way(f"exchange=diloco every={every} overlap=1", local(outer=outer, overlap=1)),
    ]


@dataclass(frozen=True)
class Work:
    way: Way
    path: str
    steps: int
    lr: float

    def __call__(self, world: World, channel: Any) -> tuple[float, int, float]:
        """Final loss, bytes given to all_reduce, seconds."""
        torch.set_num_threads(1)
        train, test, vocabulary = read(self.path)
        torch.manual_seed(0)
        model = GPT(vocabulary)
        exchange = self.way.make(model)
        update = Update(torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.99)), clip=1.0)
        draw, own = torch.Generator().manual_seed(1), BATCH // world.size
        began = time.perf_counter()

        def run() -> None:
            for step in range(self.steps):
                warm, rest = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / self.steps))
                update.optimizers[0].param_groups[0]["lr"] = self.lr * warm * (0.1 + 0.9 * rest)
                starts = torch.randint(len(train) - LENGTH - 1, (BATCH,), generator=draw)
                mine = starts[world.rank * own : (world.rank + 1) * own]
                loss = loss_of(model, train, mine) / world.size
                exchange.arm(StepScalars(loss.item(), float(own)))
                loss.backward()
                scalars = exchange.finish()
                correction = 1.0 if isinstance(exchange, AllReduce) else world.size
                update(exchange.gradients, scalars.loss, correction, exchange.norm)
                exchange.clear()
            if isinstance(exchange, Local):
                exchange.settle()

        moved = counted(run)
        seconds = time.perf_counter() - began
        with torch.no_grad():
            starts = torch.arange(0, len(test) - LENGTH - 1, LENGTH)
            final = sum(loss_of(model, test, some).item() * len(some) for some in starts.split(256)) / len(starts)
        return final, moved, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", required=True, help="a text file")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW, at its highest")
    parser.add_argument("--outer-lr", type=float, default=Outer().lr)
    parser.add_argument("--outer-momentum", type=float, default=Outer().momentum)
    parser.add_argument("--only", default="", help="besides all-reduce, the ways whose names end so")
    asked = parser.parse_args()

    outer = Outer(lr=asked.outer_lr, momentum=asked.outer_momentum)
    trained = f"{asked.workers} workers, {asked.steps} steps of {BATCH} x {LENGTH} characters, AdamW lr {asked.lr}"
    table = Table(title=f"{trained}; outer lr {outer.lr}, momentum {outer.momentum}")
    for column in ("", "final loss", "beside all-reduce", "MB to all_reduce a worker", "of all-reduce", "seconds"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    results: dict[str, tuple[float, int, float]] = {}
    for way in ways(asked.every, outer):
        if way.name != "all-reduce" and not way.name.endswith(asked.only):
            continue
        work = Work(way, str(Path(asked.data).resolve()), asked.steps, asked.lr)
        with LocalRanks(work, size=asked.workers, devices=Devices("cpu", None)) as ranks:
            final, moved, seconds = results[way.name] = ranks.results[0]
        print(f"{way.name}: loss {final:.4f}, {moved / 1e6:.1f} MB, {seconds:.0f} s", file=sys.stderr, flush=True)
        first = results["all-reduce"]
        beside = f"{100 * (final / first[0] - 1):+.2f} %"
        table.add_row(
            way.name, f"{final:.4f}", beside, f"{moved / 1e6:.1f}", f"{moved / first[1]:.4f}", f"{seconds:.0f}"
        )
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)
    diloco = results.get(f"exchange=diloco every={asked.every}")
    return int(diloco is not None and diloco[0] > 1.02 * results["all-reduce"][0])


if __name__ == "__main__":
    sys.exit(main())
