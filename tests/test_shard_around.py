"""Everything around a sharded step: optimizers, clipping, validation, stopping, what breaks, what is refused."""

import functools
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from benchmarks import zoo
from meshfit.errors import NonFiniteError, PlanError
from tests import traps
from tests.distributed import distributed
from tests.few import more
from tests.ranked import ADAMW, FIT, SGD, X, Y, assert_alike, built, trained
from tests.test_torchrun import free_port

cloudpickle.register_pickle_by_value(traps)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """By the shapes that parameters have when they are whole."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 3e-2}], lr=1e-2)


def adagrad(params: Any) -> torch.optim.Optimizer:
    """Makes its state when it is built."""
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1)


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean(1)


VALID = {"valid": (X[:5], Y[:5]), "valid_every": 1, "metrics": {"error": error}}
AROUND: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.1},
    "groups by shape": {"optimizer": groups},
    "state when built": {"optimizer": adagrad},
    "schedule": {"scheduler": lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=n + 1)},
    "average": {"ema": 0.8, **VALID},
    "best": {"best": "-error", "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.3), **VALID},
    "patience": {"best": "error", "patience": 1, "optimizer": lambda ps: torch.optim.SGD(ps, lr=1e-3), **VALID},
    "a single sample": {"data": (X[:1], Y[:1])},
}


@pytest.mark.parametrize("plan", ["shard=2", more("shard=2 zero=2"), "shard=2 zero=1 microbatches=2 offload=optimizer"])
@distributed(world=2)
def test_around(plan: str) -> None:
    for name, asked in AROUND.items():
        try:
            run = assert_alike(traps.Plain, plan, **asked)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        assert name != "patience" or run.step == 2  # of three: the error went down


@pytest.mark.parametrize("optimizer", [ADAMW, adagrad])
def test_parameters_in_host_memory(optimizer: Any) -> None:
    plans = ("data=1", "offload=parameters", "shard=2 offload=parameters")
    want, *others = (
        meshfit.fit(built(traps.Tied), (X, Y), plan=plan, **{**FIT, "optimizer": optimizer}) for plan in plans
    )
    for got in others:
        torch.testing.assert_close(got.model.state_dict(), want.model.state_dict(), atol=1e-5, rtol=1e-4)


def gpt2(reentrant: bool) -> nn.Module:
    model: Any = zoo.ZOO["gpt2"].build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


@distributed(world=2)
def test_checkpointing_of_hugging_face() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reentrant in (False, True):
            make = functools.partial(gpt2, reentrant)
            assert_alike(make, "shard=2", data=zoo.ZOO["gpt2"].data(18), loss=None, optimizer=SGD)


class Overflows(traps.Plain):
    """In fp16, on one rank alone: its samples are large."""

    def forward(self, x):
        return super().forward(x) * torch.where(x[:, :1] > 100, 3e4, 1.0)


@distributed(world=2)
def test_an_overflow_on_one_rank_is_seen_by_all() -> None:
    large = X.clone()
    large[:, 0] = torch.where(torch.arange(18) % 8 < 4, 101.0, 0.0)
    asked = {"data": (large, Y), "shuffle": False, "steps": 2, "optimizer": SGD}
    runs = [trained(built(Overflows), f"{plan} precision=fp16", **asked)[0] for plan in ("data=2", "shard=2")]
    scales = [run.update.scale.value.item() for run in runs]
    assert scales[0] == scales[1] < 2.0**16
    torch.testing.assert_close(runs[1].placed.tensors(), runs[0].placed.tensors(), atol=1e-6, rtol=1e-5)


def test_a_step_that_is_not_finite() -> None:
    broken = X.clone()
    broken[5] = torch.nan
    skipped = [
        meshfit.fit(built(traps.Plain), (broken, Y), plan=plan, on_nan="skip", **FIT) for plan in ("data=1", "shard=2")
    ]
    torch.testing.assert_close(*(run.model.state_dict() for run in skipped), atol=1e-5, rtol=1e-4)
    model, before = built(traps.Plain), built(traps.Plain).state_dict()
    with pytest.raises(NonFiniteError, match="sample 5"):
        meshfit.fit(model, (broken, Y), plan="shard=2", shuffle=False, **FIT)
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize("own", [False, True])
def test_stopped_by_a_callback(own: bool) -> None:
    """And an optimizer of the user's own; the model is theirs, whole and trained."""
    found = []
    for plan in ("data=1", "shard=2"):
        model = built(traps.Tied)
        parameters = [*model.parameters()]
        asked = {**FIT, "optimizer": ADAMW(parameters) if own else ADAMW, "steps": 6}
        stop = lambda step: "stop" if step.step == 2 else None
        result = meshfit.fit(model, (X, Y), plan=plan, each_step=[stop], **asked)
        assert result.model is model
        assert [*map(id, model.parameters())] == [*map(id, parameters)]
        assert result.steps == 2
        found.append(model.state_dict())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("samples", [18, 1])
def test_evaluate_and_predict(samples: int) -> None:
    model = built(traps.Tied)
    data, asked = (X[:samples], Y[:samples]), {"batch_size": 7, "devices": "cpu"}
    for plan in ("shard=2", "shard=2 zero=2 precision=bf16"):
        like = "data=1" if "bf16" not in plan else "data=1 precision=bf16"
        measured = [
            meshfit.evaluate(model, data, loss=F.mse_loss, metrics={"error": error}, plan=each, **asked)
            for each in (like, plan)
        ]
        assert measured[1] == pytest.approx(measured[0], rel=1e-5)
        outputs = [meshfit.predict(model, data, plan=each, **asked) for each in (like, plan)]
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2 recompute=full",
        "shard=2 zero=2 recompute=selective offload=optimizer",
        "data=2 shard=2 zero=1",
        "shard=2 offload=parameters recompute=full",
    ],
)
def test_verified(plan: str) -> None:
    verdict = meshfit.verify(built(traps.Tied), (X, Y), plan=plan, check_steps=3, **FIT)
    assert verdict.equal, verdict


class Normed(torch.optim.Optimizer):
    """Scales all steps by one norm over all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad * (self.param_groups[0]["lr"] / norm))


REFUSED = {
    "Normed": (traps.Plain, Normed),
    "max_norm=1.0": (lambda: nn.Sequential(Lookup(max_norm=1.0), nn.Linear(8, 4)), ADAMW),
    "sparse gradients": (lambda: nn.Sequential(Lookup(sparse=True), nn.Linear(8, 4)), SGD),
}


class Lookup(nn.Embedding):
    def __init__(self, **asked: Any):
        super().__init__(10, 8, **asked)

    def forward(self, x):
        return super().forward(x[:, 0].long().abs())


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_any_rank_starts(what: str) -> None:
    make, optimizer = REFUSED[what]
    with pytest.raises(PlanError, match=what) as raised:
        meshfit.fit(built(make), (X, Y), plan="shard=2", **{**FIT, "optimizer": optimizer})
    assert "works" in str(raised.value)


TORCHRUN = """
import os, sys, torch, meshfit
import torch.nn.functional as F
from torch import nn
rank = int(os.environ.get("RANK", 0))
x, y = torch.randn(18, 8, generator=torch.Generator().manual_seed(1)), torch.ones(18, 4)
torch.manual_seed(1 + rank)
model = nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 4))
parameters, plan = [*model.parameters()], "shard=2" if "RANK" in os.environ else "data=1"
for _ in range(2):
    meshfit.fit(model, (x, y), loss=F.mse_loss, optimizer=lambda ps: torch.optim.Adam(ps, lr=1e-2), batch_size=8,
                steps=3, plan=plan, devices="cpu")
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert not any({"forward", "_call_impl"} & vars(m).keys() for m in model.modules())
    F.mse_loss(model(x), y).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
torch.save(model.state_dict(), os.path.join(sys.argv[1], f"{plan} {rank}.pt"))
"""


@pytest.mark.more  # test_torchrun_function.py has shard= under torchrun; that a model is left whole is shown above
@pytest.mark.filterwarnings("ignore")
def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in one process: the model is whole after each, with its own forwards."""
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    spread = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    command = [sys.executable, "-W", "ignore", *spread, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path)])
    runpy.run_path(str(script))
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("data=1 0", "shard=2 0", "shard=2 1"))
    torch.testing.assert_close(first, second, atol=0.0, rtol=0.0)
    torch.testing.assert_close(first, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("plan", ["shard=2", "data=2", "offload=parameters", "microbatches=2"])
def test_hooks_on_parameters_are_refused(plan: str) -> None:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(meshfit.PlanError, match="weight has a hook"):
        meshfit.fit(
            model,
            (torch.randn(8, 4), torch.randn(8, 3)),
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batch_size=4,
            steps=1,
            plan=plan,
        )


def test_hooks_on_a_backward_are_refused_where_a_recording_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    data = (torch.randn(8, 4), torch.randn(8, 3))
    asked = {"loss": F.mse_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "steps": 1}
    with pytest.raises(meshfit.PlanError, match="1 has a hook on its backward"):
        meshfit.fit(model, data, **asked, batch_size=4, plan="pipeline=2")


def test_batchnorm_over_microbatches_is_said() -> None:
    model, data = (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        (torch.randn(8, 4), torch.randn(8, 3)),
    )
    asked = {"loss": F.mse_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "steps": 1}
    said = meshfit.fit(model, data, **asked, batch_size=4, plan="microbatches=2").notes
    assert any("each microbatch" in note for note in said)
    assert not any(
        "each microbatch" in note for note in meshfit.fit(model, data, **asked, batch_size=4, plan="data=1").notes
    )
