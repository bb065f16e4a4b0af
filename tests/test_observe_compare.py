"""Runs side by side."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshfit.observe.compare import compared, picture, run_names, table
from meshfit.observe.reading import read
from tests.command import meshfit
from tests.recorded import folder

SCRIPT = """
import torch, torch.nn.functional as F, meshfit
from torch import nn
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(4, (64,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
meshfit.fit(model, (X, Y), loss=F.cross_entropy, optimizer=torch.optim.SGD, batch_size=16, epochs=3, valid=(X, Y))
print("not reached")
"""


def test_plans_of_a_script_are_put_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plans = "data=1; data=2; shard=2; data=2 pipeline=9 schedule=none"
    done = meshfit(tmp_path, "compare", "train.py", "--plans", plans, "--steps", "6", "--devices", "cpu")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "not reached" not in text
    assert text.count("equal") == 2  # from the same weights, over the same samples, dropout off
    assert "was left out" in text
    tree = ElementTree.parse(tmp_path / "runs" / "compare" / "compare.svg")
    texts = ["".join(e.itertext()) for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"data=1", "data=2", "shard=2", "the reference", "losses equal"} <= set(texts)
    assert (tmp_path / "runs" / "compare" / "data=2" / "report.html").is_file()


def test_a_script_needs_plans(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = meshfit(tmp_path, "compare", "train.py")
    assert done.returncode == 2
    assert "needs plans" in done.stderr


def test_runs_are_compared_as_they_are(tmp_path: Path) -> None:
    folder(tmp_path / "a", [{}, {}], plan="data=2")
    folder(tmp_path / "b", [{}, {}], plan="shard=2", step=0.2, loss=2.1)
    done = meshfit(tmp_path, "compare", "a", "b")
    assert done.returncode == 0, done.stderr
    assert "differ by 5.0e-02" in done.stdout
    ElementTree.parse(tmp_path / "compare.svg")


def test_a_row_says_what_a_run_came_to(tmp_path: Path) -> None:
    alone = read(folder(tmp_path / "a", [{}], plan="data=1"))
    within = [("forward", 0.0, 0.02, {"microbatch": 0}), ("backward", 0.04, 0.02, {"microbatch": 0})]
    staged = read(folder(tmp_path / "b", [{"exchange": 0.01}] * 2, plan="pipeline=2", within=within))
    first, second = compared([alone, staged])
    assert first.rate == pytest.approx(640)
    assert first.traffic == 0.0
    assert math.isnan(second.traffic)  # nobody counted
    assert second.equal
    assert second.waited == pytest.approx(0.01 / 0.1 + 0.04 / 0.1, abs=0.01)  # for ranks, and in the bubble
    assert second.busy == pytest.approx(0.04 / 0.1 + 0.01 / 0.1, abs=0.01)


def test_runs_of_one_plan_are_called_by_folder(tmp_path: Path) -> None:
    runs = [read(folder(tmp_path / name, [{}])) for name in ("a", "b")]
    assert run_names(runs) == ["a: data=2", "b: data=2"]


def test_names_and_plans_are_text(tmp_path: Path) -> None:
    run = read(folder(tmp_path / "a", [{}], plan="<b>[red]x"))
    console = Console(width=160, record=True, quiet=False)
    console.print(table(compared([run])))
    assert "<b>[red]x" in console.export_text()
    ElementTree.fromstring(picture([run]))
