"""``meshfit report RUN``: the page about a run, once more or for the first time."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from meshfit.observe.reading import read
from meshfit.observe.report import write
from meshfit.observe.verdict import findings


def report(
    folder: Annotated[Path, typer.Argument(help="What a run wrote, with out=.", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="Another place for the page.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Open it in a browser.")] = False,
) -> None:
    """Write one page about a run: losses, time, memory, timeline, and what held it back."""
    run = read(folder)
    path = write(folder, to)
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings(run)[:3]:
        console.print(Text(f"  {finding}"))
    console.print(f"\n  {path}")
    if to is None and run.ranks:
        console.print(f"  {folder / 'trace.json.gz'}   opens in Perfetto", style="dim")
    if show:
        webbrowser.open(path.resolve().as_uri())
