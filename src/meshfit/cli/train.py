"""``meshfit train`` and ``meshfit join``: a script's training; workers for one that runs on another host."""

from typing import Annotated, Any

import typer

from meshfit.cli.script import Arguments, DeviceText, PlanText, Script, Which, given, run
from meshfit.launch import key

KeyFile = Annotated[str | None, typer.Option("--key-file", help="A file with the key, readable by its owner only.")]


def train(
    script: Script,
    arguments: Arguments = None,
    plan: PlanText = None,
    devices: DeviceText = None,
    out: Annotated[str | None, typer.Option(help="Folder for what the run writes, or s3://bucket/folder.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help='How often to save: "500 steps", "10 minutes", "3%".')] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints that stay, the newest.")] = None,
    resume: Annotated[bool, typer.Option(help="Resume from the newest checkpoint of the folder.")] = False,
    restarts: Annotated[
        int | None, typer.Option(min=0, help="How often ranks are started again without progress; 0: never.")
    ] = None,
    hang_timeout: Annotated[str | None, typer.Option(help='How long a rank may stand still in a step: "30 s".')] = None,
    preemption: Annotated[
        str | None,
        typer.Option(help="A file that appears, or an address that says so, when the machine is taken away."),
    ] = None,
    grace: Annotated[str | None, typer.Option(help='How long the save may take after that: "30 s".')] = None,
    listen: Annotated[str | None, typer.Option(help="Where workers of other hosts may join: 10.0.0.5:7000.")] = None,
    key_file: KeyFile = None,
    fit: Which = 1,
) -> None:
    """Run a script's training, under another plan or on other devices if asked."""
    key.read_from(key_file)
    changes = given(
        plan=plan,
        devices=devices,
        out=out,
        checkpoint=checkpoint,
        keep=keep,
        resume=resume or None,
        restarts=restarts,
        hang_timeout=hang_timeout,
        preemption=preemption,
        grace=grace,
        listen=listen,
    )
    run(script, arguments, lambda asked: {**asked, **changes}, fit)


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
    changes |= given(devices=workers if devices is None else devices)
    run(script, arguments, lambda asked: {**asked, **changes}, fit)
