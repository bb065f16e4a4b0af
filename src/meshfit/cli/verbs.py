"""The verbs. A verb's file is imported when it is called: ``meshfit --help`` does not wait for torch."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from meshfit.version import VERSION

VERBS = {
    "train": ("train", "Run a script's training, under another plan if asked."),
    "join": ("train", 'Run workers for a "meshfit train --listen".'),
    "verify": ("verify", "Prove that a plan trains like one device."),
    "rehearse": ("rehearse", "Run the first steps of a plan here, as on a cluster."),
    "inspect": ("inspect", "Show what is inside a model, and how it can be spread."),
    "compare": ("compare", "Compare plans, or runs, in one table and picture."),
    "report": ("page", "Write one page about a run."),
    "watch": ("page", "Serve the page of a run while it trains."),
    "data": ("data", "Show the data at a path or URL, and how fast it is read."),
    "plan": ("plan", "Find the best plan for a model on a cluster."),
    "calibrate": ("plan", "Measure this machine, so that plans are predicted for it."),
    "doctor": ("doctor", "Say what this machine can do, and what is wrong with it."),
    "checkpoint": ("checkpoint", "List, show, verify, compare, export, prune checkpoints."),
}
"""By name: its file, and its line of ``meshfit --help``."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


class _Verb(TyperCommand):
    """Stands for a verb until it is called."""

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **more: Any) -> Any:
        verb = getattr(import_module(f"meshfit.cli.{VERBS[str(self.name)][0]}"), str(self.name))
        if not isinstance(verb, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(self.name)(verb)
            verb = alone
        return typer.main.get_command(verb).make_context(info_name, args, *given, **more)


for _name, (_, _help) in VERBS.items():
    app.command(_name, cls=_Verb, help=_help)(lambda: None)


def _version(asked: bool) -> None:
    if asked:
        print(f"meshfit {VERSION}")
        raise typer.Exit


@app.callback()
def meshfit(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Train any PyTorch module over many devices, proven equal to one."""
