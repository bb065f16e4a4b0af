"""C1. Processes."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.faults.job import HANG
from tests.faults.table import (
    DIED,
    HUNG,
    LIMIT,
    RAISED,
    Given,
    Happened,
    fault,
    injected,
    recovered,
    resumed_like,
    row,
    several,
    stopped,
    tests,
)
from tests.faults.watch import ROOT, Watched, run

KILLED = r"was killed by signal 9"
HANGS = r"rank \d hangs in step \d+"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
GONE_SECONDS = 2.0  # after a second Ctrl-C


@row("1", "kill -9 of a random rank, three times", "identical")
def killed(given: Given) -> Happened:
    return several([injected(given, "kill", KILLED, DIED) for _ in range(3)])


@row("2", "kill -9 of rank 0", "identical")
def killed_first(given: Given) -> Happened:
    return injected(given, "kill", f"rank 0 {KILLED}", DIED, rank=0)


@row("2b", "a segmentation fault, under shard=2", "identical")
def crashed(given: Given) -> Happened:
    return injected(given, "segfault", "SIGSEGV", DIED, plan="shard=2")


@row("2c", "kill -9 of one device in a rank of its own", "identical")
def killed_alone(given: Given) -> Happened:
    return injected(given, "kill", f"rank 0 {KILLED}", DIED, "data=1", "cpu:1..1", rank=0, phase="update")


@row("2d", "kill -9 of a rank of torchrun, --max-restarts", "goes on identically")
def killed_under_torchrun(given: Given) -> Happened:
    """torchrun starts the ranks again, and its store listens on all interfaces."""
    asked = given.protected("data=2", fault=fault(given, "kill"), resume=True)
    outcome = run(asked, limit=LIMIT, python=TORCHRUN, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    outcome.open_ports.clear()
    same = outcome.result.get("weights") == given.whole("data=2")["weights"]
    again = [note for note in outcome.notes if "from step" in note]
    words = f"weights {'identical' if same else f'differ, {outcome.says}'}; {'; '.join(again) or 'not started again'}"
    return Happened(2 if same and again else 0, words, [outcome], silent=int(outcome.code == 0 and not same))


@row("3", "kill -9 of the caller", "nothing is left after 5 s")
def killed_caller(given: Given) -> Happened:
    def kill(watched: Watched) -> None:
        if watched.wait_for("step 5", LIMIT / 2):
            watched.process.kill()

    outcome = run(given.protected("data=2", step_seconds=0.05, workers="2 processes"), limit=LIMIT, act=kill)
    left = len(outcome.orphans)
    return Happened(2 if outcome.code == -signal.SIGKILL and not left else 0, f"{left} processes left", [outcome])


@row("4", "SIGSTOP of a rank", "named, ended, identical")
def paused(given: Given) -> Happened:
    return injected(given, "stop", HANGS, HUNG)


@row("5", "a rank holds Python's lock in C", "named, ended, identical")
def held(given: Given) -> Happened:
    return injected(given, "gil", HANGS, HUNG)


@row("6", "a rank runs in circles", "named, ended, identical")
def circles(given: Given) -> Happened:
    return injected(given, "loop", HANGS, HUNG)


@row("7", "a rank raises, once", "named with its error, identical")
def raised(given: Given) -> Happened:
    return injected(given, "raise", r"rank \d raised Injected: in step \d+", RAISED)


@row("7b", "a rank raises each time", "stops: rank, error, line")
def raised_again(given: Given) -> Happened:
    asked = given.protected("data=2", fault=fault(given, "raise", mark="", rank=1))
    return stopped(run(asked, limit=LIMIT), r"rank 1 raised Injected: in step \d+, \w+")


@row("8", "a rank leaves by sys.exit(0)", "identical; said to have left")
def left(given: Given) -> Happened:
    return injected(given, "exit", r"rank 1 left at step \d+", DIED, rank=1)


@row("9", "Ctrl-C", "saved, exit code 130, goes on identically")
def interrupted(given: Given) -> Happened:
    asked = given.protected("data=2", step_seconds=0.05)
    outcome = run(asked, limit=LIMIT, act=lambda watched: _interrupt(watched, after="step 25"))
    if outcome.code not in (130, -signal.SIGINT):  # a shell says 130 of one that SIGINT ended
        return stopped(outcome, "never", points=1)
    resumed = run({**asked, "resume": True, "step_seconds": 0.0}, limit=LIMIT)
    return resumed_like(given, outcome, resumed)


def _interrupt(watched: Watched, after: str = "step") -> None:
    if watched.wait_for(after, LIMIT / 2):
        watched.process.send_signal(signal.SIGINT)


@row("9b", "Ctrl-C twice", f"all others gone in {GONE_SECONDS:g} s, the caller in as much CPU time")
def interrupted_twice(given: Given) -> Happened:
    """The caller is Python, with torch: what it takes to leave is its own, and longer where cores are busy."""
    others, caller, used = [0.0], math.nan, 0.0

    def twice(watched: Watched) -> None:
        nonlocal caller, used
        if not watched.wait_for("step 5", LIMIT / 2):
            return
        _interrupt(watched)
        time.sleep(0.3)
        process = psutil.Process(watched.process.pid)
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        _interrupt(watched)
        while (left := watched.pids()) and time.monotonic() - began < LIMIT / 2:
            if left != [process.pid]:
                others.append(time.monotonic() - began)
            with suppress(psutil.Error):
                used = max(used, sum(process.cpu_times()[:2]) - before)
            time.sleep(0.02)
        caller = time.monotonic() - began

    outcome = run(given.protected("data=2", step_seconds=0.6), limit=LIMIT, act=twice)
    good = not outcome.hung and outcome.code != 0 and not outcome.orphans and caller < LIMIT / 2
    soon = others[-1] <= GONE_SECONDS and used <= GONE_SECONDS
    words = f"others gone after {others[-1]:.1f} s, the caller after {caller:.1f} ({used:.1f} of CPU time)"
    return Happened(0 if not good else 2 if soon else 1, f"exit code {outcome.code}; {words}", [outcome])


@row("10", "SIGTERM of one rank: in step 1, a step, an evaluation", "saved, exit code 143, goes on identically")
def terminated(given: Given) -> Happened:
    every: list[Happened] = []
    for at in ({"step": 1}, {"step": given.draw.randrange(22, 50)}, {"step": 25, "phase": "evaluate"}):
        at = {"phase": "forward_backward"} | at
        asked = given.protected("data=2", fault=fault(given, "terminate", **at), valid_every=5, step_seconds=0.05)
        outcome = run(asked, limit=LIMIT)
        found = resumed_like(
            given, outcome, run({**asked, "resume": True, "fault": None, "step_seconds": 0.0}, limit=LIMIT)
        )
        points = min(found.points, 2 if outcome.code == 143 else 1)
        every.append(Happened(points, f"exit code {outcome.code}; {found.words}", found.outcomes, found.silent))
    return several(every)


@row("11", "killed in the same step each time", "stops after three tries, and says so")
def hopeless(given: Given) -> Happened:
    asked = given.protected("data=2", fault=fault(given, "kill", mark="", step=30))
    return stopped(run(asked, limit=LIMIT), r"started again 3 times from [^\n]*no newer checkpoint")


@row("12", "a limit on memory, in rank 1", "said to be out of memory; identical")
def starved(given: Given) -> Happened:
    return injected(given, "memory", "rank 1 ran out of memory", RAISED, rank=1, phase="forward_backward")


@row("12b", "no descriptors left, in rank 1, each time", "identical, or stops with a sentence")
def without_descriptors(given: Given) -> Happened:
    outcome = run(given.protected("data=2", fault=fault(given, "descriptors", rank=1, mark="")), limit=LIMIT)
    if outcome.code == 0:
        return recovered(outcome, given.whole("data=2"))
    return stopped(outcome, "Too many open files|rank 1")


@row("13", "a reader of data: kill -9; SIGSTOP", "the reader is named, identical")
def readers(given: Given) -> Happened:
    def harm(number: int) -> Callable[[Watched], None]:
        def act(watched: Watched) -> None:
            if watched.wait_for("step 23", LIMIT / 2) and (found := watched.readers()):
                os.kill(given.draw.choice(found), number)

        return act

    every = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        asked = given.protected("data=2", step_seconds=0.05, workers="2 processes")
        outcome = run(asked, limit=LIMIT, act=harm(number))
        every.append(recovered(outcome, given.whole("data=2"), r"data worker \d+ \(process \d+\)"))
    return several(every)


@row("14", "a rank is slow for 25 steps", "goes on, identical; named within 20 steps")
def slow(given: Given) -> Happened:
    at = fault(given, "sleep", rank=1, step=10, steps=25, seconds=0.3, mark="", phase="forward_backward")
    outcome = run(given.protected("data=2", fault=at), limit=LIMIT)
    found = recovered(outcome, given.whole("data=2"))
    named = re.search(r"rank 1 is slower than the others: in steps \d+ to (\d+)", "\n".join(outcome.notes))
    soon = named is not None and int(named[1]) - at["step"] <= 20
    words = f"{found.words}; {named[0] if named else 'not named'}"
    return Happened(min(found.points, 2 if soon else 1), words, [outcome], found.silent)


@row("15", "a rank calls another collective", "both are named, identical")
def mismatched(given: Given) -> Happened:
    says = "ranks call different collectives: rank 0: all_reduce of .*; rank 1: broadcast of"
    return injected(given, "collective", says, HANG, rank=1, phase="forward_backward")


@row("16", "1,001 and 1,009 samples over 2 ranks in batches of 16", "each once an epoch, and in evaluations")
def uneven(given: Given) -> Happened:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.uneven"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    return Happened(2 if done.returncode == 0 else 0, (done.stdout or done.stderr).strip().splitlines()[-1])


tests(
    "17-19",
    "servers: a worker dies, a server dies, an answer is lost",
    "go on; applied once",
    "tests/test_server.py",
    "tests/test_server_async.py",
)


@row("20", "a minute of mixed faults, 10 s apart on average", "identical, nothing left behind")
def soak(given: Given) -> Happened:
    command = [sys.executable, "benchmarks/recovery.py", "--soak", "60", "--mean", "10"]
    watched = Watched([*command, "--seed", str(given.draw.randrange(10**6))])
    outcome = watched.end(2 * LIMIT)
    if outcome.hung or outcome.code != 0:
        return Happened(0, "hangs" if outcome.hung else outcome.says, [outcome], silent=int("DIFFERENT" in outcome.out))
    return Happened(
        2, "; ".join(line for line in outcome.out.splitlines() if line.startswith(("soak", "eff"))), [outcome]
    )
