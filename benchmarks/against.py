"""A benchmark's loop by this code and by an earlier revision of it, in turns: ``--against REV``.

``overhead.py``, ``sharding.py`` and ``scaling.py`` take the option. The other code is a git worktree of its own, with
its own benchmarks: what is timed must stand there under the same name.
"""

import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LIMIT = 1.03
NOW, BEFORE = "now", "before"


def add_option(parser: ArgumentParser) -> None:
    parser.add_argument("--against", metavar="REV", help="time meshfit of this revision beside it, and nothing else")


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(at), revision], cwd=here, check=True)
        try:
            yield at
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(at)], cwd=here, check=True)


@contextmanager
def importing_from(root: Path) -> Iterator[None]:
    """Processes that are started within import meshfit and its benchmarks from ``root``."""
    path, main = sys.path[:], sys.modules["__main__"]
    script = str(main.__file__)
    sys.path[:0] = [str(root), str(root / "src")]
    main.__file__ = str(root / "benchmarks" / Path(script).name)  # which they import too
    try:
        yield
    finally:
        sys.path[:], main.__file__ = path, script


def ratio(
    console: Console, revision: str, title: str, start: Callable[[Any], Any], ranks: int, **how: int
) -> tuple[float, float]:
    """Print, and return, CPU and wall-clock time a step over those of ``revision``: medians over turns. ``start``
    starts the processes of a loop, given its clock."""
    from benchmarks.overhead import in_turns

    with checked_out(revision) as root:

        def start_before(clock: Any) -> Any:
            with importing_from(root):
                return start(clock)

        seen = in_turns({NOW: start, BEFORE: start_before}, ranks, **how)  # type: ignore[arg-type]
    table = Table("ms a step", NOW, f"{BEFORE}: {revision[:9]}", "ratio", title=title)
    found = []
    for index, what in enumerate(("CPU, all ranks", "wall-clock")):
        now, before = ([figures[index] for figures in seen[loop]] for loop in (NOW, BEFORE))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(now, before, strict=True)], n=4)
        medians = [f"{statistics.median(each) * 1e3:.2f}" for each in (now, before)]
        table.add_row(what, *medians, f"{middle:.3f} ({low:.2f} to {high:.2f})")
        found.append(middle)
    console.print(table)
    return found[0], found[1]


def passed(console: Console, ratios: list[tuple[float, float]]) -> int:
    """By CPU time: wall-clock time is other processes' too."""
    most = max(cpu for cpu, _ in ratios)
    console.print(
        f"most CPU time over the revision's: {most:.3f}, limit {LIMIT}: {'PASS' if most <= LIMIT else 'FAIL'}"
    )
    return int(most > LIMIT)
