"""``meshfit verify``: the proof that a plan trains like one device, printed."""

from typing import Annotated, Any

import typer
from rich.console import Console

from meshfit.cli.script import FAILED, Arguments, DeviceText, PlanText, Script, Which, given, instead_of_fit
from meshfit.job import Job
from meshfit.observe.columns import columns
from meshfit.verify import Verdict, verify_job

ANSWERS = {
    "equal": ("trains like one device", "green"),
    "different": ("does not train like one device", "bold red"),
    "undecided": ("may or may not train like one device: this could not be decided", "yellow"),
}


def verify(
    script: Script,
    arguments: Arguments = None,
    plan: PlanText = None,
    devices: DeviceText = None,
    steps: Annotated[int, typer.Option(help="Steps to train and compare.")] = 5,
    fit: Which = 1,
) -> None:
    """Prove that a plan trains like one device: exit code 0 if it does, 1 if not, 3 if that cannot be decided."""

    def act(asked: dict[str, Any]) -> int:
        verdict = verify_job(Job(**{**asked, **given(plan=plan, devices=devices)}).training(), steps)
        show(verdict)
        return verdict.exit_code

    instead_of_fit(script, arguments, act, fit, failed=FAILED)


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
