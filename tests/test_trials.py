"""What is tried before a training: models that look at the other samples of their batch are found, whatever they do
beside it; those that do not are not taken for such; and nothing is left behind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.errors import PlanError
from meshfit.exchange.update import Average

X = torch.randn(10, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(4, (10,), generator=torch.Generator().manual_seed(1))

Act = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """``act`` between two layers."""

    def __init__(self, act: Act = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(8, 16), act, nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def fit(model: nn.Module, plan: str, **how: Any) -> Any:
    """Two epochs of 4, 4 and 2 samples."""
    sgd = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    how = {"loss": F.cross_entropy, **how} if "step" not in how else how
    asked = {"batch_size": 4, "epochs": 2, "shuffle": False, "devices": "cpu", "progress": False}
    return meshfit.fit(model, (X.clone(), Y), optimizer=sgd, plan=plan, **asked, **how)


def looped(model: nn.Module, loss: Callable[..., Tensor] = F.cross_entropy) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 4, 8) * 2:
        optimizer.zero_grad()
        loss(model(X[start : start + 4].clone()), Y[start : start + 4]).backward()
        optimizer.step()
    return model.state_dict()


# Models that mix samples


class NormByHand(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mean, var = (x.mean(0), x.var(0, unbiased=False)) if self.training else (self.running_mean, self.running_var)
        return (x - mean) / (var + self.eps).sqrt()  # type: ignore[operator]


class GhostNorm(nn.BatchNorm1d):
    """Over each half of a batch."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if not self.training or len(x) % 2 or len(x) < 4:
            return x
        return F.batch_norm(x.view(len(x) // 2, -1), None, None, training=True).view(x.shape)


class ByLargestGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / grad.abs().max()


def with_a_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad / grad.norm())
    return x


@pytest.mark.parametrize(
    "act",
    [
        NormByHand(16),
        GhostNorm(16),
        lambda x: F.batch_norm(x, None, None, training=True),  # of one sample alone: an error
        lambda x: x / (1 + x.std(0)),  # NaN
        lambda x: F.dropout(x - x.mean(0), 0.2),
        lambda x: x - x.mean(0) + 0.1 * torch.randn_like(x),
        ByLargestGradient.apply,
        with_a_hook,
    ],
    ids=["norm", "ghost", "functional", "std", "dropout", "noise", "backward", "hook"],
)
def test_a_model_that_mixes_samples_is_refused(act: Any) -> None:
    with pytest.raises(PlanError, match="depends on the others of its batch"):
        fit(Net(act), "microbatches=2")


# ... and that do not


class NormWithActivation(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).relu()


def rounded(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 256).view(16, 16)
    for _ in range(4):
        x = x + F.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)
    return x


@pytest.mark.parametrize(
    "act",
    [
        NormWithActivation(16),
        nn.BatchNorm1d(16, momentum=None),
        rounded,
        lambda x: F.dropout(x, 0.2) + 0.1 * torch.randn_like(x),
        lambda x: x * (torch.rand(len(x), 1, dtype=x.dtype) > 0.3),
    ],
    ids=["norm", "cumulative", "bf16", "dropout", "rows"],
)
def test_a_model_that_does_not_is_not(act: Any) -> None:
    fit(Net(act), "data=2", step=plain)


def test_a_loop_that_draws_until_something_comes_ends() -> None:
    def act(x: Tensor) -> Tensor:
        while torch.rand(()) < 0.7:
            x = x + 0.01
        return x

    fit(Net(act), "microbatches=2")


# What is kept from call to call


@dataclass(slots=True)
class Slotted:
    calls: int = 0


class Counts(Net):
    """Its calls: in a tensor that is no buffer, an array, an object with slots, a new dict, an attribute made late."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor, self.array, self.slotted, self.state = torch.zeros(()), np.zeros(1), Slotted(), {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.tensor += 1
        self.array += 1
        self.slotted.calls += 1
        self.state = {"calls": self.state["calls"] + 1}
        self.late = getattr(self, "late", 0) + 1
        every = (int(self.tensor), int(self.array[0]), self.slotted.calls, self.state["calls"], self.late)
        return super().forward(x) * sum(place * (calls % 3) for place, calls in enumerate(every, 1))


class OwnNoise(Net):
    """From a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator, dtype=x.dtype))


class OwnNumPyNoise(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(self.generator.random(x.shape)))


@pytest.mark.parametrize("build", [Counts, OwnNoise, OwnNumPyNoise])
def test_what_calls_change_is_as_in_a_loop(build: type[Net]) -> None:
    torch.testing.assert_close(fit(build(), "microbatches=2").model.state_dict(), looped(build()))


class InASet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(float(x[0, 0]))
        return super().forward(x) * len(self.seen)


class InAnArray(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = np.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x + torch.from_numpy(self.mean.copy()))
        self.mean += x.mean(0).numpy()
        return out


@pytest.mark.parametrize("build", [InASet, InAnArray])
def test_what_remembers_samples_is_refused(build: type[Net]) -> None:
    with pytest.raises(PlanError, match=r"the loss depends on (seen|mean)"):
        fit(build(), "microbatches=2")


def test_ranks_draw_other_numbers_from_a_generator_of_the_models_own() -> None:
    def step(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        noise = torch.rand(len(batch[0]), generator=model.generator)
        return plain(model, batch), {"first": noise[0]}

    own = float(torch.rand(1, generator=torch.Generator().manual_seed(3)))
    values = [fit(OwnNoise(), plan, step=step).history[0].values for plan in ("data=1", "data=2")]
    assert values[0]["first"] == pytest.approx(own)
    assert values[1]["first"] != pytest.approx(own)  # the mean over ranks


# Parameters, inputs, averages


class Unfreezes(Net):
    """Lets its first layer train from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.first.requires_grad_(self.calls > 2)
        return super().forward(x)


def test_what_trains_later_has_the_gradient_of_its_own_steps() -> None:
    torch.testing.assert_close(fit(Unfreezes(), "data=1").model.state_dict(), looped(Unfreezes()))
    for plan in ("data=2", "shard=2"):
        with pytest.raises(PlanError, match=r"first.weight trains from this step on"):
            fit(Unfreezes(), plan)


class WritesItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5).add_(1))


def contrasted(outputs: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(outputs, dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))


@pytest.mark.parametrize("plan", ["microbatches=2", "pipeline=2 microbatches=2"])
def test_a_second_forward_has_the_inputs_of_the_first(plan: str) -> None:
    found = fit(WritesItsInput(), plan, loss=contrasted).model.state_dict()
    torch.testing.assert_close(found, looped(WritesItsInput(), contrasted))


def test_integers_have_no_average() -> None:
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    average = Average(model, 0.9)
    average.update()
    average.swap()
    assert model.table.tolist() == [0, 1, 2]
