"""The command line, as a user meets it: real processes, their words and their exit codes."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file

from meshfit.version import VERSION
from tests import command

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import meshfit

with open("executed", "a") as counter:  # no guard: nothing imports this again
    counter.write(f"{__name__} {sys.argv[1:]}\\n")

torch.manual_seed(0)
x, y = torch.randn(24, 6), torch.randn(24, 3)
LOSS
result = meshfit.fit(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    (x, y),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    batch_size=8,
    epochs=2,
    devices="cpu",
)
print("plan", result.plan, "loss", result.history[-1].loss)
"""
PLAIN = SCRIPT.replace("LOSS", "loss = F.mse_loss")


def meshfit(folder: Path, script: str | None, *arguments: str) -> CompletedProcess[str]:
    if script is not None:
        (folder / "train.py").write_text(script)
    return command.meshfit(folder, *arguments)


def executed(folder: Path) -> list[str]:
    return (folder / "executed").read_text().splitlines()


def test_python_m_meshfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["meshfit", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("meshfit", run_name="__main__")
    assert capsys.readouterr().out == f"meshfit {VERSION}\n"


def test_train_runs_a_script_once_under_another_plan(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.py").write_text(PLAIN)
    alone = runpy.run_path("alone.py", run_name="__main__")["result"]
    (tmp_path / "executed").unlink()
    (tmp_path / "train.py").write_text(PLAIN)
    asked = ["train", "train.py", "--plan", "data=2", "--out", "run", "--", "--size", "3"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    fresh = [sys.executable, "-c", "from meshfit.cli import main; main()", *asked]
    spread = subprocess.run(fresh, env=environ, capture_output=True, text=True, timeout=120)
    assert spread.returncode == 0, spread.stderr
    assert executed(tmp_path) == ["__main__ ['--size', '3']"]
    assert str(alone.plan) == "data=1"
    assert spread.stdout.startswith("plan data=2 loss ")
    assert float(spread.stdout.split()[-1]) == pytest.approx(alone.history[-1].loss, rel=1e-5)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plan"] == "data=2"
    assert load_file(tmp_path / "run" / "weights.safetensors")["0.weight"].shape == torch.Size([8, 6])


def test_verify_proves_a_plan_and_trains_nothing(tmp_path: Path):
    done = meshfit(tmp_path, PLAIN, "verify", "train.py", "--plan", "data=2", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "data=2 trains like one device" in done.stdout
    assert "plan data" not in done.stdout  # the script went no further than its fit
    for name in ("loss", "gradient norm", "gradients", "weights"):
        assert any(line.split()[: len(name.split())] == name.split() for line in done.stdout.splitlines()), name
    assert executed(tmp_path) == ["__main__ []"]


WRONG = PLAIN.replace("nn.Linear(8, 3))", "nn.Linear(8, 3), Wrong())").replace(
    "loss = F.mse_loss",
    """import numpy as np
import torch.distributed as dist
class Wrong(nn.Module):
    def forward(self, x):
        return DO
loss = F.mse_loss""",
)


def test_verify_names_what_differs(tmp_path: Path):
    script = WRONG.replace("DO", "x + 0.1 if dist.is_initialized() else x")
    done = meshfit(tmp_path, script, "verify", "train.py", "--plan", "data=2")
    assert done.returncode == 1
    assert "data=2 does not train like one device" in done.stdout
    assert "differs from step 1 on" in next(line for line in done.stdout.splitlines() if "loss" in line)
    assert "first: 0.weight" in next(line for line in done.stdout.splitlines() if line.split()[:1] == ["gradients"])
    assert "the first to differ is the output of 3" in done.stdout
    assert "Traceback" not in done.stderr


def test_verify_says_when_it_cannot_tell(tmp_path: Path):
    script = WRONG.replace("DO", "x * float(np.random.default_rng().random())").replace("F.mse_loss", "F.cross_entropy")
    done = meshfit(tmp_path, script, "verify", "train.py", "--plan", "data=2")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "data=2 may or may not train like one device" in done.stdout


def test_no_error_of_verify_looks_like_an_answer(tmp_path: Path):
    assert meshfit(tmp_path, PLAIN, "verify", "train.py", "--plan", "dta=2").returncode == 2
    broken = meshfit(tmp_path, WRONG.replace("DO", "x.nothing"), "verify", "train.py", "--plan", "data=2")
    assert broken.returncode == 2
    assert "nothing" in broken.stderr


def test_a_wrong_plan_is_one_block_and_exit_code_2(tmp_path: Path):
    done = meshfit(tmp_path, PLAIN, "train", "train.py", "--plan", "dta=2")
    assert done.returncode == 2
    assert done.stderr == "meshfit: the plan has no key 'dta'\n  did you mean data?\n"
    assert done.stdout == ""


def test_a_checkpoint_that_is_not_there_is_one_block_and_exit_code_2(tmp_path: Path):
    for verb in ("show", "list", "verify", "prune"):
        done = meshfit(tmp_path, None, "checkpoint", verb, "nowhere")
        assert done.returncode == 2, verb
        assert done.stderr.startswith("meshfit: there is no ")
        assert "nowhere" in done.stderr
        assert "Traceback" not in done.stderr


DIES = """import os, signal, torch.distributed as dist
def loss(outputs, targets):
    if dist.is_initialized() and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return F.mse_loss(outputs, targets)"""


def test_train_is_told_how_a_run_survives(tmp_path: Path):
    for option, value in (("--grace", "soon"), ("--hang-timeout", "soon"), ("--preemption", "notice")):
        done = meshfit(tmp_path, PLAIN, "train", "train.py", option, value)
        assert done.returncode == 2, done.stderr
        assert f"{option[2:].replace('-', '_')}=" in done.stderr
    killed = PLAIN.replace("loss = F.mse_loss", DIES)
    done = meshfit(
        tmp_path,
        killed,
        "train",
        "train.py",
        "--plan",
        "data=2",
        "--out",
        "run",
        "--checkpoint",
        "1 steps",
        "--restarts",
        "0",
    )
    assert done.returncode == 1
    assert "rank 1 was killed by signal 9" in done.stderr
    assert "started again" not in done.stderr


def test_a_script_that_is_not_there_or_calls_no_fit(tmp_path: Path):
    missing = meshfit(tmp_path, None, "train", "nowhere.py")
    assert missing.returncode == 2
    assert missing.stderr.startswith("meshfit: there is no script nowhere.py\n")
    without = meshfit(tmp_path, "print('hello')", "train", "train.py")
    assert without.returncode == 2
    assert without.stdout == "hello\n"
    assert without.stderr.startswith("meshfit: train.py ended without its meshfit.fit\n  it called fit 0 times\n")


def test_one_of_several_fits_is_chosen(tmp_path: Path):
    twice = PLAIN + PLAIN[PLAIN.index("result =") :]
    done = meshfit(tmp_path, twice, "train", "train.py", "--plan", "data=2", "--fit", "2")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["data=1", "data=2"]


def test_a_script_may_catch_exceptions_around_its_fit(tmp_path: Path):
    careful = PLAIN.replace("result =", "try:\n  result =").replace(
        "print(", "except Exception as error:\n  print('swallowed', type(error))\nif 0: print("
    )
    done = meshfit(tmp_path, careful, "verify", "train.py", "--steps", "1", "--plan", "data=2")
    assert "swallowed" not in done.stdout
    assert done.returncode == 0, done.stderr


def test_the_users_own_exception_keeps_its_traceback(tmp_path: Path):
    done = meshfit(tmp_path, "def broken():\n    raise KeyError('mine')\n\nbroken()\n", "train", "train.py")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert 'train.py", line 2, in broken' in done.stderr
