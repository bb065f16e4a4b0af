"""The exchange axis through ``fit``: model servers, in step and apart, and local steps."""

import contextlib
import json
import math
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.axes.data import batchnorm
from meshfit.checkpoint.files import open_files
from meshfit.checkpoint.manifest import folders
from meshfit.checkpoint.write import RankSave
from meshfit.data.order import Ids, share
from meshfit.errors import DataError, NonFiniteError, PlanError, RankError
from meshfit.plan import Plan
from meshfit.step import Step
from meshfit.verify import Verdict
from tests import small
from tests.few import every_other, more
from tests.small import SCHEDULED, X, Y, assert_same, assert_same_training, losses, slowly


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


fit = partial(small.fit, model=build)


@pytest.mark.parametrize(
    ("plan", "how"),
    every_other(["server=1 data=3", "server=2 data=2", "server=1 data=2 microbatches=2", "server=1"], [{}, SCHEDULED]),
)
def test_servers_in_step_train_like_one_device(plan: str, how: dict[str, Any]) -> None:
    alone, spread = fit("data=1", **how), fit(plan, **how)
    assert_same_training(spread, alone)


def test_batchnorm_is_over_all_workers_in_step() -> None:
    data = (X[:48], Y[:48])  # a batch of two over three workers would leave one without a variance
    alone, spread = (fit(plan, model=with_batchnorm, data=data) for plan in ("data=1", "server=1 data=3"))
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert_same(spread, alone)


def test_meetings_cost_what_they_are_said_to(tmp_path: Path) -> None:
    fit("server=1 data=2", model=with_batchnorm, data=(X[:48], Y[:48]), out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "events" / "rank1.jsonl").read_text().splitlines()]
    told = [line["moved"]["meet"] for line in lines if "meet" in line.get("moved", {})]
    model = with_batchnorm()
    trace = SimpleNamespace(buffers=dict(model.named_buffers()), parameters={"": SimpleNamespace(dtype="float32")})
    cost = batchnorm.cost(trace, 2, 1, served=True)  # type: ignore[arg-type]
    assert [sum(each) for each in zip(*told, strict=True)] == [12 * cost.calls["meet"], 12 * cost.moved["meet"]]


def test_best_weights_and_patience() -> None:
    how = {"valid": (X, Y), "valid_every": 1, "best": "-loss", "patience": 2, "steps": 40}
    how["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=8.0)  # goes astray
    alone, spread = fit("data=1", **how), fit("server=1 data=2", **how)
    assert len(spread.history) == len(alone.history) < 40
    assert_same(spread, alone, 1e-3)


def test_a_stop_leaves_the_weights_of_that_step() -> None:
    def stop(step: Step) -> str | None:
        return "stop" if step.step == 5 else None

    alone, spread = fit("data=1", steps=5), fit("server=2 data=2", each_step=stop)
    assert len(spread.history) == 5
    assert_same(spread, alone)


def test_a_loop_of_ones_own() -> None:
    model = build()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    how = {"loss": F.cross_entropy, "batch_size": 12, "steps": 12, "seed": 3, "devices": "cpu"}
    how["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    for step in meshfit.steps(model, (X, Y), plan="server=1 data=2", **how):
        if step.step == 4:
            break
    other = build()
    other.load_state_dict(start)
    alone = meshfit.fit(other, (X, Y), plan="data=1", progress=False, **(how | {"steps": 4}))
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


@pytest.mark.parametrize(
    "plan", ["server=1 data=2 lost=average", "server=1 data=2 staleness=2", "data=2 exchange=diloco every=4"]
)
def test_evaluates_and_predicts(plan: str) -> None:
    model = build()
    want = meshfit.evaluate(model, (X, Y), loss=F.cross_entropy, plan="data=1", devices="cpu")
    got = meshfit.evaluate(model, (X, Y), loss=F.cross_entropy, plan=plan, devices="cpu")
    assert got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(meshfit.predict(model, X, plan=plan, devices="cpu"), model(X).detach())


def test_local_steps_on_one_device_are_its_own() -> None:
    assert_same(fit("data=1 exchange=local every=4"), fit("data=1"))


@pytest.mark.parametrize("plan", ["server=1 data=2 staleness=2", "server=2 data=3 staleness=inf late=damp"])
def test_apart_every_gradient_is_a_step(plan: str, tmp_path: Path) -> None:
    rates: list[float] = []
    result = fit(
        plan,
        steps=None,
        epochs=2,
        data=(X[:48], Y[:48]),
        valid=(X, Y),
        out=tmp_path / "run",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4),
        callbacks=lambda step: rates.append(step.lr),
    )
    workers = Plan.parse(plan).data
    assert [step.step for step in result.history] == list(range(1, 8 * workers + 1))  # 48 samples: four batches of 12
    assert max(step.samples for step in result.history) == 96
    assert all(step.staleness is not None for step in result.history)
    if "staleness=2" in plan:
        assert max(step.staleness or 0 for step in result.history) <= 4
    assert {f"{rate:.0e}" for rate in rates} == {"1e-02", "1e-03"}  # after four batches, however many gradients
    assert result.metrics["loss"] < 0.69
    assert result.folder is not None
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness"] for line in sorted(lines, key=lambda line: line["step"])] == [
        step.staleness for step in result.history
    ]
    events = (result.folder / "events" / "rank1.jsonl").read_text()
    assert '"scalar": "staleness"' in events


def test_compressed_gradients_train_nearly_alike() -> None:
    alone = fit("data=1", steps=30)
    for word in ("bf16", "int8"):
        assert losses(fit(f"server=1 data=2 compress={word}", steps=30)) == pytest.approx(losses(alone), rel=0.05)


# Local steps


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, squares])  # a mean over targets, and over samples
def test_averaged_every_step_is_one_device(loss: Any) -> None:
    how = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2), "loss": loss}
    assert_same(fit("data=3 exchange=local", **how), fit("data=1", **how))


@pytest.mark.parametrize("plan", ["data=2 exchange=local every=4", "data=2 exchange=diloco every=4 overlap=1"])
def test_local_steps_learn(plan: str) -> None:
    data = (X[:48], Y[:48])  # each rank has two samples at least: BatchNorm is over its own
    result = fit(plan, data=data, valid=(X, Y), valid_every=10, steps=30, model=with_batchnorm)
    measured = [step.valid["loss"] for step in result.history if step.valid]
    assert measured[0] > measured[-1] > 0
    assert measured[-1] < 0.5
    now = meshfit.evaluate(result.model, (X, Y), loss=F.cross_entropy, plan=plan)  # of the averaged weights
    assert now["loss"] == pytest.approx(measured[-1], rel=0.3)
    assert any("batchnorm" in note for note in result.notes)


@pytest.mark.parametrize("plan", ["data=3 exchange=local every=4", "server=2 data=2", "server=1 data=2 staleness=2"])
def test_a_nan_names_its_sample_and_leaves_finite_weights(plan: str) -> None:
    bad = X.clone()
    bad[17] = math.nan
    model = build()
    with pytest.raises(NonFiniteError, match="in sample 17"):
        fit(plan, model=model, data=(bad, Y))
    assert all(p.isfinite().all() for p in model.parameters())
    skipped = fit(plan, data=(bad, Y), on_nan="skip")
    assert all(p.isfinite().all() for p in skipped.model.parameters())


# Kill and go on


def processes() -> list[psutil.Process]:
    """Those of the run, in the order of their start: workers, then servers."""
    found = [child for template in psutil.Process().children() for child in template.children()]
    return sorted(found, key=lambda process: process.create_time())


def killing(which: int, at: int) -> Any:
    def kill(step: Step) -> None:
        if step.step >= at and not killed:
            killed.append(processes()[which].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    return kill


@pytest.mark.parametrize(("plan", "which"), [more("server=1 data=2", 1), ("server=2 data=3", 0)])
def test_a_worker_killed_in_step_is_not_missed(plan: str, which: int) -> None:
    alone = fit("data=1", steps=40)
    spread = fit(plan, steps=40, loss=slowly, callbacks=killing(which, 5))
    assert f"rank {which} was killed by signal 9 (SIGKILL)" in spread.notes
    assert spread.history[-1].step == 40
    assert_same(spread, alone)


def test_every_step_is_told_once_whoever_dies() -> None:
    kill, seen = killing(0, 5), []
    fit("server=1 data=2", steps=20, each_step=[lambda step: seen.append(step.step), kill])
    assert seen == list(range(1, 21))


def test_a_worker_killed_apart_is_not_missed() -> None:
    spread = fit("server=1 data=3 staleness=4", steps=60, loss=slowly, callbacks=killing(0, 10))
    assert "rank 0 was killed by signal 9 (SIGKILL)" in spread.notes
    assert spread.history[-1].step == 60


@pytest.mark.parametrize(("plan", "which"), [more("server=1 data=2", 2), ("server=2 data=2", 3)])
def test_a_server_killed_goes_on_from_its_snapshot(plan: str, which: int) -> None:
    alone = fit("data=1", steps=40)
    spread = fit(plan, steps=40, loss=slowly, callbacks=killing(which, 14))
    notes = "; ".join(spread.notes)
    assert f"server {which - 2} was killed by signal 9 (SIGKILL), and was started again" in notes
    assert "goes on from its snapshot of step" in notes
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert_same(spread, alone)


def test_a_server_and_a_worker_killed_at_once_are_not_waited_for() -> None:
    """The snapshot from which the server goes on knows of both workers."""

    def kill(step: Step) -> None:
        if step.step >= 14 and not killed:
            killed.extend(processes()[1:])
            for process in killed:
                process.kill()

    killed: list[psutil.Process] = []
    alone = fit("data=1", steps=30)
    spread = fit("server=1 data=2", steps=30, loss=slowly, callbacks=kill)
    assert {note.partition(" was killed")[0] for note in spread.notes} >= {"rank 1", "server 0"}
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert_same(spread, alone)


def dying(at: int, mark: Path) -> Any:
    """A loss in whose ``at``-th forward one worker, the first to come there, kills itself."""
    calls: list[None] = []

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        trains = outputs.requires_grad and outputs.dtype == torch.float32  # a loss is first tried in double precision
        calls.extend([None] * trains)
        if len(calls) == at and trains:
            with contextlib.suppress(FileExistsError):
                mark.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(outputs, targets, reduction="sum"), len(outputs)

    return loss


@pytest.mark.parametrize(("plan", "over"), every_other(["server=1 data=3", "server=2 data=2"], ["pair", "samples"]))
def test_a_step_is_averaged_over_those_left(plan: str, over: str, tmp_path: Path) -> None:
    """Step 4 is that of one device over the samples of the others, all steps after it are of the whole batch."""
    pair = dying(4, tmp_path / "died")
    mean = lambda outputs, targets: pair(outputs, targets)[0] / len(outputs)
    spread = fit(f"{plan} lost=average", loss=pair if over == "pair" else mean)
    workers = Plan.parse(plan).data
    (dead,) = [i for i in range(workers) if f"rank {i} was killed by signal 9 (SIGKILL)" in spread.notes]
    left = 12 - 12 // workers
    assert f"step 4 was averaged over the {left} samples of those left" in spread.notes
    torch.manual_seed(3)
    model = build()
    optimizer, ids_of = torch.optim.AdamW(model.parameters(), lr=1e-2), Ids(50, 12, seed=3, shuffle=True)
    for step in range(12):
        ids = ids_of(*divmod(step, 5))
        if step == 3:
            gone = share(12, dead, workers)
            ids = np.delete(ids, np.s_[gone.start : gone.stop])
        optimizer.zero_grad()
        F.cross_entropy(model(X[ids]), Y[ids]).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(spread.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lost", ["redo", more("average")])
def test_a_worker_killed_under_batchnorm_over_all_is_not_missed(lost: str, tmp_path: Path) -> None:
    """It dies between two meetings: nobody can go on without it, so the step is done again in either case."""
    how = {"model": with_batchnorm, "data": (X[:48], Y[:48])}
    alone = fit("data=1", **how)
    spread = fit(f"server=1 data=3 lost={lost}", **how, loss=dying(4, tmp_path / "died"))
    assert any("was killed by signal 9" in note for note in spread.notes)
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert_same(spread, alone)


class Fatal:
    """A metric in whose ``at``-th measurement the worker at it is killed."""

    def __init__(self, at: int, mark: Path):
        self.at, self.mark, self.calls = at, mark, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (outputs.argmax(1) == targets).float()


@pytest.mark.parametrize("evaluation", [1, more(5), 6])
def test_the_first_worker_passes_its_duties_on(evaluation: int, tmp_path: Path) -> None:
    """Killed in the middle of an evaluation, the last one too: the next makes it, and knows the best so far."""
    how: dict[str, Any] = {"valid": (X, Y), "valid_every": 2, "best": "-loss", "checkpoint": 5, "ema": 0.5}
    how["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=3.0)  # goes astray: the fourth is best
    alone = fit("data=1", **how, metrics={"right": Fatal(0, tmp_path)}, out=tmp_path / "alone")
    fatal = Fatal(5 * (evaluation - 1) + 2, tmp_path / "died")  # an evaluation is of five batches
    spread = fit("server=1 data=2", **how, metrics={"right": fatal}, out=tmp_path / "spread")
    assert "rank 0 was killed by signal 9 (SIGKILL)" in spread.notes
    assert [s.step for s in spread.history] == list(range(1, 13))
    assert [s.valid and pytest.approx(s.valid, rel=1e-3) for s in spread.history] == [s.valid for s in alone.history]
    assert spread.best == pytest.approx(alone.best, rel=1e-3)
    assert alone.best == alone.history[7].valid
    assert_same(spread, alone, 1e-3)
    again = fit("data=1", **how, metrics={"right": Fatal(0, tmp_path)}, out=tmp_path / "spread", resume=True, steps=14)
    assert again.history[0].step == 13


def test_a_save_that_dies_is_not_claimed(tmp_path: Path) -> None:
    """Killed while it writes its second checkpoint: that one is nobody's; the next in line saves on."""
    mark, write = tmp_path / "died", RankSave.write

    def writing(part: RankSave) -> None:
        write(part)
        if part.folder.endswith("8") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        RankSave.write = writing  # type: ignore[method-assign]  # in the workers
        return slowly(outputs, targets)

    spread = fit("server=1 data=2", loss=loss, steps=20, checkpoint=4, out=tmp_path / "run")
    assert "rank 0 was killed by signal 9 (SIGKILL)" in spread.notes
    kept = folders(open_files(tmp_path / "run" / "checkpoints"))
    assert sorted(kept)[-1].endswith("20")
    assert [s.step for s in spread.history] == list(range(1, 21))
    alone = fit("data=1", steps=24)
    resumed = fit("data=1", steps=24, checkpoint=4, out=tmp_path / "run", resume=True)
    assert_same(resumed, alone)


def test_the_only_worker_killed_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 0 was killed by signal 9"):
        fit("server=1 data=1", steps=400, loss=slowly, callbacks=killing(0, 5))


class Angry(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("this optimizer has had enough")


def test_what_a_server_raises_is_told() -> None:
    with pytest.raises(RankError, match="this optimizer has had enough"):
        fit("server=1 data=2", optimizer=lambda parameters: Angry(parameters, lr=0.1))


# Checkpoints


@pytest.mark.parametrize(
    ("first", "then"), every_other(["server=2 data=2", "data=2", "server=1 data=2 ema"], ["data=1", "server=1 data=3"])
)
def test_resumes_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    how = SCHEDULED | {"ema": 0.9 if "ema" in first else None}
    out = tmp_path / "run"
    fit(first.removesuffix(" ema"), **how, steps=7, out=out, checkpoint=3)
    resumed = fit(then, **how, out=out, checkpoint=3, resume=True)
    alone = fit("data=1", **how)
    assert [step.step for step in resumed.history] == [8, 9, 10, 11, 12]
    assert losses(resumed) == pytest.approx(losses(alone)[7:], rel=1e-5)
    assert resumed.history[-1].samples == alone.history[-1].samples
    assert_same(resumed, alone)


def test_a_schedule_whose_state_is_no_plain_fact_resumes(tmp_path: Path) -> None:
    how = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 9], 0.5)}
    fit("server=2 data=2", **how, steps=7, out=tmp_path / "run", checkpoint=2)
    resumed = fit("server=1 data=2", **how, out=tmp_path / "run", checkpoint=2, resume=True)
    again, alone = fit("data=1", **how, out=tmp_path / "run", resume=True, steps=14), fit("data=1", **how, steps=14)
    assert [step.lr for step in (*resumed.history, *again.history)] == [step.lr for step in alone.history[7:]]
    assert_same(again, alone)


@pytest.mark.parametrize("then", ["server=1 data=2 staleness=2", "data=2"])
def test_steps_apart_resume(then: str, tmp_path: Path) -> None:
    how = {"steps": None, "data": (X[:48], Y[:48])}
    fit("server=1 data=2 staleness=2", **how, epochs=1, out=tmp_path / "run", checkpoint=3)
    resumed = fit(then, **how, epochs=2, out=tmp_path / "run", checkpoint=3, resume=True)
    assert sum(step.last for step in resumed.history) == 1
    assert resumed.history[-1].samples == 96


def out_of_turn(outputs, targets):
    """Batches of one worker's that take longer than others: their gradients come late."""
    time.sleep(0.15 * (float(targets.sum()) % 3 == 0))
    return F.cross_entropy(outputs, targets)


def test_steps_apart_that_were_applied_out_of_turn_are_not_taken_again(tmp_path: Path) -> None:
    how = {"steps": None, "epochs": 1, "data": (X[:48], Y[:48]), "loss": out_of_turn, "out": tmp_path / "run"}
    fit("server=1 data=2 staleness=4", **how, checkpoint=1, keep=50)
    found = sorted((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    ahead = [each for each in found if "ahead" in json.loads(each.read_text())["manifest"]["state"]]
    assert ahead
    for each in found:
        if each > ahead[0]:
            shutil.rmtree(each.parent)
    body = json.loads(ahead[0].read_text())["manifest"]
    resumed = fit("server=1 data=2 staleness=4", **how, checkpoint=100, resume=True)
    assert resumed.history[-1].samples == 48
    assert sum(1 for _ in resumed.history) == (48 - body["samples"]) // body["state"]["ahead"][0]


@pytest.mark.parametrize("plan", ["data=2 exchange=local every=3", "data=2 exchange=diloco every=3"])
def test_local_steps_resume(plan: str, tmp_path: Path) -> None:
    fit(plan, steps=7, out=tmp_path / "run", checkpoint=3)
    resumed = fit(plan, steps=30, out=tmp_path / "run", checkpoint=3, resume=True)
    assert resumed.history[0].step == 8
    assert meshfit.evaluate(resumed.model, (X, Y), loss=F.cross_entropy)["loss"] < 0.5


# What cannot be


REFUSED = {
    "server=1 data=2 offload=optimizer": "server=1 data=2 works",
    "data=2 exchange=local pipeline=2": "exchange=local does not go with pipeline=2",
    "server=1 data=2 offload=parameters": "offload=parameters",
    "server=1 data=2 precision=fp16": "precision=fp16",
    "data=2 staleness=3": "staleness=3 says how server= works",
    "data=2 every=3": "every=3 says how exchange= works",
    "data=2 lost=average": "lost=average says how server= works",
    "server=1 data=2 staleness=2 lost=average": "lost=average is for steps that workers take together",
    "server=1 data=2 late=damp": "late=damp says how staleness= works",
    "server=1 data=2 exchange=local": "exclude each other",
    "data=2 exchange=locale": "did you mean local",
    "data=2 exchange=local every=2 overlap=2": "overlap=2 is not below every=2",
}


@pytest.mark.parametrize("plan", REFUSED)
def test_refuses(plan: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[plan]):
        Plan.parse(plan)


def test_refuses_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="a batch of 12 has no 5 equal parts"):
        fit("server=1 data=5 staleness=2")
    with pytest.raises(PlanError, match="best= compares evaluations"):
        fit("server=1 data=2 staleness=2", valid=(X, Y), best="-loss")
    with pytest.raises(PlanError, match="each server steps a part"):
        fit("server=2 data=2", optimizer=WholeNorm)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(PlanError, match="torchrun starts ranks alone"):
        fit("server=1 data=1")


class WholeNorm(torch.optim.SGD):
    """Divides by the norm of all gradients: parameters stepped apart come out otherwise."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.div_(norm)
        super().step(closure)


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="servers hand out batches by number"):
        fit("server=1 data=2", data=Numbers())


def test_plans_are_read_and_written() -> None:
    for text in ("server=1 data=3 staleness=inf late=damp compress=int8", "data=4 exchange=diloco every=32 overlap=1"):
        assert str(Plan.parse(text)) == text
    assert Plan.parse("server=2 data=3").devices == 3


def test_verify_tells_what_each_promises() -> None:
    def verified(plan: str, **how: Any) -> Verdict:
        defaults = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "loss": F.cross_entropy, "batch_size": 12}
        return meshfit.verify(build, (X, Y), plan=plan, **(defaults | how))

    in_step = verified("server=2 data=3")
    assert in_step.equal
    assert {row.name for row in in_step.rows} >= {"loss", "gradients", "weights"}
    averaged = verified("data=3 exchange=local")
    assert averaged.equal
    assert [row.name for row in averaged.rows] == ["weights"]
    apart = verified("server=1 data=2 staleness=2")
    assert not apart.comparable
    assert (apart.equal, apart.exit_code) == (False, 3)
    assert any("updates late" in note for note in apart.notes)
    assert not verified("data=2 exchange=local every=4").comparable
