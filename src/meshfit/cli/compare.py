"""``meshfit compare``: the same job under several plans for a few steps each; or existing runs."""

import copy
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from torch import nn

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.cli.script import Which, instead_of_fit
from meshfit.drive import begin
from meshfit.errors import JobError, MeshfitError
from meshfit.job import NO_EVALUATION, Job
from meshfit.observe import compare as side_by_side
from meshfit.observe.folder import RunFolder, new_folder
from meshfit.observe.reading import RecordedRun, read
from meshfit.run import Run

NOT_COMPARED = {**NO_EVALUATION, "epochs": None, "valid_every": None}


def compare(
    targets: Annotated[list[str], typer.Argument(help="train.py [-- its arguments], or folders of runs.")],
    plans: Annotated[str, typer.Option(help='For a script: "data=2; shard=2; tensor=2".')] = "",
    steps: Annotated[int, typer.Option(help="Steps to train under each plan.")] = 30,
    devices: Annotated[str | None, typer.Option(help='"auto", 4, "cpu:4" or "cuda:0,2".')] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the picture.")] = Path("runs/compare"),
    fit: Which = 1,
) -> None:
    """Compare plans, or runs: losses, speed, memory, traffic, waiting. One table, one picture.

    Plans are trained without dropout, so that their losses can be compared.
    """
    if not targets[0].endswith(".py"):
        _show([read(target) for target in targets], {}, Path("compare.svg"), f"{len(targets)} runs")
        return
    wanted = [plan.strip() for plan in plans.split(";") if plan.strip()]
    if not wanted:
        raise JobError("compare needs plans for a script", 'meshfit compare train.py --plans "data=2; shard=2"')
    folder = new_folder(out)

    def act(asked: dict[str, Any]) -> int:
        runs, failed = train_under(wanted, asked, folder, steps=steps, devices=devices)
        title = f"{Path(targets[0]).name}: {steps} steps under each plan"
        _show(runs, failed, folder / "compare.svg", title)
        return 0 if runs else 1

    instead_of_fit(Path(targets[0]), targets[1:], act, fit)


def train_under(
    plans: list[str], asked: dict[str, Any], folder: Path, *, steps: int, devices: str | None = None
) -> tuple[list[RecordedRun], dict[str, str]]:
    """The job under each plan, from the same weights and over the same samples; and the errors of plans that fail."""
    runs, failed = [], {}
    console = Console(stderr=True, highlight=False)
    for plan in plans:
        model = asked["model"]
        changed = {**asked, **NOT_COMPARED, "steps": steps, "plan": plan}
        changed["model"] = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        changed["out"] = folder / re.sub(r"[^A-Za-z0-9=.-]+", "_", plan)
        if devices is not None:
            changed["devices"] = devices
        console.print(f"  {plan} ...", style="dim")
        try:
            runs.append(_trained(Job(**changed).training()))
        except MeshfitError as error:
            failed[plan] = str(error)
    return runs, failed


def _trained(job: Job) -> RecordedRun:
    training = begin(job, lockstep=False, tap=_without_dropout)
    with training, RunFolder(training) as folder:
        for step in training:
            folder.add(step)
    assert training.folder is not None
    return read(training.folder)


def _without_dropout(run: Run) -> None:
    """Each rank would draw its own random numbers, and losses would differ."""
    norms = set(batch_norms(run.model))
    for module in run.model.modules():
        module.training = module in norms


def _show(runs: list[RecordedRun], failed: dict[str, str], path: Path, title: str) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print()
    console.print(side_by_side.table(side_by_side.compared(runs)))
    for plan, why in failed.items():
        console.print()
        console.print(Text(f"  {plan} was left out: {why}", style="yellow"))
    if runs:
        path.write_text(side_by_side.picture(runs, title=title))
        console.print(f"\n  {path}")
