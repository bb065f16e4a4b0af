"""How many images a second, with more and more data-parallel CPU ranks?

    python benchmarks/scaling.py
    python benchmarks/scaling.py --ranks 1,2,4,8 --turns 20 --plot scaling.svg --json scaling.json
    python benchmarks/scaling.py --models small
    python benchmarks/scaling.py --against REV          # meshfit beside meshfit of an earlier revision

``fit`` beside a hand-written DDP loop, in turns of a few steps, every rank one thread and always the same number of
images (weak scaling). Two models: a small net, whose step is mostly overhead and exchange, and a wide residual one
that computes for more than 100 ms a step. One rank is a plain loop, without DDP. Goal: at least 0.97 of raw
DDP's images a second at every size. More ranks than cores only share them.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import against
from benchmarks.overhead import Task, side_by_side, train_meshfit
from meshfit.launch.world import cores

GOAL = 0.97
LOOPS = ("meshfit", "raw DDP, fused")


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


def small() -> nn.Module:
    """A convolutional net of 20 thousand weights, as for CIFAR."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def heavy() -> nn.Module:
    """A residual net of 0.5 M weights."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        Residual(32),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        Residual(64),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        Residual(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


MODELS = {
    "small": (Task(build=small, shape=(3, 32, 32), batch=64, samples=2048), 50),
    "heavy": (Task(build=heavy, shape=(3, 32, 32), batch=64, samples=2048), 4),
}
"""What is trained, and how many steps a turn takes."""


def measure(names: list[str], sizes: list[int], turns: int) -> Iterator[dict]:
    """A row for each model and number of ranks: images a second by both loops, and their ratio, medians over turns."""
    for name in names:
        task, every = MODELS[name]
        for ranks in sizes:
            seen = side_by_side(LOOPS, task, ranks, chunks=turns, every=every, warm_up=max(3, every // 2))
            figures = {loop: [task.batch * ranks / wall for _, wall in seen[loop]] for loop in LOOPS}
            ratios = [m / raw for m, raw in zip(*figures.values(), strict=True)]
            median = {loop: statistics.median(f) for loop, f in figures.items()}
            best = {loop: max(f) for loop, f in figures.items()}
            ratio = statistics.median(ratios)
            yield {"model": name, "ranks": ranks, "images_per_second": median, "best": best, "ratio": ratio}


def show(console: Console, rows: list[dict]) -> None:
    table = Table(title=f"images/s, one thread a rank, {cores()} cores: median over turns (best)")
    for column in ("model", "ranks", *LOOPS, "ratio", "of bests", "speed-up", "raw's"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        first = next(r for r in rows if r["model"] == row["model"])["images_per_second"]
        median, best = row["images_per_second"], row["best"]
        table.add_row(
            row["model"],
            str(row["ranks"]),
            *(f"{median[loop]:,.0f} ({best[loop]:,.0f})" for loop in LOOPS),
            f"[{'green' if row['ratio'] >= GOAL else 'red'}]{row['ratio']:.3f}[/]",
            f"{best['meshfit'] / best['raw DDP, fused']:.3f}",
            *(f"{median[loop] / first[loop]:.2f}" for loop in LOOPS),
        )
    console.print(table)
    least = min(row["ratio"] for row in rows)
    console.print(f"least ratio {least:.3f}, goal >= {GOAL}: {'PASS' if least >= GOAL else 'FAIL'}")


def picture(rows: list[dict]) -> str:
    """The figures as an SVG: a panel a model, bars in pairs by number of ranks."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    width, height, left, top, bottom = 340, 260, 62, 58, 212
    colours = dict(zip(LOOPS, ("#2563a8", "#b9c2cc"), strict=True))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(names)} {height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for panel, name in enumerate(names):
        shown = [row for row in rows if row["model"] == name]
        x0, x1 = panel * width + left, (panel + 1) * width - 16
        most = max(max(row["images_per_second"].values()) for row in shown)
        tick = next(t for e in range(9) for t in (10**e, 2 * 10**e, 5 * 10**e) if most / t <= 5)
        highest = tick * (int(most / tick) + 1)
        place = lambda value, highest=highest: bottom - (bottom - top) * value / highest
        out.append(f'<text x="{x0}" y="22" font-size="14" font-weight="bold">{name} model, images/s</text>')
        for value in range(0, highest + 1, tick):
            y = place(value)
            out.append(f'<line x1="{x0}" x2="{x1}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7ea"/>')
            out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>')
        pitch = (x1 - x0) / len(shown)
        for i, row in enumerate(shown):
            middle, bar = x0 + pitch * (i + 0.5), min(34, pitch * 0.36)
            for side, loop in enumerate(LOOPS):
                value = row["images_per_second"][loop]
                x, y = middle + (side - 1) * bar, place(value)
                out.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar - 1:.1f}" height="{bottom - y:.1f}"'
                    f' fill="{colours[loop]}"/>'
                )
            y = place(max(row["images_per_second"].values())) - 5
            out.append(
                f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle" font-size="11">{row["ratio"]:.2f}</text>'
            )
            out.append(f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{row["ranks"]}</text>')
        middle = (x0 + x1) / 2
        out.append(f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">ranks (above: meshfit / raw)</text>')
    for i, loop in enumerate(LOOPS):
        x = left + i * 84
        out.append(f'<rect x="{x}" y="32" width="11" height="11" fill="{colours[loop]}"/>')
        out.append(f'<text x="{x + 16}" y="42">{loop}</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join(str(n) for n in (1, 2, 4, 8) if n <= cores())
    parser.add_argument("--ranks", default=default, help="numbers of ranks (%(default)s: as the cores here allow)")
    parser.add_argument("--models", default=",".join(MODELS), help="%(default)s")
    parser.add_argument("--turns", type=int, default=12, help="turns of each loop")
    parser.add_argument("--plot", type=Path, help="draw the figures here, as SVG")
    parser.add_argument("--json", type=Path, help="write the figures here")
    against.add_option(parser)
    asked = parser.parse_args()
    console = Console()
    names = asked.models.split(",")
    if unknown := set(names) - MODELS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    sizes = [int(n) for n in asked.ranks.split(",")]
    if asked.against:
        each = []
        for name, ranks in itertools.product(names, sizes):
            task, every = MODELS[name]
            start = lambda clock, task=task, ranks=ranks: mp.spawn(train_meshfit, (task, ranks, clock), join=False)
            how = {"chunks": asked.turns, "every": every, "warm_up": max(3, every // 2)}
            each.append(against.ratio(console, asked.against, f"{name}, data={ranks}", start, ranks, **how))
        return against.passed(console, each)
    rows = list(measure(names, sizes, asked.turns))
    show(console, rows)
    if asked.plot:
        asked.plot.write_text(picture(rows))
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    from benchmarks import scaling  # all processes find its classes under this name

    sys.exit(scaling.main())
