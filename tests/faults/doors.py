"""C4. Configuration, network, files."""

import threading

from tests.faults.table import LIMIT, Given, Happened, recovered, row, several, tests
from tests.faults.watch import Outcome, run

tests(
    "43",
    "500 random wrong configurations",
    "one block each, exit code 2, no traceback",
    "tests/test_wrong_arguments.py",
)


@row("43b", "two runs at once", "both identical")
def two_at_once(given: Given) -> Happened:
    want, found = given.whole("data=2"), list[Outcome]()
    every = [given.protected("data=2")]
    every.append({**every[0], "out": every[0]["out"] + "-other"})
    threads = [threading.Thread(target=lambda one=one: found.append(run(one, limit=LIMIT))) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return several([recovered(outcome, want) for outcome in found])


tests(
    "44",
    "hostile files: pickles, bombs, names that climb out",
    "nothing runs, nothing is written outside, little memory",
    "tests/test_hostile_files.py",
    "tests/test_checkpoint_outside.py",
    "tests/test_checkpoint_faults.py::test_a_manifest_names_no_file_elsewhere",
    "tests/test_checkpoint_faults.py::test_a_manifest_that_was_signed_again_is_looked_at",
)
tests(
    "45b",
    "strangers at a server's port; bytes between ranks",
    "closed; the run goes on",
    "tests/test_doors.py",
    "tests/test_wire.py",
    "tests/test_encoding.py",
    "tests/test_join.py",
)
tests("46", "the web view: hosts, origins, paths, slow viewers", "refused; training unaffected", "tests/test_watch.py")


@row("45", "who listens, under five plans", "nothing beyond loopback")
def doors(given: Given) -> Happened:
    plans = ("data=2", "shard=2", "tensor=2", "pipeline=2", "server=1 data=2")
    outcomes = [run({"plan": plan, "steps": 30, "step_seconds": 0.05}, limit=LIMIT) for plan in plans]
    open_ports = [port for outcome in outcomes for port in outcome.open_ports]
    ended = sum(outcome.code == 0 for outcome in outcomes)
    return Happened(2 if not open_ports and ended == len(plans) else 0, f"{len(open_ports)} open ports", outcomes)
