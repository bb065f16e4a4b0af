"""The few lines that a terminal shows after a run: the result, where the time went, and the verdict."""

from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshfit.checkpoint.files import joined
from meshfit.data.remote import without_secrets
from meshfit.observe.columns import columns
from meshfit.observe.kinds import KINDS, PHASES
from meshfit.observe.reading import RecordedRun, read
from meshfit.observe.verdict import verdict
from meshfit.units import size

if TYPE_CHECKING:
    from meshfit.result import Result

MOST_RANKS = 8


def summary(result: "Result") -> RenderableType:
    """The result in lines, and below it a table of the time by phase and rank."""
    run: RecordedRun | None = None
    with suppress(Exception):  # the summary is shown even if the folder cannot be read
        run = None if result.local is None else read(result.local)
    head = Table.grid(padding=(0, 2))
    for word, said in (*result.rows(), *(("note", note) for note in result.notes)):
        head.add_row(word, Text(said))
    if run is not None and run.ranks:
        head.add_row("verdict", Text(verdict(run)))
    if result.folder is not None:
        there = result.local is not None and (result.local / "report.html").exists()
        where = str(joined(result.folder, "report.html") if there else result.folder)
        head.add_row("report" if there else "written", without_secrets(where))
    return Group(head, "", _times(result, run)) if result.phases else head


def _times(result: "Result", run: RecordedRun | None) -> Table:
    phases = result.phases[:MOST_RANKS]
    table = columns("where the time went", *(f">rank {rank}" for rank in range(len(phases))))
    for name in PHASES:
        shares = [seconds.get(name, 0.0) / max(result.seconds, 1e-9) for seconds in phases]
        if max(shares) >= 0.001:
            table.add_row(KINDS[name].label, *(f"{share:.1%}" for share in shares))
    if run is not None and len(run.ranks) == len(result.phases):
        ranks = run.ranks[: len(phases)]
        for label, key in (("GPU in use", "gpu_use"), ("CPU in use, of a core", "cpu")):
            used = [rank.mean(key) for rank in ranks]
            if any(use is not None for use in used):
                table.add_row(label, *("" if use is None else f"{use:.0f}%" for use in used), style="dim")
        if any(rank.peak_memory for rank in ranks):
            table.add_row("peak memory", *(size(rank.peak_memory) for rank in ranks), style="dim")
    return table


def show(result: "Result") -> None:
    Console(stderr=True).print(summary(result))
