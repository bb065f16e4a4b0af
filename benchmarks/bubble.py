"""How long do the ranks of a pipeline wait, and is that what the formula says?

    python benchmarks/bubble.py
    python benchmarks/bubble.py --ranks 2,4,8 --pictures docs/pictures --json bubble.json
    python benchmarks/bubble.py --schedules 1f1b,zbv --microbatches 8,16

A stack of equal layers, real arithmetic, one thread a rank. Every layer passes on a gradient, the first too, so that
stages take equal time. Measured: the share of the time from the first action of a step to the last in which a rank
computes nothing, in the median of some steps; expected: (p - 1) / (m + p - 1) with p ranks and m microbatches. Goal:
within 5 points. Cores are not equally fast: what the schedule would wait with the times that its stages really took
stands beside it. And how many samples a second ``1f1b`` with 8 microbatches trains, against ``sequential``: at least
1.6 times on two ranks. LocalRanks without a core of their own share one: such sizes are left out, unless asked for.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gantt import ActionTimes, gantt
from meshfit.axes.pipeline.staged import Staged
from meshfit.axes.pipeline.stages import Pipeline
from meshfit.axes.precision import Precision
from meshfit.comm.transport import Transport
from meshfit.data.loader import Batch, Microbatch
from meshfit.errors import PlanError
from meshfit.exchange.across import Across
from meshfit.exchange.allreduce import AllReduce
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World, cores
from meshfit.loss.objective import LossDenominator, Objective
from meshfit.passes.loss_sum import LossSum
from meshfit.passes.pipeline import LocalStages, Pipelined
from meshfit.schedule.issue import pairs
from meshfit.schedule.simulate import Simulated, simulate

POINTS, RATIO = 5.0, 1.6
MICROBATCHES = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")


def formula(word: str, ranks: int, microbatches: int, chunks: int = 1) -> float | None:
    """The idle share as textbooks give it; None where there is no such formula."""
    if word == "sequential":
        return (ranks - 1) / ranks
    if word in ("gpipe", "1f1b", "interleaved"):
        return (ranks - 1) / (chunks * microbatches + ranks - 1)
    return None


class Stack(nn.Module):
    """Equal layers; a scale before the first, so that it too has a gradient to pass on."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a microbatch takes: some 15 ms a stage, forward, on one core. Much less, and what is measured is Python."""

    layers: int = 6
    """On each rank."""
    width: int = 512
    samples: int = 256


@dataclass
class Measured:
    ranks: int
    schedule: str
    microbatches: int
    idle: float
    """Share of the time, in the median of the steps."""
    expected: float
    """By the formula; where there is none, simulated."""
    uneven: float
    """Simulated with the times that each stage took: what is beyond it is the runner's own."""
    samples_per_second: float


def measure(world: World, word: str, microbatches: int, size: Size, steps: int) -> tuple[float, float, Simulated]:
    """(idle share, seconds a step, the step nearest to the median) of a pipeline over all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipeline = Pipeline(degree=world.size, word=word, microbatches=microbatches)
    model, objective = Stack(size.layers * world.size, size.width), Objective(F.mse_loss)
    x = torch.randn(size.samples, size.width)
    names = tuple(f"layers.{i}" for i in range(0, len(model.layers), len(model.layers) // pipeline.stages))[1:]
    pipeline = Pipeline(degree=world.size, word=word, microbatches=microbatches, cut=names)
    group = dist.group.WORLD
    assert group is not None
    where = pipeline.find(model, objective, (x[:4], x[:4]), device="cpu")
    staged = Staged.of(pipeline, model, where, world.rank, group)
    exchange = Across(
        AllReduce(staged.model.parameters(), None, CPU),
        [staged],
        staged.model,
        CPU,
        loss_replicas=1,
    )
    transport = Transport(group, CPU, pairs(pipeline.schedule))
    stages = LocalStages(staged, objective, Precision(), CPU, transport)
    run = Pipelined(stages, LossSum(LossDenominator(), exchange))
    parts = [Microbatch((x, x), size.samples) for _ in range(microbatches)]
    batch = Batch(0, 0, np.arange(size.samples * microbatches), False, parts)
    times, found = ActionTimes(run), list[tuple[float, float, Simulated]]()
    for _ in range(2 + steps):
        dist.barrier()
        start = time.perf_counter()
        run(batch)
        exchange.finish()
        exchange.clear()
        seconds = time.perf_counter() - start
        timed = times.together(group)
        found.append((timed.bubble, seconds, timed))
    found = found[2:]
    idle, seconds = statistics.median(one[0] for one in found), statistics.median(one[1] for one in found)
    return idle, seconds, min(found, key=lambda one: abs(one[0] - idle))[2]


def _pin(world: World) -> None:
    """A core for each rank, far from each other: neighbours may be two threads of one."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) >= world.size:
            os.sched_setaffinity(0, {allowed[world.rank * (len(allowed) // world.size)]})


def on_ranks(ranks: int, cells: list[tuple[str, int]], size: Size, steps: int) -> list[tuple[float, float, Simulated]]:
    def work(world: World, channel: Any) -> None:
        _pin(world)
        for word, microbatches in cells:
            got = measure(world, word, microbatches, size, steps)
            if world.rank == 0:
                channel.send(got)

    with LocalRanks(work, size=ranks, devices=Devices("cpu", None)) as running:
        return [message for _, message in running.messages(600) if isinstance(message, tuple)]


def ideal_of(timed: Simulated, *, by_stage: bool = False) -> Simulated:
    """The same schedule, if every action of a kind took its usual time (on its own stage) and transfers took none."""
    key = lambda action: (action.kind, action.stage if by_stage else 0)
    takes: dict[tuple[str, int], list[float]] = {}
    for spans in timed.spans:
        for span in spans:
            takes.setdefault(key(span.action), []).append(span.end - span.start)
    usual = {kind: statistics.median(many) for kind, many in takes.items()}
    return simulate(timed.schedule, lambda action: usual[key(action)])


def picture(timed: Simulated) -> str:
    plan = timed.schedule
    ideal = ideal_of(timed)
    return gantt(
        f"{plan.word}: {plan.ranks} ranks, {plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}",
        ("ideal", ideal),
        ("measured", timed),
        note="One step of training, from the first forward to the last backward. Equal stages, one core a rank.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", help="numbers of ranks; default: 2, 4 and 8, as far as there are cores")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--microbatches", default=",".join(map(str, MICROBATCHES)))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--samples", type=int, default=Size.samples, help="in a microbatch")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sizes = [int(n) for n in asked.ranks.split(",")] if asked.ranks else [n for n in (2, 4, 8) if n <= cores()] or [2]
    size, measured = Size(width=asked.width, samples=asked.samples), []
    console, good = Console(), True
    for ranks in sizes:
        cells = _cells(asked.schedules.split(","), [int(m) for m in asked.microbatches.split(",")], ranks)
        results = on_ranks(ranks, cells, size, asked.steps)
        rows = []
        for (word, microbatches), (idle, seconds, timed) in zip(cells, results, strict=True):
            known = formula(word, ranks, microbatches, timed.schedule.chunks)
            expected = simulate(timed.schedule).bubble if known is None else known
            rate = size.samples * microbatches / seconds
            uneven = ideal_of(timed, by_stage=True).bubble
            rows.append(Measured(ranks, word, microbatches, idle, expected, uneven, rate))
            if asked.pictures:
                asked.pictures.mkdir(parents=True, exist_ok=True)
                (asked.pictures / f"{word}-{ranks}-ranks-{microbatches}.svg").write_text(picture(timed))
        good &= _show(console, rows)
        measured += rows
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in measured], indent=2))
    sys.exit(0 if good else 1)


def _cells(words: list[str], microbatches: list[int], ranks: int) -> list[tuple[str, int]]:
    """What is measured: every schedule with the microbatches it can take, and the two that are compared."""
    found = [("sequential", 8), ("1f1b", 8)]
    for word in words:
        for m in microbatches:
            try:
                Pipeline(degree=ranks, word=word, microbatches=m).schedule  # noqa: B018
            except PlanError:
                continue
            if (word, m) not in found and not (word == "1f1b" and m < ranks):  # nothing but gpipe
                found.append((word, m))
    return found


def _show(console: Console, rows: list[Measured]) -> bool:
    table = Table(title=f"{rows[0].ranks} ranks")
    for name in ("schedule", "microbatches", "idle", "expected", "apart", "with its times", "samples/s"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    good = True
    for row in sorted(rows, key=lambda row: (row.schedule, row.microbatches)):
        apart = 100 * (row.idle - row.expected)
        good &= abs(apart) <= POINTS
        said = f"{apart:+.1f} points" + ("" if abs(apart) <= POINTS else " !")
        table.add_row(
            row.schedule,
            str(row.microbatches),
            f"{row.idle:.1%}",
            f"{row.expected:.1%}",
            said,
            f"{row.uneven:.1%}",
            f"{row.samples_per_second:,.0f}",
        )
    console.print(table)
    rate = {(row.schedule, row.microbatches): row.samples_per_second for row in rows}
    ratio = rate["1f1b", 8] / rate["sequential", 8]
    console.print(f"1f1b with 8 microbatches against sequential: {ratio:.2f} times the samples a second (goal {RATIO})")
    return good and ratio >= RATIO


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    main()
