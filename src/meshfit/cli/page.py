"""``meshfit report RUN`` and ``meshfit watch RUN``: the page about a run, as a file or served while it trains."""

import asyncio
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from meshfit.errors import JobError
from meshfit.observe.reading import read
from meshfit.observe.report import write
from meshfit.observe.verdict import findings
from meshfit.observe.watch import PageServer

Show = Annotated[bool, typer.Option("--show", help="Open it in a browser.")]


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run (out=).", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="Another file for the page.")] = None,
    show: Show = False,
) -> None:
    """Write one page about a run: losses, time, memory, timeline, and what limited its speed."""
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


def watch(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one that holds several.", show_default=False)],
    port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    show: Show = False,
) -> None:
    """Serve the page of a run, or of several, to this machine while they train."""

    async def serve() -> None:
        page = PageServer(folder)
        server = await page.start(port)
        print(f"  {page.url}\n  Ctrl-C ends it; training goes on either way", flush=True)
        if show:
            webbrowser.open(page.url)
        await server.serve_forever()

    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve())
    except OSError as error:
        raise JobError(f"port {port} is not available", str(error), "without --port a free one is taken") from None
