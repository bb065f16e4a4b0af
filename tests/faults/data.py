"""C3. Data and numerics."""

import os
import re
import signal
import subprocess
import sys

from tests.faults.table import DIED, LIMIT, Given, Happened, fault, injected, recovered, row, several, stopped, tests
from tests.faults.watch import ROOT, Watched, run

SMALL = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=2m none /dev/shm && exec "$@"', "sh")
"""Before a command: it sees a /dev/shm of 2 MB."""


@row("34", "kill -9 twice in one epoch, at an epoch's edge; readers", "identical")
def epochs(given: Given) -> Happened:
    def twice(watched: Watched) -> None:
        for word in ("step 23", "step 27"):
            if watched.wait_for(word, LIMIT / 2) and (ranks := watched.ranks()):
                os.kill(ranks[0], signal.SIGKILL)

    every = []
    for workers in (0, "2 processes"):
        asked = given.protected("data=2", step_seconds=0.05, workers=workers)
        every.append(recovered(run(asked, limit=LIMIT, act=twice), given.whole("data=2"), "was killed by signal 9"))
    edge = {"step": 31, "phase": "data"}  # ten batches an epoch
    return several([*every, injected(given, "kill", "was killed by signal 9", DIED, **edge)])


tests(
    "35-36",
    "dropout and unequal draws; NaN in one rank's gradient",
    "identical; all decide together",
    "tests/test_resume.py",
    "tests/test_update.py",
)


@row("36b", "NaN in one rank's gradient", "all stop in that step, which is named")
def not_a_number(given: Given) -> Happened:
    at = fault(given, "nan", phase="data", mark="")
    outcome = run(given.protected("data=2", fault=at), limit=LIMIT)
    return stopped(
        outcome, rf"step {at['step']}: the gradient's norm is nan\n[^\n]*samples [^\n]+\n[^\n]*weights are as"
    )


@row("37", "a bit of a weight flips in rank 1 of three", "the rank is named, weights identical")
def flipped(given: Given) -> Happened:
    says = "rank 1 holds other (weights|optimizer state) than ranks 0 and 2"
    at = fault(given, "flip", rank=1, phase="forward_backward", step=given.draw.randrange(22, 50))
    outcome = run(given.protected("data=3", fault=at, check_replicas=5), limit=LIMIT)
    named = any(re.search(says, note) for note in outcome.notes)
    same = outcome.result.get("weights") == given.whole("data=3")["weights"]
    words = f"weights {'identical' if same else 'differ'}; {'; '.join(outcome.notes[:1]) or outcome.says}"
    silent = int(outcome.code == 0 and not same)
    return Happened(2 if same and named else int(same), words, [outcome], silent)  # losses until then were reported


tests("38", "damaged pictures, rows, files", "stops with file and row, or skips and counts", "tests/test_data_bad.py")
tests(
    "39",
    "a bucket that fails: 500, 503, resets, short bodies",
    "tried again, or names the key",
    "tests/test_data_cloud.py",
)
tests(
    "40-41",
    "a database that drops connections; forked readers",
    "goes on at the key; no password",
    "tests/test_data_sql.py",
)


@row("42", "other data where a run is resumed", "refused, with both fingerprints")
def changed(given: Given) -> Happened:
    asked = given.protected("data=2")
    before = run({**asked, "steps": 20}, limit=LIMIT)
    after = run({**asked, "resume": True, "data_seed": 6}, limit=LIMIT)
    found = stopped(after, r"the data is not that of the run to be resumed; fingerprint was [^\n]+; now it is")
    return Happened(found.points if before.code == 0 else 0, found.words, [before, after], found.silent)


@row("42b", "a /dev/shm of 2 MB, readers in processes", "identical; doctor names the size and the fix")
def little_shared_memory(given: Given) -> Happened:
    outcome = run(given.protected("data=2", workers="2 processes"), limit=LIMIT, before=SMALL)
    found = recovered(outcome, given.whole("data=2"))
    doctor = [*SMALL, sys.executable, "-c", "from meshfit.cli import main; main()", "doctor", "--quick"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    said = subprocess.run(doctor, capture_output=True, text=True, timeout=LIMIT, env=environ)
    told = "/dev/shm has 2 MiB free of 2 MiB" in said.stdout and "--shm-size" in said.stdout
    words = f"{found.words}; doctor {'names it' if told else 'is silent'}"
    return Happened(min(found.points, 2 if told else 1), words, [outcome], found.silent)
