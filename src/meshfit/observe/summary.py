"""The few lines after a run: what was trained, how, where the time went, what to look at."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshfit.cost import size
from meshfit.observe.kinds import KINDS, PHASES
from meshfit.observe.reading import Rank, Recording, read
from meshfit.observe.verdict import verdict

if TYPE_CHECKING:
    from meshfit.result import Result

MOST_RANKS = 8


def summary(result: "Result") -> RenderableType:
    """A table of the run's time by phase and rank, with what it came to above it."""
    run = None if result.folder is None else recording(result.folder)
    head = Table.grid(padding=(0, 2))
    for word, said in (*result.rows(), *(("note", note) for note in result.notes)):
        head.add_row(word, Text(said))
    if run is not None and run.ranks:
        head.add_row("verdict", Text(verdict(run)))
    if result.folder is not None:
        report = result.folder / "report.html"
        head.add_row("report" if report.exists() else "written", str(report if report.exists() else result.folder))
    return Group(head, "", _times(result, run)) if result.phases else head


def _times(result: "Result", run: Recording | None) -> Table:
    times = Table(box=None, padding=(0, 2), header_style="dim")
    times.add_column("where the time went")
    shown = range(min(len(result.phases), MOST_RANKS))
    for rank in shown:
        times.add_column(f"rank {rank}", justify="right")
    for phase in PHASES:
        shares = [result.phases[rank].get(phase, 0.0) / max(result.seconds, 1e-9) for rank in shown]
        if max(shares) >= 0.001:
            times.add_row(KINDS[phase].label, *(f"{share:.1%}" for share in shares))
    if run is not None and len(run.ranks) == len(result.phases):
        ranks = [run.ranks[rank] for rank in shown]
        for label, key in (("GPU in use", "gpu_use"), ("CPU in use, of a core", "cpu")):
            used = [rank.mean(key) for rank in ranks]
            if any(use is not None for use in used):
                times.add_row(label, *("" if use is None else f"{use:.0f}%" for use in used), style="dim")
        if any(most := [_most(rank) for rank in ranks]):
            times.add_row("memory at its most", *(size(count) if count else "" for count in most), style="dim")
    return times


def _most(rank: Rank) -> float:
    return max((v for _, v in rank.series("gpu_peak") or rank.series("rss")), default=0.0)


def recording(folder: Path) -> Recording | None:
    """The run in ``folder``, if it can be read: a summary is shown in any case."""
    with suppress(Exception):
        return read(folder)
    return None


def show(result: "Result") -> None:
    Console(stderr=True).print(summary(result))
