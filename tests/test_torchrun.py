"""Under torchrun ``fit`` takes the world it is given: the same script, the same training, on every rank."""

import socket
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests import command

SCRIPT = """
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshfit

rank = int(os.environ.get("RANK", 0))
folder = sys.argv[1]
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(22, 2, 4, 4, generator=generator), torch.randint(3, (22,), generator=generator)
torch.manual_seed(1 + rank)  # every rank builds other weights: the first rank's count
model = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
)
seen = []
right = lambda outputs, targets: (outputs.argmax(1) == targets).float()
asked = {"loss": F.cross_entropy, "batch_size": 7, "devices": "cpu"}
sgd = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
result = meshfit.fit(
    model, (x, y), optimizer=sgd, epochs=2, valid=(x, y), metrics={"right": right},
    callbacks=[lambda step: seen.append(step.step)], out=os.path.join(folder, "run"), **asked,
)
stopped = nn.Linear(32, 3)
torch.nn.init.constant_(stopped.weight, 0.1 * (rank + 1))
torch.nn.init.zeros_(stopped.bias)
stop = lambda step: "stop" if step.step == 2 else None
short = meshfit.fit(stopped, (x.flatten(1), y), optimizer=sgd, epochs=2, each_step=[stop], **asked)
long = {"steps": 10**7, "plan": "auto microbatches=2", "each_step": [stop]}
searching = meshfit.fit(nn.Linear(32, 3), (x.flatten(1), y), optimizer=sgd, **long, **asked)
torch.save(
    {
        "searched": (str(searching.plan), searching.notes),
        "losses": [step.loss for step in result.history], "weights": model.state_dict(), "seen": seen,
        "plan": str(result.plan), "metrics": result.metrics, "phases": len(result.phases),
        "evaluated": meshfit.evaluate(model, (x, y), metrics={"right": right}, **asked),
        "predicted": meshfit.predict(model, (x, y), batch_size=7, devices="cpu"),
        "stopped": (short.steps, stopped.state_dict()),
    },
    os.path.join(folder, f"{rank}.pt"),
)
"""


def run(folder: Path, *before: str) -> CompletedProcess[str]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environ = {"OMP_NUM_THREADS": "1", "MESHFIT_CACHE": str(folder.parent / "cache")}
    return command.run(*before, script, folder, folder=folder, timeout=180, **environ)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[dict], Path]:
    """What the script found in one plain process, and in both ranks of torchrun; and torchrun's folder."""
    folder = tmp_path_factory.mktemp("torchrun")
    alone = run(folder / "alone")
    assert alone.returncode == 0, alone.stderr
    spread = run(folder / "spread", *command.TORCHRUN)
    assert spread.returncode == 0, spread.stderr
    found = [torch.load(folder / "spread" / f"{rank}.pt") for rank in range(2)]
    return torch.load(folder / "alone" / "0.pt"), found, folder / "spread"


def test_fit_returns_on_every_rank_with_the_same_weights(worlds):
    _, (first, second), _ = worlds
    assert first["plan"] == second["plan"] == "data=2"
    assert first["phases"] == 2
    assert first["losses"] == second["losses"]
    assert first["seen"] == second["seen"] == list(range(1, 9))
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name]), name


def test_it_trains_like_one_device(worlds):
    alone, (first, _), _ = worlds
    torch.testing.assert_close(first["losses"], alone["losses"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first["weights"], alone["weights"], atol=1e-4, rtol=1e-4)


def test_evaluating_and_predicting_give_every_rank_everything(worlds):
    alone, ranks, _ = worlds
    for found in ranks:
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
        assert found["evaluated"] == pytest.approx(found["metrics"], rel=1e-4)
        torch.testing.assert_close(found["predicted"], alone["predicted"], atol=1e-4, rtol=1e-4)


def test_a_stop_ends_all_ranks_after_the_same_step(worlds):
    (steps, weights), ranks = worlds[0]["stopped"], worlds[1]
    for found in ranks:
        assert found["stopped"][0] == steps == 2
        torch.testing.assert_close(found["stopped"][1], weights, atol=1e-4, rtol=1e-4)


def test_the_ranks_write_one_folder(worlds):
    folder = worlds[2]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["run"]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 8


def test_the_first_rank_measures_searches_and_says_why(worlds):
    _, (first, second), folder = worlds
    plan, said = first["searched"]
    assert second["searched"] == (plan, said)
    assert "microbatches=2" in plan
    assert any("plans looked at" in line for line in said)
    kept = next((folder.parent / "cache").glob("cluster-*-cpu.json"))
    assert "measured" in kept.read_text()
