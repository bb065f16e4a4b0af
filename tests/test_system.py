"""Where a system cannot do all that Linux can: what it lacks is taken away here, in a process of its own, and the rest
must work. That is not the system itself: what was tried where is in docs/launch.md."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.axes.refuse import check_device
from meshfit.data.cache import Cache
from meshfit.exchange.update import total_norm
from meshfit.launch.devices import Devices
from meshfit.launch.system import lock_file, read_at
from meshfit.plan import Plan

WINDOWS = """
import builtins, os, signal, socket, sys, types
import torch, torch._dynamo, torch.distributed, numpy, psutil, pyarrow, rich.progress  # they know their system

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
for module, names in {
    os: "fork sched_getaffinity memfd_create preadv pread pwrite getuid killpg setsid register_at_fork getppid",
    signal: "SIGKILL SIGUSR1 SIGCHLD pthread_sigmask",
    socket: "AF_UNIX send_fds recv_fds",
}.items():
    for name in names.split():
        if hasattr(module, name) and name != "getppid":
            delattr(module, name)
locked = []
sys.modules["msvcrt"] = types.SimpleNamespace(locking=lambda *asked: locked.append(asked), LK_NBLCK=2)

import meshfit
import meshfit.observe.folder
meshfit.observe.folder.predict = lambda training: {}
from torch import nn
import torch.nn.functional as F
X, Y = torch.randn(24, 4), torch.randn(24, 2)
how = dict(loss=F.mse_loss, optimizer=torch.optim.SGD, batch_size=8, out=sys.argv[1], checkpoint=2)
one = meshfit.fit(nn.Linear(4, 2), (X, Y), steps=4, valid=(X, Y), **how)
two = meshfit.fit(nn.Linear(4, 2), (X, Y), steps=6, resume=True, workers=2, **how)
assert [step.step for step in two.history] == [5, 6], two
assert (two.folder / "report.html").exists()
assert {asked[1:] for asked in locked} == {(2, 1)}
for asked in ({"plan": "data=2"}, {"workers": "processes"}):
    try:
        meshfit.fit(nn.Linear(4, 2), (X, Y), steps=2, **{**how, "out": None, "checkpoint": None, **asked})
    except meshfit.MeshfitError as error:
        print(error)
"""


def test_one_device_without_fork_sockets_and_locks_of_posix(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", WINDOWS, str(tmp_path / "run")]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "has no fork" in done.stdout
    assert 'plan="data=1"' in done.stdout
    assert 'workers="threads" works' in done.stdout


def test_ranks_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: memory between processes is a file that has no name."""
    monkeypatch.delattr("os.memfd_create")
    monkeypatch.delattr("os.sched_getaffinity")
    data = torch.randn(24, 4), torch.randn(24, 2)
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": torch.optim.SGD, "batch_size": 8, "steps": 3, "seed": 1}
    one, two = (meshfit.fit(lambda: nn.Linear(4, 2), data, plan=plan, **how) for plan in ("data=1", "data=2"))
    assert [step.loss for step in two.history] == pytest.approx([step.loss for step in one.history])


def test_reading_at_a_place_without_preadv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "file").write_bytes(content)
    monkeypatch.delattr("os.preadv")
    with (tmp_path / "file").open("rb") as file:
        for start, size in ((0, 7), (100, 2000), (2550, 100), (9999, 5)):
            buffer = bytearray(size)
            count = read_at(file.fileno(), memoryview(buffer), start)
            assert bytes(buffer[:count]) == content[start : start + size]


def test_a_lock_between_threads(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        assert lock_file(one.fileno(), threads=True)
        assert not lock_file(other.fileno(), patience=0.2, threads=True)
    made: list[str] = []
    cache = Cache(tmp_path / "cache")
    threads = [threading.Thread(target=cache.folder, args=("key", lambda path: made.append(str(path)))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_what_apples_gpus_have_not() -> None:
    mps = Devices("mps", (0,))
    check_device(Plan(), nn.Linear(2, 2), mps)
    with pytest.raises(meshfit.JobError, match=r"(?s)weight is in float64.*model.float\(\)"):
        check_device(Plan(), nn.Linear(2, 2).double(), mps)
    with pytest.raises(meshfit.PlanError, match="precision=bf16"):
        check_device(Plan(precision="fp16"), nn.Linear(2, 2), mps)
    check_device(Plan(precision="fp16"), nn.Linear(2, 2).double(), Devices("cuda", (0,)))


def test_norms_where_there_is_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.ones(3), torch.ones(6, dtype=torch.bfloat16)]
    assert total_norm(gradients).dtype == torch.float64
    monkeypatch.setattr("meshfit.transfer.NO_FLOAT64", ("cpu",))
    assert total_norm(gradients).dtype == torch.float32
    assert total_norm(gradients).item() == 3.0
