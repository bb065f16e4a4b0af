"""Runs a user's script up to its call of ``fit``; and the options that verbs on scripts have in common."""

import importlib
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from meshfit.cli import tell
from meshfit.errors import JobError, MeshfitError

Script = Annotated[Path, typer.Argument(help="A script that calls meshfit.fit.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)]
PlanText = Annotated[str | None, typer.Option("--plan", help='Instead of the script\'s: "data=4", say.')]
DeviceText = Annotated[str | None, typer.Option("--devices", help='"auto", 4, "cpu:4" or "cuda:0,2".')]
Which = Annotated[int, typer.Option("--fit", min=1, help="Which of the script's calls of fit to act on.")]

FAILED = 2
"""Exit code of a verb whose other exit codes are answers."""


def given(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def run(
    path: Path,
    arguments: list[str] | None,
    at_fit: Callable[[dict[str, Any]], dict[str, Any]],
    which: int = 1,
    *,
    failed: int = 1,
) -> None:
    """Run the script at ``path`` as ``__main__``; ``at_fit`` may change the arguments of its ``which``-th ``fit``. An
    exception of the script ends with exit code ``failed``."""
    if not path.is_file():
        raise JobError(f"there is no script {path}", "give a script that calls meshfit.fit, such as train.py")
    calls = 0

    def asked_through(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return at_fit(asked) if calls == which else asked

    verb: Any = importlib.import_module("meshfit.fit")  # the module: meshfit.fit is the function
    before, argv, first = verb.asked_through, sys.argv, sys.path[0]
    verb.asked_through = asked_through
    sys.argv, sys.path[0] = [str(path), *(arguments or [])], str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except MeshfitError:
        raise
    except Exception as error:  # of the script: shown as python would, from the script's first line on
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        raise SystemExit(failed) from None
    finally:
        verb.asked_through = before
        sys.argv, sys.path[0] = argv, first
    if calls < which:
        raise JobError(
            f"{path} ended without its {'' if which == 1 else f'{which}. '}meshfit.fit",
            f"it called fit {calls} time{'s' * (calls != 1)}",
            "arguments for the script go after --",
        )


def instead_of_fit(
    path: Path,
    arguments: list[str] | None,
    act: Callable[[dict[str, Any]], int],
    which: int,
    *,
    failed: int = 1,
    quiet: bool = False,
) -> None:
    """Run the script, and at its ``fit`` do ``act`` with its arguments; end with the exit code that it returns, or
    with ``failed`` at least. ``quiet``: what the script prints goes to standard error."""
    stdout = sys.stdout

    def at_fit(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            with redirect_stdout(stdout):
                code = act(asked)
        except MeshfitError as error:
            raise SystemExit(max(tell(error), failed)) from None
        raise SystemExit(code)  # not caught by a script's "except Exception"

    with redirect_stdout(sys.stderr if quiet else stdout):
        run(path, arguments, at_fit, which, failed=failed)
