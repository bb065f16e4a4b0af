"""Workers of model servers that are several ranks each: the step of one device, whatever layout they hold it by."""

import math
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.errors import NonFiniteError, PlanError, RankError
from meshfit.plan import Plan
from meshfit.server.shared_model import stand_in
from meshfit.step import Step

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks look the models up under the name benchmarks.zoo

from benchmarks import parity, traffic
from tests import small
from tests.few import more
from tests.small import SCHEDULED, X, Y, assert_same, assert_same_training, losses, slowly


class Net(nn.Module):
    """What is cut, what is not (a norm), and what is frozen; two blocks to make stages of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.second = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        self.second[2].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(x + self.first(x)))


fit = partial(small.fit, model=Net)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt2", "server=1 data=2 tensor=2"),  # the embedding is the head, too
        more("gpt2", "server=1 data=2 pipeline=2 microbatches=2"),  # ... and both ends of the pipeline hold it
        more("llama", "server=2 data=2 shard=2"),
        ("tied-gpt", "server=1 data=2 context=2"),
        ("mixtral", "server=1 data=2 expert=2"),
        ("batchnorm-cnn", "server=1 data=2 tensor=2"),  # statistics are cut with their channels
        more("batchnorm-cnn", "server=2 data=2 shard=2"),
        more("batchnorm-cnn", "server=1 data=2 pipeline=2"),
    ],
)
def test_models_train_like_one_device(model: str, plan: str) -> None:
    trial = parity.Trial(plan=plan, samples=14, steps=5)  # batches of 8 and 6
    outcome = parity.judge(parity.EVERY[model], trial, parity.fit)
    assert outcome.ok, outcome.remarks


@pytest.mark.parametrize(
    "plan",
    [
        "server=2 data=2 tensor=2",
        more("server=1 data=2 shard=2 zero=1"),
        "server=1 data=2 pipeline=2 microbatches=3",
        more("server=1 tensor=2 pipeline=2"),
    ],
)
def test_clips_averages_schedules_and_evaluates(plan: str) -> None:
    alone, spread = fit("data=1", **SCHEDULED), fit(plan, **SCHEDULED)
    assert_same_training(spread, alone)


def test_verifies() -> None:
    how: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "loss": F.cross_entropy}
    verdict = meshfit.verify(Net, (X, Y), plan="server=2 data=2 tensor=2", batch_size=12, clip=0.5, **how)
    assert verdict.equal, verdict.rows
    names = {"loss", "gradient norm", "gradients", "each gradient", "weights", "optimizer"}
    assert {row.name for row in verdict.rows} == names


def test_evaluates_and_predicts() -> None:
    model, plan = Net(), "server=1 data=2 shard=2"
    want = meshfit.evaluate(model, (X, Y), loss=F.cross_entropy, plan="data=1", devices="cpu")
    got = meshfit.evaluate(model, (X, Y), loss=F.cross_entropy, plan=plan, devices="cpu")
    assert got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(meshfit.predict(model, X, plan=plan, devices="cpu"), model(X).detach())


def test_best_weights_patience_and_an_end_that_is_asked_for() -> None:
    how = {"valid": (X, Y), "valid_every": 1, "best": "-loss", "patience": 2, "steps": 40}
    how["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=8.0)  # goes astray
    alone, spread = fit("data=1", **how), fit("server=1 data=2 pipeline=2", **how)
    assert len(spread.history) == len(alone.history) < 40
    assert_same(spread, alone, 1e-3)
    stop = lambda step: "stop" if step.step == 5 else None
    assert_same(fit("server=2 data=2 tensor=2", each_step=stop), fit("data=1", steps=5))


class Whole(torch.optim.SGD):
    """Divides by the norm of each tensor's gradient: no slice of it would do."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, lr=0.05)

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad = p.grad / p.grad.norm()
        super().step(closure)


def test_servers_step_what_no_rank_could() -> None:
    alone, spread = (fit(plan, optimizer=Whole) for plan in ("data=1", "server=1 data=2 tensor=2"))
    assert_same(spread, alone)


def test_a_nan_names_its_sample_and_leaves_finite_weights() -> None:
    bad, model, plan = X.clone(), Net(), "server=1 data=2 shard=2"
    bad[17] = math.nan
    with pytest.raises(NonFiniteError, match="in sample 17"):
        fit(plan, model=model, data=(bad, Y))
    assert all(p.isfinite().all() for p in model.parameters())
    skipped, alone = (fit(each, data=(bad, Y), on_nan="skip") for each in (plan, "data=1"))
    assert_same(skipped, alone)


def breaks(outputs: Tensor, targets: Tensor) -> Tensor:
    """Infinite for two samples, but not where it is tried, in double precision."""
    return F.cross_entropy(outputs, targets) / (len(targets) != 2 or outputs.dtype == torch.float64)


def test_a_loss_that_breaks_names_the_worker_that_it_came_from() -> None:
    data = (X[:11], Y[:11])  # over four ranks: 2, 3, 3 and 3
    with pytest.raises(NonFiniteError, match=r"it came from rank 0, 1, samples 0, 1, 2, 3, 4 of epoch 0"):
        fit("server=1 data=2 shard=2", data=data, loss=breaks, shuffle=False)


# Apart


def test_alone_every_gradient_is_the_step_of_one_device() -> None:
    alone, spread = fit("data=1"), fit("server=2 tensor=2 staleness=2")
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert_same(spread, alone)


def with_batchnorm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def test_apart_batchnorm_is_over_what_a_worker_has() -> None:
    alone, spread = (fit(plan, model=with_batchnorm) for plan in ("data=1", "server=1 shard=2 staleness=2"))
    assert_same(spread, alone)


@pytest.mark.parametrize(
    "plan", ["server=2 data=2 tensor=2 staleness=2", more("server=1 data=2 shard=2 staleness=inf")]
)
def test_asynchronous_a_worker_group_is_one_worker(plan: str) -> None:
    result = fit(plan, steps=None, epochs=2, data=(X[:48], Y[:48]), valid=(X, Y))
    assert [step.step for step in result.history] == list(range(1, 17))  # 48 samples: four batches of 12, by halves
    assert max(step.samples for step in result.history) == 96
    assert all(step.staleness is not None for step in result.history)
    if "staleness=2" in plan:
        assert max(step.staleness or 0 for step in result.history) <= 4
    assert result.metrics["loss"] < 0.69


def test_compressed_gradients_train_nearly_alike() -> None:
    alone, spread = fit("data=1", steps=30), fit("server=2 data=2 tensor=2 compress=int8", steps=30)
    assert losses(spread) == pytest.approx(losses(alone), rel=0.05)
    assert losses(spread) != losses(fit("server=2 data=2 tensor=2", steps=30))


@pytest.mark.parametrize("plan", ["server=1 data=2 tensor=2", "server=2 data=2 shard=2 staleness=2"])
def test_what_is_moved_is_what_was_foretold(plan: str) -> None:
    found = traffic.trained(traffic.Way(plan, "", lambda p, a, n: 0.0), width=16)
    assert found["moved"] == found["cost"] > 0


# Checkpoints


@pytest.mark.parametrize(
    ("first", "then"),
    [
        more("server=2 data=2 tensor=2", "data=2"),
        ("shard=2", "server=1 data=2 pipeline=2"),
        more("server=1 data=2 shard=2", "server=1 data=2 tensor=2"),
    ],
)
def test_resumes_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fit(first, **SCHEDULED, steps=7, out=out, checkpoint=3)
    resumed, alone = fit(then, **SCHEDULED, out=out, checkpoint=3, resume=True), fit("data=1", **SCHEDULED)
    assert [step.step for step in resumed.history] == [8, 9, 10, 11, 12]
    assert losses(resumed) == pytest.approx(losses(alone)[7:], rel=1e-5)
    assert resumed.history[-1].samples == alone.history[-1].samples
    assert_same(resumed, alone)


@pytest.mark.parametrize(("plan", "ranks"), [("server=1 data=2 tensor=2", 4), more("server=1 data=2", 2)])
def test_workers_that_resume_draw_random_numbers_of_their_own(plan: str, ranks: int, tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        (tmp_path / str(os.getpid())).write_text(str(torch.initial_seed()))
        return F.cross_entropy(outputs, targets)

    fit(plan, steps=4, out=tmp_path / "run", checkpoint=2)
    fit(plan, steps=6, out=tmp_path / "run", checkpoint=2, resume=True, loss=loss)
    told = [path.read_text() for path in tmp_path.iterdir() if path.name != "run" and path.name != str(os.getpid())]
    assert len(told) == ranks
    assert len(set(told)) == 2  # ranks of one worker here work on the same samples


def test_ends_saved_when_asked(tmp_path: Path) -> None:
    def ask(step: Step) -> None:
        if step.step == 5:
            (tmp_path / "run" / "stop").touch()

    how = {"out": tmp_path / "run", "checkpoint": 100, "loss": slowly, "steps": 1000}
    ended = fit("server=1 data=2 tensor=2", **how, callbacks=ask)
    assert 5 <= len(ended.history) < 1000
    resumed = fit("data=1", **(how | {"steps": len(ended.history) + 2}), resume=True)
    assert [step.step for step in resumed.history] == [len(ended.history) + 1, len(ended.history) + 2]


# Kill and go on


def killing(which: int, at: int) -> Any:
    """Of the run's processes, in the order of their start: ranks, then servers."""

    def kill(step: Step) -> None:
        if step.step >= at and not killed:
            found = [child for template in psutil.Process().children() for child in template.children()]
            killed.append(sorted(found, key=lambda process: process.create_time())[which].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    return kill


@pytest.mark.parametrize(
    ("plan", "which", "mate"), [more("server=1 data=2 tensor=2", 3, 2), ("server=2 data=2 shard=2", 0, 1)]
)
def test_a_worker_of_which_a_rank_is_killed_is_not_missed(plan: str, which: int, mate: int) -> None:
    alone = fit("data=1", steps=40)
    spread = fit(plan, steps=40, loss=slowly, callbacks=killing(which, 5))
    assert f"rank {which} was killed by signal 9 (SIGKILL)" in spread.notes
    assert f"rank {mate} ended with rank {which}, of the same worker" in spread.notes
    assert spread.history[-1].step == 40
    assert_same(spread, alone)


def test_a_rank_of_the_only_worker_killed_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        fit("server=1 tensor=2", steps=400, loss=slowly, callbacks=killing(1, 5))


def refuses(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(targets) == 2:
        raise ValueError("two are too few")
    return F.cross_entropy(outputs, targets)


def test_what_a_rank_of_a_worker_group_raises_ends_the_run() -> None:
    with pytest.raises(RankError, match=r"rank \d raised ValueError: two are too few"):
        fit("server=1 data=2 shard=2", data=(X[:11], Y[:11]), loss=refuses, shuffle=False)


def test_a_server_killed_goes_on_from_its_snapshot() -> None:
    alone = fit("data=1", steps=40)
    spread = fit("server=2 data=2 pipeline=2", steps=40, loss=slowly, callbacks=killing(5, 14))
    assert "server 1 was killed by signal 9 (SIGKILL), and was started again" in spread.notes
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert_same(spread, alone)


def test_a_model_that_cannot_be_copied_is_refused_with_its_own_reason() -> None:
    class Guarded(Net):
        def __deepcopy__(self, memo: Any) -> "Guarded":
            raise ValueError("there is but one of me")

    computed: Any = Net()
    computed.made = computed.norm.weight * 2
    assert isinstance(stand_in(computed), Net)
    with pytest.raises(PlanError, match="ValueError: there is but one of me"):
        stand_in(Guarded())


def test_plans_of_worker_groups() -> None:
    plan = Plan.parse("server=2 data=3 pipeline=2 shard=2 microbatches=2 staleness=2")
    assert (plan.devices, plan.worker_size) == (12, 4)
    assert str(plan.worker) == "shard=2 pipeline=2 microbatches=2"
