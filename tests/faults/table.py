"""The rows of the table: a fault, what is expected, and what happened.

Points: 2 as expected, 1 safe but slow or unclear, 0 otherwise. A run that ends well must end bit by bit as one that
nothing happened to.
"""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.inject import PHASES
from tests.faults.job import HANG
from tests.faults.watch import ROOT, Outcome, run

LIMIT = 300.0  # seconds for a run; a hang is a fault
STEPS = 60
DIED, RAISED, HUNG = 2.0, 3.0, HANG + 5.0  # seconds in which a fault is told of, and all ranks are gone


@dataclass
class Happened:
    points: int
    words: str
    outcomes: list[Outcome] = field(default_factory=list)
    silent: int = 0
    """Runs that ended well, with another result."""
    executed: int = 0
    """Code that came in a file or a message, and ran."""


@dataclass
class Given:
    """What a row may use: random numbers of its seed, a folder of its own, and what a run without faults comes to."""

    draw: random.Random
    folder: Path
    wholes: dict[str, dict[str, Any]]
    device: str = "cpu"

    def asked(self, plan: str) -> dict[str, Any]:
        """Of every run. On GPUs nothing is compiled: that would take longer than the rest."""
        return {"plan": plan if self.device == "cpu" else f"{plan} compile=none", "steps": STEPS, "device": self.device}

    def whole(self, plan: str) -> dict[str, Any]:
        """What a run without faults comes to."""
        if plan not in self.wholes:
            outcome = run(self.asked(plan), limit=LIMIT)
            assert outcome.result, outcome.err[-2000:]
            self.wholes[plan] = outcome.result
        return self.wholes[plan]

    def protected(self, plan: str, **asked: Any) -> dict[str, Any]:
        """A job with checkpoints, in a new folder."""
        out = self.folder / f"run{len(list(self.folder.iterdir()))}"
        return {**self.asked(plan), "out": str(out), "checkpoint": 20, **asked}

    def once(self) -> str:
        return str(self.folder / f"mark{self.draw.random()}")


Row = Callable[[Given], Happened]
ROWS: dict[str, tuple[str, str, Row]] = {}
"""By number: the fault, what is expected, and how it is tried."""


def row(number: str, fault: str, expected: str) -> Callable[[Row], Row]:
    def add(function: Row) -> Row:
        ROWS[number] = fault, expected, function
        return function

    return add


def tests(number: str, fault: str, expected: str, *nodes: str) -> None:
    """A row that tests of the suite show."""

    def function(given: Given) -> Happened:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "-rfE", *nodes],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=900,
        )
        lines = done.stdout.strip().splitlines() or [""]
        failed = [line.partition(" - ")[0].rpartition("/")[2] for line in lines if line.startswith(("FAILED", "ERROR"))]
        executed = int(done.returncode != 0 and "canary" in done.stdout)
        return Happened(2 * (done.returncode == 0), "; ".join([lines[-1].strip("= "), *failed]), executed=executed)

    ROWS[number] = fault, expected, function


def recovered(outcome: Outcome, want: dict[str, Any], says: str = "") -> Happened:
    """It must have come to the end of a run without faults, and have named the cause: ``says``, a pattern."""
    if outcome.digest == want["digest"]:
        again = [note for note in outcome.result["notes"] if "restarted" in note]
        named = any(re.search(says, note) for note in again) or not says
        words = ["identical", *again, *([] if named else ["the cause is not named"])]
        return Happened(2 if named else 1, "; ".join(words), [outcome])
    if outcome.digest:
        return Happened(0, "ended well with another result", [outcome], silent=1)
    return stopped(outcome, "", points=1)


def stopped(outcome: Outcome, pattern: str, points: int = 2) -> Happened:
    """It must have stopped, and said why."""
    if outcome.hung:
        return Happened(0, "hangs", [outcome])
    if outcome.code == 0:
        return Happened(0, "ended as if nothing had happened", [outcome], silent=1)
    found = re.search(pattern, outcome.err)
    traced = "Traceback" in outcome.err and not pattern
    said = outcome.says if found is None or not pattern else found.group(0)
    return Happened(points if found and not traced else min(points, 1), f"exit code {outcome.code}: {said}", [outcome])


def several(each: list[Happened]) -> Happened:
    worst = min(each, key=lambda one: one.points)
    good = sum(one.points == 2 for one in each)
    words = f"{good} of {len(each)}: {worst.words}"
    outcomes = [outcome for one in each for outcome in one.outcomes]
    return Happened(worst.points, words, outcomes, sum(one.silent for one in each), sum(one.executed for one in each))


def fault(given: Given, kind: str, **at: Any) -> dict[str, Any]:
    """At a random place of the run, beside what is given; once."""
    drawn = {"rank": given.draw.randrange(2), "step": given.draw.randrange(22, 58), "phase": given.draw.choice(PHASES)}
    return {"kind": kind, "mark": given.once(), **drawn, **at}


def injected(
    given: Given, kind: str, says: str, within: float, plan: str = "data=2", devices: str = "cpu", **at: Any
) -> Happened:
    """It must have told of the fault ``within`` so many seconds."""
    made = fault(given, kind, **at)
    outcome = run(given.protected(plan, fault=made, **({"devices": devices} if devices != "cpu" else {})), limit=LIMIT)
    found, after = recovered(outcome, given.whole(plan), says), outcome.told_after(made["mark"])
    points = found.points if after <= within else min(found.points, 1)
    return replace(found, points=points, words=f"told after {after:.1f} s; {found.words}")


def resumed_like(given: Given, before: Outcome, after: Outcome) -> Happened:
    """Weights as without the break; of losses, this run has only its own."""
    same = bool(after.result) and after.result["weights"] == given.whole("data=2")["weights"]
    words = f"goes on {'identically' if same else 'otherwise: ' + after.says}"
    silent = int(bool(after.result) and not same)
    return Happened(2 if same else 0, words, [before, after], silent=silent)
