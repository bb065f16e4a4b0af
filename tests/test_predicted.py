"""What a plan should hold and move, predicted by its cost, stands beside what it held and moved."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit import Cluster
from meshfit.observe.beside import beside_tables, learned, step_items
from meshfit.observe.page_data import page_data
from meshfit.observe.reading import read

STEPS = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def fit(out: Path, plan: str) -> Path:
    data = torch.randn(48, 64), torch.randn(48, 64)
    result = meshfit.fit(
        lambda: nn.Sequential(Block(), Block()),
        data,
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        batch_size=12,
        steps=STEPS,
        plan=plan,
        devices="cpu",
        out=out,
    )
    assert result.folder is not None
    return result.folder


@pytest.mark.parametrize("plan", ["data=2", "shard=2 zero=2", "tensor=2", "pipeline=2 microbatches=2"])
def test_predicted_is_measured(plan: str, tmp_path: Path) -> None:
    run = read(fit(tmp_path / "run", plan))
    _, table = beside_tables(run)
    rows = {name: (number(told), number(got)) for name, told, got, _ in table["rows"]}
    assert {"weights", "gradients", "optimizer"} <= rows.keys()
    assert any(name.endswith("a step") for name in rows)
    for name, (told, got) in rows.items():  # a gather of the first step may come before it
        assert got == pytest.approx(told, rel=1.1 / STEPS if name == "all-gather a step" else 0.01), name
    timed = step_items(run)
    (told, got), items = timed.pop("step"), list(timed.values())
    assert {"computing", "optimizer", "all else"} <= timed.keys()
    assert ("bubble" in timed) == plan.startswith("pipeline")
    assert sum(each[0] for each in items) == pytest.approx(told, rel=1e-3)
    assert sum(each[1] for each in items) == pytest.approx(got, rel=0.05)


def test_a_run_teaches_how_fast_the_machine_is(tmp_path: Path) -> None:
    run = read(fit(tmp_path / "run", "data=1"))
    told, got = step_items(run)["computing"]
    found, times = learned(run)
    assert times == pytest.approx(got / told)
    before = Cluster.of(run.about["predicted"]["cluster"])
    device = found.accelerator
    assert device.rates["fp32"] == pytest.approx(before.accelerator.rates["fp32"] / times)
    assert device.launch == pytest.approx(before.accelerator.launch * times)
    assert learned(run) == (found, times)  # again, it is no slower
    run.about["predicted"].pop("items")
    with pytest.raises(meshfit.JobError, match="says nothing"):
        learned(run)


def test_what_cannot_be_predicted_leaves_no_table(tmp_path: Path) -> None:
    run = read(fit(tmp_path / "run", "data=1"))
    assert "flops_a_sample" in run.about
    run.about.pop("predicted")
    assert not any("redicted" in table["title"] for table in page_data(run)["tables"])


def number(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"B": 1, "KiB": 1024, "MiB": 1024**2}[unit]
