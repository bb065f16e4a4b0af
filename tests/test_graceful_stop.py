"""Asked to end, by Ctrl-C, SIGTERM or a file: a training ends after a step, saved, and goes on as if never stopped."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.test_resume import X, Y, fit, weights

SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_resume import fit

if __name__ == "__main__":
    def began(step):
        Path({out!r}, "began").touch()
        time.sleep(0.02)

    fit(Path({out!r}), steps=3000, plan={plan!r}, checkpoint=100_000, each_step=[began])
    print("to the end")
"""


def started(tmp_path: Path, plan: str) -> tuple[subprocess.Popen, Path]:
    """A training some steps in."""
    out, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[1]), out=str(out), plan=plan))
    process = subprocess.Popen([sys.executable, str(script)], stdout=-1, stderr=-1, text=True)
    until = time.monotonic() + 120
    while not (out / "began").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return process, out


@pytest.mark.parametrize(("plan", "number"), [("data=1", signal.SIGINT), ("data=2", signal.SIGTERM)])
def test_a_signal_saves_and_ends(plan: str, number: signal.Signals, tmp_path: Path) -> None:
    process, out = started(tmp_path, plan)
    process.send_signal(number)
    said, told = process.communicate(timeout=120)
    assert "to the end" not in said
    assert "ends after this step, saved" in told
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number), told
    assert not (out / "stop").exists()
    (saved,) = out.glob("checkpoints/*/manifest.json")
    step = int(saved.parent.name.rpartition("-")[2])
    assert step < 3000
    resumed = fit(out, steps=step + 5, plan=plan, checkpoint=100_000, resume=True)
    assert resumed.history[0].step == step + 1
    never = fit(steps=step + 5, plan=plan)
    for name, tensor in weights(never).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process, out = started(tmp_path, "data=2")
    process.send_signal(signal.SIGTERM)
    while not (out / "stop").exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    process.communicate()


def test_a_file_ends_it_too(tmp_path: Path) -> None:
    def ask(step: object) -> None:
        (tmp_path / "run" / "stop").touch()
        time.sleep(0.05)

    ended = fit(tmp_path / "run", steps=10_000, plan="data=2", checkpoint=100_000, each_step=[ask])
    last = ended.history[-1].step
    assert last < 10_000
    assert any(f"ended after step {last}, as asked" in note for note in ended.notes)
    assert len(list(tmp_path.glob("run/checkpoints/*/manifest.json"))) == 1


def test_without_checkpoints_signals_are_as_ever(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    fit(steps=2, callbacks=[lambda step: seen.append(signal.getsignal(signal.SIGTERM))])
    assert seen == [before] * 2
    fit(tmp_path / "run", steps=2, checkpoint=1, callbacks=[lambda step: seen.append(signal.getsignal(signal.SIGTERM))])
    assert before not in seen[2:]
    assert signal.getsignal(signal.SIGTERM) == before


STARTING = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_resume import X, Y, fit

def slow():
    (Path({out!r}).parent / "starting").touch()
    time.sleep(60)
    return X, Y

if __name__ == "__main__":
    fit(Path({out!r}), steps=3, plan={plan!r}, checkpoint=1, data=slow)
    print("to the end")
"""


@pytest.mark.parametrize(
    ("plan", "number", "before"),
    [
        ("data=2", signal.SIGTERM, []),
        ("data=1", signal.SIGINT, []),
        ("data=2", signal.SIGTERM, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    ],
    ids=["SIGTERM", "Ctrl-C", "torchrun"],
)
def test_a_signal_while_it_starts_ends_it_at_once(
    plan: str, number: signal.Signals, before: list[str], tmp_path: Path
) -> None:
    out, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(STARTING.format(root=str(Path(__file__).parents[1]), out=str(out), plan=plan))
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # where tests run behind a shell, it is ignored
    process = subprocess.Popen(
        [sys.executable, *before, str(script)], stdout=-1, stderr=-1, text=True, preexec_fn=heard
    )
    until = time.monotonic() + 120
    while not (tmp_path / "starting").exists() and time.monotonic() < until:
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    said, told = process.communicate(timeout=50)
    assert "to the end" not in said
    assert "ends now, it was still starting" in told
    assert "saved;" not in told
    if not before:
        assert process.returncode == (128 + number if number == signal.SIGTERM else -number), told
    assert process.returncode != 0
    assert not (out / "stop").exists()
    assert not list(out.glob("checkpoints/*-step-*"))
    psutil.wait_procs(below, timeout=10)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in below)


def test_a_file_made_while_it_starts_ends_it_after_a_step(tmp_path: Path) -> None:
    def slow() -> tuple[torch.Tensor, torch.Tensor]:
        if not (tmp_path / "asked").exists():
            (tmp_path / "run" / "stop").touch()
        (tmp_path / "asked").touch()
        return X, Y

    ended = fit(tmp_path / "run", steps=100_000, plan="data=2", checkpoint=100_000, data=slow)
    assert any("as asked" in note for note in ended.notes)
    assert not (tmp_path / "run" / "stop").exists()


def test_a_file_of_before_ends_nothing(tmp_path: Path) -> None:
    fit(tmp_path / "run", steps=2, checkpoint=1)
    (tmp_path / "run" / "stop").touch()
    ended = fit(tmp_path / "run", steps=60, checkpoint=1000, resume=True, callbacks=[lambda step: time.sleep(0.02)])
    assert ended.history[-1].step == 60
