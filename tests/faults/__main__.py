"""make faults, or python -m tests.faults: injects faults, and prints a table of what happened.

    python -m tests.faults                      all rows
    python -m tests.faults --only 1,4,45        some
    python -m tests.faults --seed 7             the same random places again: each run prints its seed
    python -m tests.faults --device cuda        those of ranks, over NCCL: two of them on one GPU

Exit code 1 where a row has no points, or the tally is not zero.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.nccl_ranks import NOT_RUN, RIG, gpu
from tests.faults import data, doors, processes  # noqa: F401 (their rows)
from tests.faults.table import ROWS, Given, Happened

OVER_NCCL = ("1", "4", "6", "7", "7b", "15", "36b")


def tried(number: str, seed: int, wholes: dict[str, dict[str, Any]], device: str) -> tuple[Happened, float]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshfit-faults-", ignore_cleanup_errors=True) as folder:
        given = Given(random.Random(f"{seed} {number}"), Path(folder), wholes, device)
        try:
            happened = ROWS[number][2](given)
        except Exception as error:
            happened = Happened(0, f"the row itself failed: {type(error).__name__}: {str(error)[:200]}")
    return happened, time.monotonic() - began


def tally(every: list[Happened]) -> dict[str, int]:
    outcomes = [outcome for each in every for outcome in each.outcomes]
    return {
        "hangs": sum(outcome.hung for outcome in outcomes),
        "orphans": sum(len(outcome.orphans) for outcome in outcomes),
        "silent errors": sum(each.silent for each in every),
        "non-loopback listeners": sum(len(outcome.open_ports) for outcome in outcomes),
        "code executions": sum(each.executed for each in every),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers of rows, with commas")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    asked = parser.parse_args()
    if asked.device == "cuda" and not gpu():
        print("there is no GPU: nothing was run", file=sys.stderr)
        return NOT_RUN
    os.environ |= RIG if asked.device == "cuda" else {}
    seed = random.randrange(10**6) if asked.seed is None else asked.seed
    numbers = list(OVER_NCCL if asked.device == "cuda" else ROWS)
    numbers = asked.only.split(",") if asked.only else numbers
    if unknown := [number for number in numbers if number not in ROWS]:
        parser.error(f"no row has the number {', '.join(unknown)}; there are {', '.join(ROWS)}")
    how = "".join(f" --{name} {value}" for name, value in (("device", asked.device), ("only", asked.only)) if value)
    print(f"seed {seed}: python -m tests.faults --seed {seed}{how}\n")
    print(f"{'':6} {'fault':52} {'expected':42} {'s':>6}  points  happened", flush=True)
    every, wholes = [], {}
    for number in numbers:
        fault, expected, _ = ROWS[number]
        happened, seconds = tried(number, seed, wholes, asked.device)
        every.append(happened)
        words = " ".join(happened.words.split())
        print(f"{number:6} {fault:52} {expected:42} {seconds:6.1f}  {happened.points:>6}  {words[:200]}", flush=True)
    found = tally(every)
    points = sum(each.points for each in every)
    print(f"\n{points} of {2 * len(every)} points; " + ", ".join(f"{count} {name}" for name, count in found.items()))
    return int(any(found.values()) or any(each.points == 0 for each in every))


if __name__ == "__main__":
    sys.exit(main())
