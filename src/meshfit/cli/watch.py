"""``meshfit watch RUN`` or ``meshfit watch runs/``: the same page while training goes on."""

import asyncio
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from meshfit.errors import JobError


def watch(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one that holds several.", show_default=False)],
    port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Open it in a browser.")] = False,
) -> None:
    """Serve the page of a run, or of several, to this machine while they go on."""
    from meshfit.observe.watch import watch as serve

    def say(url: str) -> None:
        print(f"  {url}\n  Ctrl-C ends it; training goes on either way", flush=True)
        if show:
            webbrowser.open(url)

    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(folder, port, say))
    except OSError as error:
        raise JobError(f"port {port} cannot be had", str(error), "without --port a free one is taken") from None
