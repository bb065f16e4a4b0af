"""The few lines after a run: what was trained, how, and where the time went."""

from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from meshfit.result import Result

PHASES = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "exchange": "waiting for other ranks",
    "update": "optimizer",
    "evaluate": "evaluation",
}


def summary(result: "Result") -> RenderableType:
    """A table of the run's time by phase and rank, with what it came to above it."""
    rate = result.history[-1].samples / result.history[-1].seconds if result.history else 0.0
    measured = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    head = Table.grid(padding=(0, 2))
    head.add_row("plan", f"{result.plan}, batch of {result.batch_size} over all devices")
    head.add_row("trained", f"{result.steps:,} steps in {result.seconds:.1f} s, {rate:,.0f} samples/s")
    head.add_row("last", measured)
    if result.best is not None:
        head.add_row("best, kept", ", ".join(f"{name} {value:.4g}" for name, value in result.best.items()))
    if skipped := sum(not step.taken for step in result.history):
        head.add_row("skipped", f"{skipped} steps, not finite")
    for note in result.notes:
        head.add_row("note", note)
    if result.folder is not None:
        head.add_row("written", str(result.folder))
    times = Table(box=None, padding=(0, 2), header_style="dim")
    times.add_column("where the time went")
    for rank in range(len(result.phases)):
        times.add_column(f"rank {rank}", justify="right")
    for phase, meaning in PHASES.items():
        shares = [spent.get(phase, 0.0) / max(result.seconds, 1e-9) for spent in result.phases]
        if max(shares) >= 0.001:
            times.add_row(meaning, *(f"{share:.1%}" for share in shares))
    return Group(head, "", times) if result.phases else head


def show(result: "Result") -> None:
    Console(stderr=True).print(summary(result))
