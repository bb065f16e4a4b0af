"""``fit(checkpoint=..., resume=...)``: stopped or killed, a training goes on at the very sample, under any plan."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.checkpoint import CheckpointError
from tests.command import Forked
from tests.few import diagonal, more

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 4))


def fit(out: Path | None = None, steps: int = 12, plan: str = "data=1", **asked: Any) -> meshfit.Result:
    given = {
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "scheduler": lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
        "batch_size": 6,  # of 40 samples: epochs of seven batches, the last of four
        "steps": steps,
        "plan": plan,
        "out": out,
        "clip": 1.0,
        "ema": 0.9,
    }
    return meshfit.fit(network, **{"data": (X, Y), **given, **asked})


def weights(result: meshfit.Result) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in result.model.state_dict().items()}


PLANS = ["data=1", "data=2", "shard=2", "tensor=2", "pipeline=2 microbatches=2"]


@pytest.mark.parametrize(("first", "second"), diagonal(PLANS, PLANS[1:]))
def test_goes_on_under_any_plan(first: str, second: str, tmp_path: Path) -> None:
    whole = fit(steps=12)
    begun = fit(tmp_path / "run", steps=5, plan=first, checkpoint=100)
    assert [step.step for step in begun.history] == [1, 2, 3, 4, 5]
    rest = fit(tmp_path / "run", steps=12, plan=second, checkpoint=100, resume=True)
    assert [step.step for step in rest.history] == list(range(6, 13))
    assert any("from step 5" in note for note in rest.notes), rest.notes
    want = [step.loss for step in whole.history]
    assert [step.loss for step in (*begun.history, *rest.history)] == pytest.approx(want, rel=1e-5)
    assert [step.lr for step in rest.history] == [step.lr for step in whole.history[5:]]
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(rest)[name], tensor, atol=1e-5, rtol=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert not (tmp_path / "run-2").exists()


def test_workers_of_servers_draw_what_they_would_have_drawn(tmp_path: Path) -> None:
    """One of them saves; what a batch draws follows from its number, not from where generators stand."""
    drop = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    begin = {name: tensor.clone() for name, tensor in drop.state_dict().items()}
    given: dict[str, Any] = {"loss": F.mse_loss, "batch_size": 6, "plan": "server=1 data=2"}
    given["optimizer"] = lambda params: torch.optim.AdamW(params, lr=1e-2)
    found = []
    for out, steps in ((None, (10,)), (tmp_path / "run", (5, 10))):
        result: Any = None
        for last in steps:
            drop.load_state_dict(begin)
            saves: dict[str, Any] = {} if out is None else {"out": out, "checkpoint": 5, "resume": last == 10}
            result = meshfit.fit(drop, (X, Y), steps=last, **given, **saves)
        found.append(weights(result))
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name])


@pytest.mark.parametrize("exchange", ["local", more("diloco")])
def test_local_steps_go_on_with_the_states_of_one_rank(exchange: str, tmp_path: Path) -> None:
    """Each rank has its own. A first moment of one beside a second moment of another makes steps of any length."""
    plan = f"data=2 exchange={exchange} every=5"
    whole = fit(steps=15, plan=plan)
    fit(tmp_path / "run", steps=10, plan=plan, checkpoint=100)
    rest = fit(tmp_path / "run", steps=15, plan=plan, checkpoint=100, resume=True)
    want = [step.loss for step in whole.history[10:]]  # of the first rank, until all meet
    assert [step.loss for step in rest.history] == pytest.approx(want, rel=1e-5)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
import time
from tests.test_resume import fit
def slowly(step):
    time.sleep(0.05)
if __name__ == "__main__":
    fit(Path({out!r}), steps=40, plan={plan!r}, checkpoint=1, each_step=slowly)
"""


@pytest.mark.parametrize("plan", [more("data=2"), "shard=2"])
def test_killed_and_resumed_is_never_stopped(plan: str, tmp_path: Path) -> None:
    """To the last bit, under the same plan."""
    out, root = tmp_path / "run", str(Path(__file__).parents[1])
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=root, out=str(out), plan=plan))
    process = Forked(script)
    until = time.monotonic() + 90
    while len(list(out.glob("checkpoints/*/manifest.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = fit(out, steps=40, plan=plan, checkpoint=100, resume=True)
    assert 2 <= resumed.history[0].step <= 40
    never = fit(steps=40, plan=plan)
    for name, tensor in weights(never).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*-step-*"))


@pytest.mark.parametrize("plan", ["data=1", "shard=2"])
def test_the_newest_stay_and_the_best(plan: str, tmp_path: Path) -> None:
    """A learning rate that ruins the weights from step 5 on: the best evaluation is an early one, and stays. A resumed
    run knows it, and what it has saved before counts."""
    ruined = lambda optimizer, _: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 4 else 500.0)
    asked: dict[str, Any] = {"plan": plan, "valid": (X, Y), "valid_every": 2, "scheduler": ruined, "ema": None}
    asked |= {"checkpoint": 3, "keep": 2, "keep_best": "-loss"}
    fit(tmp_path / "run", steps=9, **asked)
    assert folders(tmp_path / "run") == ["0003-step-4", "0004-step-6", "0005-step-9"]
    fit(tmp_path / "run", steps=15, resume=True, **asked)
    assert folders(tmp_path / "run") == ["0003-step-4", "0006-step-12", "0007-step-15"]
    whole = fit(steps=4, **{name: asked[name] for name in ("plan", "scheduler", "ema")})
    best = network()
    meshfit.load_weights(best, tmp_path / "run" / "checkpoints" / "0003-step-4")
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(best.state_dict()[name], tensor)
    fit(tmp_path / "run", steps=16, resume=True, **{**asked, "keep": 1, "keep_best": None})
    assert folders(tmp_path / "run") == ["0008-step-16"]


def test_one_that_could_not_be_loaded_does_not_count(tmp_path: Path) -> None:
    """keep=2 after a damaged one: what the run went on from stays beside the new one."""
    fit(tmp_path / "run", steps=4, checkpoint=2)
    damage(tmp_path / "run" / "checkpoints" / "0002-step-4")
    fit(tmp_path / "run", steps=5, checkpoint=100, resume=True, keep=2)
    assert folders(tmp_path / "run") == ["0001-step-2", "0002-step-4", "0003-step-5"]


def damage(checkpoint: Path) -> None:
    tensors = next(checkpoint.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-9] ^= 1
    tensors.write_bytes(content)


def test_resume_without_a_checkpoint_begins(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", steps=2, resume=True)
    assert len(result.history) == 2
    assert any("from the beginning" in note for note in result.notes)


def test_resume_from_a_path(tmp_path: Path) -> None:
    fit(tmp_path / "one", steps=3, checkpoint=1)
    other = fit(tmp_path / "two", steps=5, resume=tmp_path / "one")
    assert [step.step for step in other.history] == [4, 5]
    assert not (tmp_path / "two" / "checkpoints").exists()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    fit(tmp_path / "run", steps=4, checkpoint=2)
    damage(tmp_path / "run" / "checkpoints" / folders(tmp_path / "run")[-1])
    rest = fit(tmp_path / "run", steps=6, checkpoint=100, resume=True)
    assert [step.step for step in rest.history] == [3, 4, 5, 6]
    assert any("skipped" in note for note in rest.notes), rest.notes


def test_another_model_is_refused(tmp_path: Path) -> None:
    fit(tmp_path / "run", steps=2, checkpoint=1)
    how = {"loss": F.mse_loss, "optimizer": torch.optim.AdamW, "batch_size": 6, "steps": 4}
    with pytest.raises(CheckpointError):
        meshfit.fit(nn.Linear(8, 4), (X, Y), out=tmp_path / "run", resume=True, **how)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"checkpoint": 5}, "needs out="),
        ({"resume": True}, "needs out="),
        ({"checkpoint": "often"}, "not understood"),
        ({"keep": 0}, "above 0"),
        ({"keep_best": "-loss"}, "needs valid="),
        ({"keep_best": "-loss", "valid": (X, Y)}, "needs checkpoint="),
        ({"best": "accuracy", "valid": (X, Y)}, "not measured"),
    ],
)
def test_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(meshfit.JobError, match=says):
        fit(None, **asked)
