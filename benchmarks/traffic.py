"""Bytes that each strategy moves, a step and worker: counted while it trains, by ``cost()``, and by the textbook.

    python benchmarks/traffic.py [--width 256]

*moved* is what the first rank hands to the transport, collective by collective, counted while it trains; *cost()* what
the plan says it would be, from a trace alone: the two must be equal. *of P* is that beside the bytes of the weights.
*textbook* is what one device sends over a network for P bytes of weights, A bytes of one activation and n devices: a
ring moves 2(n-1)/n of what is summed, (n-1)/n of what is gathered or scattered; a server gets P and sends P. Exits with
1 if moved and cost() differ anywhere.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.collectives import Collectives
from meshfit.anatomy.trace import Trace
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.shard.units import traced
from meshfit.drive import begin
from meshfit.job import Job
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from meshfit.run import Run
from meshfit.server.coordination import ServerCoordination

STEPS, EVERY, SAMPLES = 17, 8, 12
"""Steps are counted from the first to the last: a multiple of EVERY between them."""


@dataclass(frozen=True)
class Way:
    """A plan, and what the textbook says of it."""

    plan: str
    words: str
    textbook: Callable[[float, float, int], float]
    """Of P, A and n: bytes that one device sends, and for a server receives, a step."""


WAYS = (
    Way("data=3", "2P(n-1)/n", lambda p, a, n: 2 * p * (n - 1) / n),
    Way("server=1 data=3", "P up + P down", lambda p, a, n: 2 * p),
    Way("server=2 data=3", "P up + P down", lambda p, a, n: 2 * p),
    Way("server=1 data=3 compress=bf16", "P/2 up + P down", lambda p, a, n: 1.5 * p),
    Way("server=1 data=3 compress=int8", "P/4 up + P down", lambda p, a, n: 1.25 * p),
    Way("server=1 data=3 staleness=2", "P up + P down", lambda p, a, n: 2 * p),
    Way("server=1 data=2 tensor=2", "P/2 up, P/2 down, A a pair", lambda p, a, n: p + 2 * 2 * a / 2),
    Way("server=1 data=2 shard=2", "P/2 up, P/2 down, 3P/2", lambda p, a, n: 2.5 * p),
    Way("server=1 data=2 pipeline=2 microbatches=2", "P/2 up, P/2 down, A/2", lambda p, a, n: p + a / 2),
    Way(f"data=3 exchange=local every={EVERY}", "2P(n-1)/n / h", lambda p, a, n: 2 * p * (n - 1) / n / EVERY),
    Way(f"data=3 exchange=diloco every={EVERY}", "2P(n-1)/n / h", lambda p, a, n: 2 * p * (n - 1) / n / EVERY),
    Way("shard=3", "3P(n-1)/n", lambda p, a, n: 3 * p * (n - 1) / n),
    Way("shard=3 zero=1", "2P(n-1)/n", lambda p, a, n: 2 * p * (n - 1) / n),
    Way("tensor=2", "2A a pair, 2(n-1)/n each", lambda p, a, n: 2 * 2 * a * 2 * (n - 1) / n),
    Way("pipeline=2 microbatches=2", "A a cut", lambda p, a, n: a),
)


class Block(nn.Module):
    """Two layers that belong together: one is cut by its columns, the other by its rows."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@dataclass(frozen=True)
class Net:
    width: int

    def __call__(self) -> nn.Module:
        return nn.Sequential(Block(self.width), Block(self.width))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


@dataclass(frozen=True)
class Count:
    """Looks into a run: what it moves from the first step's update to the last's."""

    width: int

    def __call__(self, run: Run) -> None:
        seen, at = Collectives(), Counter[str]()
        seen.__enter__()

        def moved() -> Counter[str]:
            served = {name: run.events.traffic.get(name, (0, 0))[1] for name in ("push", "pull")}
            return seen.moved + Counter(served)

        def stepped(correction: Any) -> None:
            if not at:
                at.update({"": 1} | moved())
                steps.append(0)
            last.clear()
            last.update(moved())
            steps[0] += 1

        def ended() -> None:
            seen.__exit__(None, None, None)
            run.captured["moved"] = sum((last - at).values()) / (steps[0] - 1)
            state = sum(
                t.nbytes for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
            )
            run.captured["state"] = state
            run.captured["cost"] = foretold(run, Net(self.width)().train())

        last, steps = Counter[str](), []
        run.tap, run.at_end = stepped, ended


def foretold(run: Run, model: nn.Module) -> int:
    job, plan = run.job, run.plan
    served = isinstance(run.coordination, ServerCoordination)
    loader = run.coordination.loader(run.exchange.share) if served else run.loader
    content = next(iter(loader.epoch(0))).microbatches[0].content
    if plan.pipeline > 1:
        trace = pipeline_of(plan).find(model, job.objective, content, device="cpu").trace
    else:
        trace = traced(model, job.objective, content, device="cpu")
    assert isinstance(trace, Trace), trace
    found = cost(plan, trace, torch.optim.AdamW(model.parameters()), found=run.placed.found, place=run.mesh.place)
    return sum(found.moved.values())


def trained(way: Way, width: int) -> dict[str, Any]:
    data = torch.randn(SAMPLES, width), torch.randn(SAMPLES, width)
    job = Job(
        model=Net(width),
        data=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=SAMPLES,
        steps=STEPS * (Plan.parse(way.plan).data if "staleness" in way.plan else 1),
        plan=way.plan,
        devices="cpu",
    ).training()
    training = begin(job, lockstep=False, tap=Count(width))
    for _ in training:
        pass
    assert training.outcome is not None
    return training.outcome.captured


def counted(act: Callable[[], None]) -> int:
    """Bytes given to all_reduce while ``act`` runs."""
    moved, plain = [0], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved[0] += tensor.numel() * tensor.element_size()
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        act()
    finally:
        dist.all_reduce = plain
    return moved[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--plans", help="only those that contain this")
    asked = parser.parse_args()
    size = sum(p.nbytes for p in Net(asked.width)().parameters())
    activation = SAMPLES * asked.width * 4
    table = Table(title=f"bytes a step and worker; P = {size:,}, A = {activation:,}, h = {EVERY}")
    for column in ("plan", "moved", "cost()", "of P", "textbook, on the wire", "bytes", "optimizer state"):
        left = column in ("plan", "textbook, on the wire")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    good = True
    for way in WAYS:
        if asked.plans and asked.plans not in way.plan:
            continue
        found = trained(way, asked.width)
        moved, said = found["moved"], found["cost"]
        good &= moved == said
        told = f"{said:,.0f}" if moved == said else f"[red]{said:,.0f}[/red]"
        wire = way.textbook(size, activation, Plan.parse(way.plan).devices)
        table.add_row(
            way.plan,
            f"{moved:,.0f}",
            told,
            f"{moved / size:.3f}",
            way.words,
            f"{wire:,.0f}",
            f"{found['state'] / size:.2f} P",
        )
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
