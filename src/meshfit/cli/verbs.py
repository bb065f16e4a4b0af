"""One function a verb."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshfit.cli import checkpoint, tell
from meshfit.cli.compare import compare
from meshfit.cli.data import data
from meshfit.cli.doctor import doctor
from meshfit.cli.page import report, watch
from meshfit.cli.plan import calibrate
from meshfit.cli.plan import plan as plan_
from meshfit.cli.script import Arguments, Script, Which, run
from meshfit.errors import JobError, MeshfitError
from meshfit.job import Job
from meshfit.launch import key
from meshfit.observe.columns import columns
from meshfit.verify import Verdict, verify_job
from meshfit.version import VERSION

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

PlanText = Annotated[str | None, typer.Option("--plan", help='Instead of the script\'s: "data=4", say.')]
DeviceText = Annotated[str | None, typer.Option("--devices", help='"auto", 4, "cpu:4" or "cuda:0,2".')]
KeyFile = Annotated[str | None, typer.Option("--key-file", help="A file with the key, readable by its owner only.")]

FAILED = 2
"""Exit code of a verb whose other exit codes are answers."""

app.add_typer(checkpoint.app, name="checkpoint")


def _version(asked: bool) -> None:
    if asked:
        print(f"meshfit {VERSION}")
        raise typer.Exit


@app.callback()
def meshfit(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Train any PyTorch module over many devices, proven equal to one."""


@app.command()
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
    changes: dict[str, Any] = _given(
        plan=plan, devices=devices, out=out, checkpoint=checkpoint, listen=listen, keep=keep, restarts=restarts
    )
    changes |= _given(hang_timeout=hang_timeout, preemption=preemption, grace=grace)
    changes |= {"resume": True} if resume else {}
    run(script, arguments or [], lambda asked: {**asked, **changes}, fit)


@app.command()
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


@app.command()
def verify(
    script: Script,
    arguments: Arguments = None,
    plan: PlanText = None,
    devices: DeviceText = None,
    steps: Annotated[int, typer.Option(help="Steps to train and compare.")] = 5,
    fit: Which = 1,
) -> None:
    """Prove that a plan trains like one device: exit code 0 if it does, 1 if not, 3 if that cannot be decided."""

    def instead(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            verdict = verify_job(Job(**{**asked, **_given(plan=plan, devices=devices)}).training(), steps)
        except MeshfitError as error:
            tell(error)
            raise SystemExit(FAILED) from None
        show(verdict)
        raise SystemExit(verdict.exit_code)  # not caught by a script's "except Exception"

    run(script, arguments or [], instead, fit, failed=FAILED)


@app.command()
def rehearse(
    on: Annotated[str, typer.Option(help="The cluster: 16x8xH100, or a file.", show_default=False)],
    script: Annotated[Path | None, typer.Argument(help="A script that calls meshfit.fit.", show_default=False)] = None,
    arguments: Arguments = None,
    plan: PlanText = None,
    hf: Annotated[Path | None, typer.Option(help="Instead of a script: a Hugging Face config.json.")] = None,
    seq: Annotated[int, typer.Option(help="With --hf: tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="With --hf: samples a step.")] = 256,
    timeline: Annotated[Path | None, typer.Option(help="A file for the picture of a step, as SVG.")] = None,
    fit: Which = 1,
) -> None:
    """Run the first steps of a plan's ranks here, as on a cluster: exit code 0 if it would start there, 1 if not."""
    from meshfit.cli.rehearse import rehearse, rehearse_config

    if hf is not None and script is None:
        raise SystemExit(rehearse_config(hf, seq, batch, plan, on, timeline))
    if hf is not None or script is None:
        raise JobError("rehearse takes a script or --hf", "meshfit rehearse --hf config.json --on 8xH100, say")

    def instead(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            code = rehearse({**asked, **_given(plan=plan)}, on, timeline)
        except MeshfitError as error:
            tell(error)
            raise SystemExit(FAILED) from None
        raise SystemExit(code)  # not caught by a script's "except Exception"

    run(script, arguments or [], instead, fit, failed=FAILED)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="train.py, module:function, or a config.json.", show_default=False)],
    arguments: Arguments = None,
    input: Annotated[list[str] | None, typer.Option(help='What to call it on: "int64 4x128".')] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    fit: Which = 1,
) -> None:
    """Show what is inside a model: its blocks, their cost, where it can be cut, and which axes can spread it."""
    from meshfit.cli.inspect import inspect

    inspect(target, arguments or [], input or [], fit, json)


for verb in (compare, report, watch, data, calibrate, doctor):
    app.command()(verb)
app.command("plan")(plan_)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


ANSWERS = {
    "equal": ("trains like one device", "green"),
    "different": ("does not train like one device", "bold red"),
    "undecided": ("may or may not train like one device: this could not be decided", "yellow"),
}


def show(verdict: Verdict) -> None:
    console = Console(highlight=False)
    about = f"{verdict.plan} against {verdict.against}, {verdict.steps} steps"
    about += ", fp64" if verdict.decided_in == "fp64" else ""
    table = columns(f"{about}~", ">difference", *([">rounding"] if verdict.comparable else []), ">limit", "~")
    for row in verdict.rows:
        if not verdict.comparable:
            table.add_row(row.name, f"{row.difference:.1e}", "none")
            continue
        where = f"differs from {row.first} on" if row.first.startswith("step ") else f"first: {row.first}"
        rounding = f"{row.rounding:.1e}" if row.rounding else ""
        said = "equal" if row.equal else f"[red]{where}"
        table.add_row(row.name, f"{row.difference:.1e}", rounding, f"{row.limit:.0e}", said)
    console.print(table)
    for note in verdict.notes:
        console.print(f" {note}", style="dim")
    if verdict.noise:
        names = ", ".join(verdict.noise[:6]) + (f" and {len(verdict.noise) - 6} more" if len(verdict.noise) > 6 else "")
        console.print(f" weights not compared, since their gradient is rounding: {names}", style="dim")
    if not verdict.comparable:
        console.print(f"\n {verdict.plan} does not take the steps of one device: equality is not expected")
        return
    words, style = ANSWERS[verdict.answer]
    console.print(f"\n {verdict.plan} {words}", style=style)
    if verdict.first:
        console.print(f" the first to differ is {verdict.first}", style=style)
