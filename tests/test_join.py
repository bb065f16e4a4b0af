"""Workers that join a run of another host: real processes over TCP, one that is let in and others that are not."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from servers import free_port, wait_for
from torch import Tensor, nn

import meshfit
from meshfit.data.datasets import open_source
from meshfit.errors import JobError, MeshfitError, PlanError, RankError
from meshfit.job import Job
from meshfit.server import join as joined
from meshfit.server.fingerprint import differences, facts_of
from meshfit.server.join import addresses
from meshfit.server.wire import connect
from meshfit.step import Step
from tests.command import MESHFIT, Forked
from tests.few import more

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import meshfit

torch.manual_seed(0)
x = torch.randn(50, 8)
y = (x[:, 0] > 0).long()
joins = "COMING" in os.environ


def loss(outputs, targets):
    time.sleep(0.01)
    Path(os.environ["COMING"]).touch() if joins else None
    return F.cross_entropy(outputs, targets)


taken = []


def watch(step):
    taken.append(step.step)
    while step.step in (10, 60) and not joins and not Path(f"go{step.step}").exists():
        time.sleep(0.01)
    return "stop" if joins and len(taken) == 5 else None


def build():
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.0), nn.Linear(16, 2))


result = meshfit.fit(build, (x, y), loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), batch_size=10,
                     steps=120, seed=3, plan=sys.argv[1], devices="cpu", each_step=watch, progress=False)
print(*result.notes, sep="\\n")
print("steps", taken[0], taken[-1])
"""

torch.manual_seed(0)
X = torch.randn(50, 8)
Y = (X[:, 0] > 0).long()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.0), nn.Linear(16, 2))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Slow; tells that a worker which is about to join has tried its loss."""
    time.sleep(0.01)
    if path := os.environ.get("COMING"):
        Path(path).touch()
    return F.cross_entropy(outputs, targets)


def fit(**how: Any) -> meshfit.Result:
    defaults = {"model": build, "data": (X, Y), "loss": loss, "batch_size": 10, "steps": 120, "seed": 3}
    defaults |= {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2), "devices": "cpu", "progress": False}
    return meshfit.fit(**(defaults | how))


def free_ports() -> int:
    """The first of two."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", port + 1))
            return port


class Host:
    """A run of ``plan`` that listens, and waits for a file after its 10th step, and again after its 60th."""

    def __init__(self, folder: Path, plan: str):
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        self.folder, self.plan = folder, plan
        self.at = f"127.0.0.1:{free_ports()}"
        self.process = self.start("train", "train.py", "--listen", self.at, "--out", "run", "--", plan)
        assert self.process.stderr is not None
        lines = [self.process.stderr.readline() for _ in range(3)]
        assert lines[0].startswith("meshfit: workers may join"), lines
        self.command = lines[1].split()
        self.key = lines[2].split()[-1]
        wait_for(int(self.at.rpartition(":")[2]), process=self.process)

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
        command = [sys.executable, "-c", "from meshfit.cli import main; main()", *arguments]
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environ, **how)

    def join(self) -> Forked:
        """By the very command that was printed."""
        return Forked(*MESHFIT, *self.command[1:], folder=self.folder, MESHFIT_KEY=self.key, COMING="coming10")

    def go(self, step: int) -> None:
        """On from ``step``, when one is about to join."""
        coming, end = self.folder / f"coming{step}", time.monotonic() + 60
        while not coming.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        (self.folder / f"go{step}").touch()

    @property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.folder / "run" / "weights.safetensors")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    found = Host(tmp_path_factory.mktemp("host"), "server=2 data=2")
    yield found
    found.close()


@pytest.fixture
def key(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIT_KEY", host.key)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "PATIENCE", 0.2)


def refusal(**how: Any) -> str:
    with pytest.raises(JobError) as error:
        fit(**how)
    return str(error.value)


# What is turned away while the run goes on


def test_who_has_another_key_is_turned_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIT_KEY", "not-the-key-of-this-run")
    assert refusal(join=host.at).startswith(f"the run at {host.at} has another key")
    monkeypatch.setenv("MESHFIT_KEY", "short")
    assert "16 at least" in refusal(join=host.at)
    monkeypatch.delenv("MESHFIT_KEY")
    assert "none was given" in refusal(join=host.at)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("x" * 32)
    monkeypatch.setenv("MESHFIT_KEY_FILE", str(tmp_path / "key"))
    for mode in (0o604, 0o640):
        (tmp_path / "key").chmod(mode)
        assert "chmod 600" in refusal(join="127.0.0.1:7000")


def test_where_nobody_listens(key: None) -> None:
    assert refusal(join=f"127.0.0.1:{free_port()}").startswith("no run listens at 127.0.0.1:")
    assert refusal(join="somewhere").startswith("'somewhere' is no place")


DIFFERENT = {
    "batch_size: 10 there, 20 here": {"batch_size": 20},
    "seed: 3 there, 4 here": {"seed": 4},
    "samples in data=: 50 there, 40 here": {"data": (X[:40], Y[:40])},
    "data=: tensors: (50, 8) float32, (50,) int64, values ": {"data": (X + 1, Y)},
    "model: 0.weight float32 16x8 there, 0.weight float32 32x8 here": {"model": lambda: nn.Linear(8, 2)},
    "loss=: loss there, cross_entropy here": {"loss": F.cross_entropy},
}


@pytest.mark.parametrize("said", DIFFERENT)
def test_another_job_is_told_what_differs(said: str, host: Host, key: None) -> None:
    how = DIFFERENT[said]
    if "model" in how:
        wide = lambda: nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 2))
        how = {"model": lambda: nn.Sequential(*wide())}
    found = refusal(join=host.at, **how)
    assert found.startswith(f"this job is not that of the run at {host.at}")
    assert said in found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("join", {"job": 5}),
        ("join", {"job": None}),
        ("join", {"job": {"model": "x", "tensors": 5}}),
        ("join", {"job": {"held": [["a"]], "few": "b"}}),
        ("hello", {}),
        ("hello", {"layout": [], "version": "1", "incarnation": ""}),
        ("push", {"loss": "x"}),
    ],
)
def test_one_that_makes_no_sense_is_refused_alone(kind: str, words: dict[str, Any], host: Host) -> None:
    (address,) = addresses(host.at, 1)
    wire = connect(address, host.key.encode())
    wire.send(kind, words=words)
    answer = wire.recv(timeout=30)
    wire.close()
    assert answer.kind == "error"
    assert joined.ask(host.at, host.key.encode())["plan"] == host.plan  # and the run goes on
    assert host.process.poll() is None


def test_another_version_is_told_so(host: Host, key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfit.drive.ranked.VERSION", "9.9")
    assert "here" in (found := refusal(join=host.at))
    assert found.startswith(f"the run at {host.at} is of another version")
    wire = connect(f"tcp:{host.at}", host.key.encode())
    monkeypatch.setattr("meshfit.server.wire.PROTOCOL", 9)
    wire.send("join")
    with pytest.raises(MeshfitError, match="speaks protocol 3, this one 9"):
        wire.recv(timeout=5)
    wire.close()


def test_frozen_weights_of_its_own_are_refused() -> None:
    def facts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = build()
        model.get_submodule("0").requires_grad_(False)
        return facts_of(Job(model=model, data=(X, Y), loss=loss, batch_size=10), model, open_source((X, Y)))

    assert not list(differences(facts(0), facts(0)))
    (told,) = differences(facts(0), facts(1))
    assert told.startswith("model: 0.weight is not trained, and holds other values")


def test_a_key_is_nowhere_to_be_seen(host: Host) -> None:
    processes = [psutil.Process(host.process.pid), *psutil.Process(host.process.pid).children(recursive=True)]
    assert len(processes) >= 6  # the caller, its template, two workers, two servers
    assert not any(host.key in " ".join(process.cmdline()) for process in processes)
    files = [path for path in (host.folder / "run").rglob("*") if path.is_file()]
    assert files
    assert not any(host.key.encode() in path.read_bytes() for path in files)


# Who is let in


def test_joins_in_the_middle_and_leaves(host: Host, key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is there for five steps, by the command line; another comes and stays; the weights are those of one device.
    BatchNorm is over the samples of all of them."""
    leaves = host.join()
    host.go(10)
    their, error = leaves.communicate(timeout=60)
    assert leaves.returncode == 0, error
    monkeypatch.setenv("COMING", str(host.folder / "coming60"))
    going = threading.Thread(target=host.go, args=[60])
    going.start()
    stays = fit(join=host.at)
    going.join()
    said, error = host.process.communicate(timeout=60)
    assert host.process.returncode == 0, error
    first, last = map(int, their.split("steps ")[1].split())
    assert 10 < first < last < 120
    assert re.search(r"worker 2 joined after step \d+, from 127.0.0.1", said)
    assert re.search(rf"worker 2 left after step {last}\b|worker 2 left after step {last + 1}\b", said)
    assert "worker 3 joined after step" in said
    assert "lost" not in said
    assert stays.history[-1].step == 120
    assert str(stays.plan) == "server=2 data=2"
    alone = fit(plan="data=1", loss=F.cross_entropy)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(host.weights[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
        torch.testing.assert_close(stays.model.state_dict()[name], host.weights[name], msg=name)


def test_a_run_that_is_over_cannot_be_joined(host: Host, key: None) -> None:
    host.process.wait(60)
    assert refusal(join=host.at).startswith(f"no run listens at {host.at}")


def slow(coming: Path | None = None, dies: int = 0) -> Any:
    """A loss, which tells that it was tried; the worker whose ``dies``-th forward it is kills itself."""
    calls: list[None] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.01)
        if coming is not None:
            coming.touch()
        calls.extend([None] * outputs.requires_grad)
        if dies and len(calls) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(outputs, targets)

    return loss


@pytest.mark.parametrize("plan", ["server=2 data=1", more("server=1 data=1 staleness=4")])
def test_one_that_joined_is_killed(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that join, of which one dies in the middle of a step; the other leaves, and the run is the host's alone."""
    at, marks = f"127.0.0.1:{free_ports()}", [tmp_path / "one", tmp_path / "other"]
    monkeypatch.setenv("MESHFIT_KEY", "x" * 32)
    monkeypatch.setattr(joined, "PATIENCE", 20.0)

    def wait(step: Step) -> None:
        while step.step == 10 and not all(mark.exists() for mark in marks):
            time.sleep(0.01)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(fit, plan=plan, listen=at, loss=slow(), each_step=wait)
        stop = lambda step: "stop" if step.step > 60 else None
        leaving = pool.submit(fit, join=at, loss=slow(marks[0]), callbacks=stop)
        dying = pool.submit(fit, join=at, loss=slow(marks[1], dies=12))
        with pytest.raises(RankError, match="rank 0 was killed by signal 9"):
            dying.result(60)
        left, result = leaving.result(60), running.result(60)
    said = "\n".join(result.notes)
    assert len(re.findall(r"worker [12] joined after step", said)) == 2, said
    assert len(re.findall(r"worker [12] was lost at step", said)) == plan.count("server=1") + 2 * plan.count("server=2")
    assert len(re.findall(r"worker [12] left after step", said)) == 1, said
    assert result.history[-1].step == 120
    assert left.history[-1].step < 120
    if "staleness" not in plan:
        alone = fit(plan="data=1", loss=F.cross_entropy)
        for name, tensor in alone.model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


# What cannot be


def test_refuses_to_listen() -> None:
    with pytest.raises(PlanError, match="workers join model servers, and data=2 has none"):
        fit(plan="data=2", listen="127.0.0.1:7000")
    assert refusal(plan="server=1 data=2", listen="7000").startswith("'7000' is no place to listen")
    assert "cannot be had" in refusal(plan="server=1 data=2", listen="203.0.113.1:7000")
