"""How fast are two towers on two devices, and do both work at once?

    python benchmarks/branch_speed.py
    python benchmarks/branch_speed.py --turns 10 --picture docs/pictures/branch.svg

A model of two equal towers (transformer blocks; images and texts as vectors) under a contrastive loss, with AdamW, on
CPU ranks of one thread each. ``branch=2`` and one device take turns within one world: on a busy machine, ratios hold.

    wall         seconds of a step, on one device over those in branches. Needs a free core for each rank
    processor    the same by processor time, of the rank that works longest: what a machine to itself would show
    overlap      of the time in which a rank works on its own branches, the share in which the other does so too

Exits with 1 below a speed-up of 1.7 by processor time, or if a rank holds more than 0.55 of the parameters.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look things up under the name benchmarks.branch_speed

from meshfit import events
from meshfit.job import Job
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.observe.reading import RecordedRun, RecordedSpan, read
from meshfit.observe.timeline import picture
from meshfit.plan import Plan
from meshfit.run import Run

GOAL, MOST = 1.7, 0.55
WIDTH, LENGTH, SAMPLES, LAYERS = 256, 32, 16, 4


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = _tower(), _tower()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = self.image(image).mean(1), self.text(text).mean(1)
        return 10 * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).t()


def _tower() -> nn.Sequential:
    block = lambda: nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*(block() for _ in range(LAYERS)))


def contrast(model: nn.Module, batch: Any) -> Tensor:
    logits = model(*batch)
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def job(plan: str, steps: int) -> Job:
    torch.manual_seed(0)
    data = tuple(torch.randn(2, SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)))
    asked: dict[str, Any] = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-4), "batch_size": SAMPLES}
    asked |= {"step": contrast, "steps": steps, "plan": plan, "shuffle": False, "devices": "cpu"}
    count = Plan.parse(plan).devices
    return Job(**{"model": Towers(), "data": data, **asked}).training().settled(count=count, kind="cpu")


def measure(world: World, turns: int, steps: int, folder: str) -> dict[str, Any]:
    """In every rank: (wall, processor) seconds a step of each loop, by turn."""
    torch.set_num_threads(1)
    total, cpu = (turns + 1) * steps, torch.device("cpu")
    together = Run(job("branch=2", total), world, folder=Path(folder))
    runs = {"alone": Run(job("data=1", total), World(0, 1, cpu)) if world.rank == 0 else None, "branch=2": together}
    loops = {key: None if run is None else train(run) for key, run in runs.items()}
    found: dict[str, list[tuple[float, float]]] = {key: [] for key in loops}
    losses: dict[str, list[float]] = {key: [] for key in loops}
    for turn in range(turns + 1):  # the first is not counted
        for key, loop in loops.items():
            if (run := runs[key]) is not None:
                events._current = run.events
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            losses[key] += [next(loop).loss for _ in range(steps)] if loop is not None else []
            worked = time.process_time() - busy
            dist.barrier()
            if turn:
                found[key].append(((time.perf_counter() - start) / steps, worked / steps))
    held = sum(p.numel() for p in together.model.parameters())
    together.events.close()
    return {"seconds": found, "losses": losses, "held": held}


def spans(run: RecordedRun, rank: int, skip: int) -> list[RecordedSpan]:
    return [span for span in run.ranks[rank].spans if span.name == "branch" and span.step > skip]


def overlap(run: RecordedRun, skip: int) -> float:
    """Of the time in which each of two ranks is at its own branches, the share in which both are."""
    ours, theirs = spans(run, 0, skip), spans(run, 1, skip)
    both = sum(max(0.0, min(a.end, b.end) - max(a.at, b.at)) for a in ours for b in theirs if a.step == b.step)
    return 2 * both / sum(span.seconds for span in (*ours, *theirs))


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--picture", type=Path, help="where to draw some steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = lambda world, _: measure(world, options.turns, options.steps, folder)
        with LocalRanks(work, size=2, devices=Devices("cpu", None)) as ranks:
            first, second = ranks.results[0], ranks.results[1]
        (Path(folder) / "run.json").write_text('{"plan": "branch=2"}')
        recorded = read(folder)
        share = overlap(recorded, options.steps)
        if options.picture:
            options.picture.write_text(picture(recorded, title="branch=2: two towers, one on each rank"))
    alone, both = first["seconds"]["alone"], first["seconds"]["branch=2"]
    longest = [max(a[1], b[1]) for a, b in zip(both, second["seconds"]["branch=2"], strict=True)]
    wall = [a[0] / b[0] for a, b in zip(alone, both, strict=True)]
    busy = [a[1] / b for a, b in zip(alone, longest, strict=True)]
    total = sum(p.numel() for p in Towers().parameters())
    off = max(abs(a - b) / b for a, b in zip(first["losses"]["branch=2"], first["losses"]["alone"], strict=True))
    table = Table("", "one device", "branch=2", "speed-up", "best turn")
    ms = lambda seconds: f"{1e3 * statistics.median(seconds):.1f} ms"
    for name, one, two, ratio in (
        ("wall", [a[0] for a in alone], [b[0] for b in both], wall),
        ("processor", [a[1] for a in alone], longest, busy),
    ):
        table.add_row(name, ms(one), ms(two), f"{statistics.median(ratio):.2f}", f"{max(ratio):.2f}")
    console = Console()
    console.print(table)
    held = [found["held"] / total for found in (first, second)]
    console.print(f"parameters of each rank: {held[0]:.2f} and {held[1]:.2f} of {total:,}", highlight=False)
    console.print(f"overlap: both ranks at their own branches in {share:.0%} of that time", highlight=False)
    console.print(f"losses within {off:.0e} of one device's", highlight=False)
    good = statistics.median(busy) >= GOAL and max(held) <= MOST and off <= 1e-5
    return 0 if good else 1


if __name__ == "__main__":
    from benchmarks import branch_speed  # all processes find its functions under this name

    sys.exit(branch_speed.main())
