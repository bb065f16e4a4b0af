"""``meshfit join HOST:PORT train.py``: workers for a run on another host."""

from typing import Annotated, Any

import typer

from meshfit.cli.script import Arguments, Script, Which, run
from meshfit.launch import key

KeyFile = Annotated[str | None, typer.Option("--key-file", help="A file with the key, readable by its owner only.")]


def join(
    at: Annotated[str, typer.Argument(help="Where the run listens: 10.0.0.5:7000.", show_default=False)],
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[int | None, typer.Option(help="How many; by default one for each GPU, or one.")] = None,
    devices: Annotated[str | None, typer.Option("--devices", help='Instead: "cpu:2" or "cuda:0,2".')] = None,
    key_file: KeyFile = None,
    fit: Which = 1,
) -> None:
    """Join a run that "meshfit train --listen" began, as workers, until it ends."""
    key.read_from(key_file)
    changes: dict[str, Any] = {"join": at, "listen": None}
    if workers is not None or devices is not None:
        changes["devices"] = workers if devices is None else devices
    run(script, arguments or [], lambda asked: {**asked, **changes}, fit)
