"""meshfit doctor: what it says of this machine is true, and what is wrong is said with its remedy."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshfit.launch import machine
from tests.command import meshfit


def test_it_tells_this_machine(tmp_path: Path) -> None:
    done = meshfit(tmp_path, "doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == int(any(each["broken"] for each in told["problems"]))
    assert told["cores"] == len(os.sched_getaffinity(0))
    assert told["memory"]["total"] >= told["memory"]["available"] > 0
    gloo = next(each for each in told["speeds"] if each["backend"] == "gloo")
    assert gloo["ranks"] == 2
    assert gloo["bytes_a_second"] > 1e5
    assert 0 < gloo["seconds"] < 60


def test_it_tells_people(tmp_path: Path) -> None:
    done = meshfit(tmp_path, "doctor", "--quick")
    assert "torch" in done.stdout
    assert "open files" in done.stdout
    assert done.returncode == int("something is broken" in done.stdout)


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "shared_memory": {"total": 2**40, "free": 2**40},
        "temporary": {"path": "/tmp", "free": 2**40},
        "descriptors": {"soft": 65536, "hard": 65536},
        "gpus": [],
        "links": [],
    } | changes


def test_a_sound_machine_has_no_problems() -> None:
    assert not list(machine.problems(facts()))


@pytest.mark.parametrize(
    ("changes", "what", "fix", "broken"),
    [
        ({"shared_memory": {"total": 2**21, "free": 2**20}}, "/dev/shm has 1 MiB free of 2 MiB", "--shm-size", False),
        ({"shared_memory": {"total": 2**21, "free": 0}, "gpus": [{}, {}], "links": [(0, 1)]}, "/dev/shm", "shm", True),
        ({"descriptors": {"soft": 64, "hard": 4096}}, "may open 64 files", "ulimit -n 4096", True),
        ({"temporary": {"path": "/tmp", "free": 10}}, "/tmp has 10 B free", "TMPDIR", False),
        ({"gpus": [{}, {}]}, "not all GPUs", "topo", False),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(changes: dict[str, Any], what: str, fix: str, broken: bool) -> None:
    (found,) = machine.problems(facts(**changes))
    assert what in found.what
    assert fix in found.fix
    assert found.broken is broken


def test_a_folder_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", lambda: open("/nowhere/x", "wb"))  # noqa: SIM115
    monkeypatch.setenv("MESHFIT_LARGEST_PICTURE", "many")
    first, second = machine.problems(facts())
    assert "cannot be written" in first.what
    assert "MESHFIT_LARGEST_PICTURE='many' is no number" in second.what
