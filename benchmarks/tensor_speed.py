"""How fast is one operation over several devices?

    python benchmarks/tensor_speed.py                  # on a machine with 8 or more cores
    python benchmarks/tensor_speed.py --degrees 2 --turns 5

A wide MLP and two GPT blocks, forward, backward and an SGD step, on CPU ranks of one thread each:

    alone       one rank, while the others rest
    meshfit     ``tensor=n``: the split is found, nobody wrote it
    by hand     torch's ``parallelize_module`` with the same split, column then row, written for these classes
    formula     the time alone / n, plus the measured time of as many all-reduces of as many bytes

The loops take turns within one world, and each turn's times are compared with each other: ratios hold on a noisy
machine. The losses of all three are compared too.
"""

import argparse
import statistics
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look things up under the name benchmarks.tensor_speed

from meshfit.axes.tensor.cut import split_model
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World

DEVICES = Devices("cpu", None)
GOAL = 0.97


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head = width // heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@dataclass(frozen=True, kw_only=True)
class Subject:
    name: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, int, int]
    """Of the activations: samples, positions, width."""


SUBJECTS = (
    Subject(
        name="wide MLP, 2 x 1024 to 8192",
        build=lambda: nn.Sequential(MLP(1024, 8192), MLP(1024, 8192)),
        shape=(4, 128, 1024),
    ),
    Subject(
        name="GPT block, 2 x width 1024",
        build=lambda: nn.Sequential(*(part for _ in range(2) for part in (Attention(1024, 16), MLP(1024, 4096)))),
        shape=(4, 128, 1024),
    ),
)


def by_hand(model: nn.Sequential, degree: int) -> nn.Module:
    """What a user of torch writes."""
    mesh = init_device_mesh("cpu", (degree,))
    columns = {nn.Module: (), MLP: ("up",), Attention: ("q", "k", "v")}
    rows = {MLP: ("down",), Attention: ("out",)}
    for part in model:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns[type(part)]}
        plan |= {name: RowwiseParallel() for name in rows[type(part)]}
        parallelize_module(part, mesh, plan)
    return model


def by_meshfit(model: nn.Sequential, inputs: Tensor, degree: int) -> nn.Module:
    plan: list[Any] = [None]
    if dist.get_rank() == 0:
        few = inputs[:1, :8]
        plan = [plan_tensor(model, lambda twin: twin(few).square().mean(), degree)]
    dist.broadcast_object_list(plan)
    assert dist.group.WORLD is not None
    split_model(model, plan[0], dist.group.WORLD)
    return model


@dataclass
class Loop:
    model: nn.Module
    inputs: Tensor

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self) -> float:
        loss = self.model(self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def built(subject: Subject) -> nn.Sequential:
    torch.manual_seed(0)
    return subject.build()


def timed(work: Callable[[], Any], times: int) -> tuple[float, Any]:
    dist.barrier()
    start = time.perf_counter()
    results = [work() for _ in range(times)]
    dist.barrier()
    return (time.perf_counter() - start) / times, results[-1]


def measure(world: World, name: str, turns: int, steps: int) -> dict[str, Any]:
    """In every rank: seconds a step of each loop, by turn; rank 0's are used."""
    torch.set_num_threads(1)
    subject = next(subject for subject in SUBJECTS if subject.name == name)
    inputs = torch.randn(subject.shape, generator=torch.Generator().manual_seed(1))
    alone = Loop(built(subject), inputs) if world.rank == 0 else None
    loops = {
        "meshfit": Loop(by_meshfit(built(subject), inputs, world.size), inputs),
        "by hand": Loop(by_hand(built(subject), world.size), inputs),
    }
    message = torch.zeros(subject.shape)
    reduces = 2 * len(built(subject))  # one forward and one backward, each part
    seconds: dict[str, list[float]] = {key: [] for key in ("alone", "all-reduces", *loops)}
    losses: dict[str, float] = {}
    for turn in range(-2, turns):
        took = {"alone": timed(alone.step if alone else lambda: None, steps)}
        took["all-reduces"] = timed(lambda: [dist.all_reduce(message) for _ in range(reduces)], steps)
        for key in ("meshfit", "by hand") if turn % 2 else ("by hand", "meshfit"):
            took[key] = timed(loops[key].step, steps)
        for key, (each, result) in took.items():
            if turn >= 0:
                seconds[key].append(each)
            losses[key] = result
    return {"seconds": seconds, "losses": losses}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--degrees", default="2,4")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    options = parser.parse_args()
    table = Table("model", "tensor", "ms alone", "ms", "speed-up", "by formula", "of the formula", "beside by hand")
    good = True
    for subject in SUBJECTS:
        for degree in map(int, options.degrees.split(",")):
            work = lambda world, _: measure(world, subject.name, options.turns, options.steps)  # noqa: B023
            with LocalRanks(work, size=degree, devices=DEVICES) as ranks:
                found = ranks.results[0]
            seconds, losses = found["seconds"], found["losses"]
            of = {key: statistics.median(each) for key, each in seconds.items()}
            best = of["alone"] / degree + of["all-reduces"]
            hand = statistics.median(b / a for a, b in zip(seconds["meshfit"], seconds["by hand"], strict=True))
            equal = max(abs(losses[key] - losses["alone"]) for key in ("meshfit", "by hand")) <= 1e-5 * losses["alone"]
            good &= equal and hand >= GOAL
            table.add_row(
                subject.name,
                str(degree),
                f"{1e3 * of['alone']:.1f}",
                f"{1e3 * of['meshfit']:.1f}",
                f"{of['alone'] / of['meshfit']:.2f}",
                f"{of['alone'] / best:.2f}",
                f"{best / of['meshfit']:.2f}",
                f"{hand:.2f}" if equal else f"[red]{losses}[/red]",
            )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    console.print(f"beside by hand: speed over that of parallelize_module; the goal is {GOAL} or more", highlight=False)
    return 0 if good else 1


if __name__ == "__main__":
    from benchmarks import tensor_speed  # all processes find its functions under this name

    sys.exit(tensor_speed.main())
