"""Small runs with random faults, for so many minutes: each ends bit by bit as without, or stops with a true sentence.

    python benchmarks/chaos.py --minutes 60
    python benchmarks/chaos.py --minutes 5 --seed 7 --plans "data=2,server=1 data=2"

Faults: kill, stop, segfault, raise, exit, a slow rank, no memory, no descriptors, at a random rank, step and phase; a
full disk under the run's folder; jumps of the clock (clock.c, where there is a C compiler). Plans: data, shard, tensor,
pipeline, server. Where a worker of servers is lost, the others share its samples, and sums are rounded otherwise: then
losses are compared, within LIMIT_OF_LOSSES (and the model has no dropout, which others would draw otherwise). Of
asynchronous servers the numbers of steps and samples are. The seed is printed: the same one makes the same runs.
Exit code 1 if a run hung, left a process, came out otherwise, or stopped without a sentence.
"""

import argparse
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.inject import PHASES
from tests.faults.table import STEPS
from tests.faults.watch import Outcome, run

PLANS = ("data=2", "shard=2", "tensor=2", "pipeline=2", "server=1 data=2", "server=1 data=2 staleness=2")
KINDS = ("kill", "stop", "segfault", "raise", "exit", "sleep", "memory", "descriptors", "disk", "clock")
LIMIT = 300.0
LIMIT_OF_LOSSES = 1e-4  # relative
JUMPS, JUMP_AFTER = (7200, -7200, 30 * 86400), 8  # seconds


def drawn(
    draw: random.Random, folder: Path, kinds: list[str], plans: list[str]
) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A fault in words, the job with it, and the environment."""
    plan, kind = draw.choice(plans), draw.choice(kinds)
    rank, step, phase = draw.randrange(2), draw.randrange(5, STEPS - 2), draw.choice(PHASES)
    asked: dict[str, Any] = {"plan": plan, "steps": STEPS, "out": str(folder / "run"), "checkpoint": 10}
    asked |= plain(plan)
    environ: dict[str, str] = {}
    if kind == "disk":
        _small_disk(folder / "run", draw.choice(("60k", "120k", "400k")))
    elif kind == "clock":
        at, by = int(time.monotonic()) + JUMP_AFTER, draw.choice(JUMPS)
        environ = {"LD_PRELOAD": str(built(folder)), "JUMP_AT": str(at), "JUMP_BY": str(by)}
        asked["step_seconds"] = 0.2  # so that it is at work by then
    else:
        asked["fault"] = {"kind": kind, "rank": rank, "step": step, "phase": phase, "mark": str(folder / "mark")}
        asked["fault"]["seconds"] = 2.0
    return f"{kind:12} {plan:28} rank {rank} step {step:3} {phase}", asked, environ


def plain(plan: str) -> dict[str, Any]:
    """Of the job, where a lost worker's samples may be another's."""
    return {"dropout": 0.0} if "server" in plan else {}


def built(folder: Path) -> Path:
    source, library = Path(__file__).with_name("clock.c"), folder / "clock.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def _small_disk(folder: Path, size: str) -> None:
    """A folder with little room, which checkpoints and events fill."""
    folder.mkdir()
    how = ["-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    subprocess.run(["mount", *how], check=True, capture_output=True)


def _mounts() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True).returncode == 0
        if done:
            subprocess.run(["umount", folder], check=True)
    return done


def judged(outcome: Outcome, want: dict[str, Any], plan: str) -> str:
    if outcome.hung:
        return "HUNG"
    if outcome.orphans:
        return "ORPHANS"
    if outcome.code != 0:
        return "stopped" if outcome.says and "meshfit: " in outcome.err else "UNCLEAR"
    got = outcome.result
    if got["digest"] == want["digest"]:
        return "identical"
    counted = got["steps"] == want["steps"] and got["samples"] == want["samples"]
    if "staleness" in plan:
        return "complete" if counted else "WRONG"
    lost = any(" was lost at step " in note for note in got["notes"])
    near = all(
        abs(got["losses"].get(step, math.inf) - loss) < LIMIT_OF_LOSSES * abs(loss)
        for step, loss in want["losses"].items()
    )
    return "equal" if counted and lost and near else "WRONG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    draw, plans, kinds = random.Random(seed), given.plans.split(","), given.kinds.split(",")
    left_out = [kind for kind, there in (("clock", shutil.which("cc")), ("disk", _mounts())) if not there]
    kinds = [kind for kind in kinds if kind not in left_out]
    print(f"seed {seed}; left out, since it is not here: {', '.join(left_out) or 'nothing'}", flush=True)
    wholes = {plan: run({"plan": plan, "steps": STEPS, **plain(plan)}, limit=LIMIT).result for plan in plans}
    assert all(wholes.values()), "a run without faults fails"
    until, tally = time.monotonic() + 60 * given.minutes, Counter[str]()
    listeners = 0
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="meshfit-chaos-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            words, asked, environ = drawn(draw, folder, kinds, plans)
            outcome = run(asked, limit=LIMIT, **environ)
            subprocess.run(["umount", "-l", str(folder / "run")], capture_output=True)
        verdict = judged(outcome, wholes[asked["plan"]], asked["plan"])
        tally[verdict] += 1
        listeners += len(outcome.open_ports)
        said = "" if outcome.code == 0 else outcome.says[:100]
        print(f"{sum(tally.values()):4} {words:75} {outcome.seconds:6.1f} s  {verdict}  {said}", flush=True)
    print(f"\n{sum(tally.values())} runs: " + ", ".join(f"{count} {name}" for name, count in sorted(tally.items())))
    print(f"{listeners} non-loopback listeners")
    return int(listeners > 0 or any(name.isupper() for name in tally))


if __name__ == "__main__":
    sys.exit(main())
