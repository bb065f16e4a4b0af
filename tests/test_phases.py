"""A step in phases trains like the usual loop on one device, under every plan that takes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import meshfit
from meshfit.errors import JobError, PlanError
from tests.few import every_other

PLANS = ("data=2", "data=2 microbatches=2", "shard=2", "shard=2 zero=2", "shard=2 zero=1", "data=2 shard=2")
DATA = (
    torch.randn(24, 6, generator=torch.Generator().manual_seed(1)),
    torch.randn(24, 3, generator=torch.Generator().manual_seed(2)),
)
STEPS, BATCH = 6, 8


class GAN(nn.Module):
    """Noise comes with the data: ranks draw other numbers than one device."""

    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
        self.D = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def critic(model: Any, batch: Any) -> Any:
    real, noise = batch
    made = model.G(noise).detach()
    right, wrong = model.D(real), model.D(made)
    loss = F.softplus(-right).mean() + F.softplus(wrong).mean()
    return loss, {"accuracy": ((right > 0).float().mean() + (wrong < 0).float().mean()) / 2}


def generator(model: Any, batch: Any) -> Tensor:
    return F.softplus(-model.D(model.G(batch[1]))).mean()


GAN_STEPS = {"critic": critic, "generator": generator}
GAN_OPTIMIZERS = {
    "critic": lambda model: Adam(model.D.parameters(), lr=1e-2, betas=(0.5, 0.9)),
    "generator": lambda model: Adam(model.G.parameters(), lr=5e-3, betas=(0.5, 0.9)),
}


class ActorCritic(nn.Module):
    """A trunk that the actor trains, and the critic reads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.actor, self.value = nn.Linear(16, 3), nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.actor(hidden), self.value(hidden).squeeze(1)


def value_loss(model: Any, batch: Any) -> Tensor:
    state, rewards = batch
    return F.mse_loss(model(state)[1], rewards.sum(1))


def actor_loss(model: Any, batch: Any) -> Tensor:
    state, rewards = batch
    logits, value = model(state)
    advantage = rewards.sum(1) - value.detach()
    return -(logits.log_softmax(1)[:, 0] * advantage).mean()


class VAEGAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.E, self.G = nn.Linear(6, 6), nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6))
        self.D = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 1)])

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.D[0](x))

    def encoded(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, noise = batch
        mean, spread = self.E(x).chunk(2, 1)
        z = mean + noise * (0.5 * spread).exp()
        return z, 0.5 * (mean.square() + spread.exp() - spread - 1).mean()


def encoder_loss(model: Any, batch: Any) -> Any:
    z, divergence = model.encoded(batch)
    alike = F.mse_loss(model.features(model.G(z)), model.features(batch[0]))
    return divergence + alike, {"divergence": divergence, "alike": alike}


def decoder_loss(model: Any, batch: Any) -> Tensor:
    z, _ = model.encoded(batch)
    made = model.features(model.G(z))
    return F.mse_loss(made, model.features(batch[0])) + F.softplus(-model.D[1](made)).mean()


def discriminator_loss(model: Any, batch: Any) -> Tensor:
    score = lambda x: model.D[1](model.features(x))
    return F.softplus(-score(batch[0])).mean() + F.softplus(score(model.G(batch[1]).detach())).mean()


SHAPES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "gan": (GAN, GAN_STEPS, GAN_OPTIMIZERS),
    "wgan": (GAN, {"critic": critic, "generator": meshfit.every(3, generator)}, GAN_OPTIMIZERS),
    "actor-critic": (
        ActorCritic,
        {"critic": value_loss, "actor": actor_loss},
        {
            "critic": lambda model: SGD(model.value.parameters(), lr=0.1, momentum=0.9),
            "actor": lambda model: AdamW([*model.trunk.parameters(), *model.actor.parameters()], lr=1e-2),
        },
    ),
    "vae-gan": (
        VAEGAN,
        {"encoder": encoder_loss, "decoder": decoder_loss, "discriminator": discriminator_loss},
        {
            "encoder": lambda model: Adam(model.E.parameters(), lr=1e-2),
            "decoder": lambda model: Adam(model.G.parameters(), lr=1e-2),
            "discriminator": lambda model: Adam(model.D.parameters(), lr=1e-2),
        },
    ),
}


def train(shape: str, plan: str, **how: Any) -> meshfit.Result:
    build, steps, optimizers = SHAPES[shape]
    torch.manual_seed(0)
    defaults = {"step": steps, "optimizer": optimizers, "steps": STEPS, "batch_size": BATCH, "shuffle": False}
    return meshfit.fit(build(), DATA, plan=plan, devices="cpu", progress=False, **(defaults | how))


def loop(shape: str) -> tuple[nn.Module, list[dict[str, float]]]:
    """The usual loop."""
    build, steps, optimizers = SHAPES[shape]
    torch.manual_seed(0)
    model = build()
    made = {name: make(model) for name, make in optimizers.items()}
    history = []
    for i in range(STEPS):
        at = i * BATCH % len(DATA[0])
        batch, losses = tuple(t[at : at + BATCH] for t in DATA), {}
        for name, function in steps.items():
            if (i + 1) % getattr(function, "steps", 1):
                continue
            model.zero_grad()
            result = function(model, batch)
            loss, logged = result if isinstance(result, tuple) else (result, {})
            loss.backward()
            made[name].step()
            losses |= {name: loss.item(), **{f"{name}/{key}": value.item() for key, value in logged.items()}}
        history.append(losses)
    return model, history


def assert_as_the_loop(got: meshfit.Result, shape: str) -> None:
    want, history = loop(shape)
    assert [list(step.values) for step in got.history] == [list(each) for each in history]
    for step, each in zip(got.history, history, strict=True):
        assert step.values == pytest.approx(each, rel=2e-5, abs=1e-6)
        assert step.loss == pytest.approx(sum(v for name, v in each.items() if "/" not in name), rel=2e-5)
    for name, p in want.named_parameters():
        torch.testing.assert_close(dict(got.model.named_parameters())[name], p, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_device(shape: str) -> None:
    assert_as_the_loop(train(shape, "data=1"), shape)


@pytest.mark.parametrize(("shape", "plan"), every_other(SHAPES, PLANS))
def test_as_the_usual_loop(shape: str, plan: str) -> None:
    got = train(shape, plan)
    assert_as_the_loop(got, shape)
    assert all(p.requires_grad for p in got.model.parameters())


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 recompute=full", "shard=2 offload=optimizer"])
def test_other_plans(plan: str) -> None:
    assert_as_the_loop(train("actor-critic", plan), "actor-critic")


@pytest.mark.parametrize("plan", ["data=1", "data=2", "shard=2"])
def test_schedules_clipping_and_average(plan: str) -> None:
    schedules = {"critic": lambda o: StepLR(o, 2, 0.5), "generator": lambda o: StepLR(o, 1, 0.9)}
    how: dict[str, Any] = {"scheduler": schedules, "clip": 0.1, "ema": 0.9}
    alone, got = train("wgan", "data=1", **how), train("wgan", plan, **how)
    assert [step.lr for step in got.history] == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]
    for mine, theirs in zip(alone.model.parameters(), got.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "then"), [("data=2", "data=1"), ("shard=2", "data=2"), ("data=1", "shard=2 zero=1")])
def test_resumes_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    schedules = {"generator": lambda o: StepLR(o, 1, 0.9)}
    whole = train("wgan", "data=1", scheduler=schedules)
    train("wgan", first, scheduler=schedules, steps=4, out=tmp_path / "run", checkpoint=2)
    rest = train("wgan", then, scheduler=schedules, out=tmp_path / "run", checkpoint=2, resume=True)
    assert [step.step for step in rest.history] == [5, 6]
    for mine, theirs in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", ["data=1", "data=2"])
def test_evaluated_together(plan: str) -> None:
    got = train("gan", plan, valid=(DATA[0][:10], DATA[1][:10]), valid_every=3)
    assert [*got.metrics] == ["loss", "critic", "critic/accuracy", "generator"]
    assert got.metrics["loss"] == pytest.approx(got.metrics["critic"] + got.metrics["generator"], rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("pipeline=2", "runs a recording of one loss"),
        ("server=1 data=2", "one step for each batch"),
        ("data=2 exchange=local every=2", "averages weights"),
        ("data=2 precision=fp16", "scales the loss"),
        ("tensor=2", "never calls the model itself"),
    ],
)
def test_refused_with_the_reason(plan: str, why: str) -> None:
    with pytest.raises((PlanError, JobError), match=why):
        train("gan", plan)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"optimizer": {"critic": GAN_OPTIMIZERS["critic"]}}, "the phase 'generator' has no optimizer"),
        ({"optimizer": Adam}, "step= has phases, but optimizer= is one for all"),
        ({"step": generator}, "optimizer= is a dict"),
        ({"scheduler": {"generater": lambda o: StepLR(o, 1)}}, "did you mean"),
        ({"step": {"critic": critic, "generator": 3}}, "not a function"),
        ({"step": {n: meshfit.every(2, f) for n, f in GAN_STEPS.items()}}, "no phase runs in every step"),
        (
            {"optimizer": {name: lambda model: Adam(model.parameters()) for name in GAN_STEPS}},
            "is in two optimizers",
        ),
    ],
)
def test_what_makes_no_sense(how: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        train("gan", "data=1", **how)


@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_verified(plan: str) -> None:
    build, steps, optimizers = SHAPES["actor-critic"]
    torch.manual_seed(0)
    how: dict[str, Any] = {"step": steps, "optimizer": optimizers, "devices": "cpu", "batch_size": BATCH}
    verdict = meshfit.verify(build(), DATA, plan=plan, steps=3, **how)
    assert verdict.answer == "equal", verdict
