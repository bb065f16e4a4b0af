"""Gradients arrive under every plan: past a Function of the user's own, and out of one that computes them itself."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.anatomy.record import record
from meshfit.anatomy.replay import replay
from meshfit.errors import MeshfitError
from tests.few import every_other

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))


class Scale(torch.autograd.Function):
    """x * exp(a)"""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(a, x)
        return a.exp() * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, x = ctx.saved_tensors
        return g * a.exp() * x, g * a.exp()


scale = Scale.apply  # bound once, when the file is read: before anything is watched


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 32), nn.Linear(32, 2)
        self.a, self.b, self.c, self.d, self.middle = (nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).tanh()
        h = h + scale(self.a(h), self.b(h))
        h = h + self.middle(h).tanh()
        return self.leave(h + scale(self.c(h), self.d(h)))


class Adjoint(torch.autograd.Function):
    """f(x), whose backward computes f again and asks autograd for the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, kept: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.f, ctx.parameters = f, parameters if kept else None
        ctx.save_for_backward(x, *(() if kept else parameters))
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
        return None, None, *torch.autograd.grad(y, (x, *(ctx.parameters or saved)), g, allow_unused=True)


class Solver(nn.Module):
    """``f`` is called twice, so that its parameters have two uses; ``kept``: how the Function keeps them."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.f = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.g, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.g(Adjoint.apply(self.f, self.kept, x, *self.f.parameters()))  # type: ignore[arg-type]
        return self.head(x)


def fit(model: nn.Module, plan: str) -> dict[str, Tensor]:
    meshfit.fit(
        model,
        (X, Y),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=12,
        epochs=3,
        plan=plan,
        devices="cpu",
        shuffle=False,
        progress=False,
    )
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@functools.cache
def alone(kind: Any, *args: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return fit(kind(*args), "data=1")


def assert_like_one_device(plan: str, kind: Any, *args: Any) -> None:
    torch.manual_seed(0)
    got = fit(kind(*args), plan)
    for name, want in alone(kind, *args).items():
        torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=2", "branch=2"])
def test_a_function_bound_when_its_file_was_read_has_its_gradient(plan: str) -> None:
    assert_like_one_device(plan, Aliased)


def test_a_bound_function_is_recorded_as_one_call() -> None:
    recording = record(Aliased(), X, share=0.0)
    assert [step.name for step in recording.steps].count("Scale") == 2


class Sneaky(nn.Module):
    """Gives a tensor a gradient where no recorder looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
        with torch._C.DisableTorchFunction():
            h.requires_grad_()
        return self.b(h)


def test_a_gradient_that_no_step_made_is_not_recorded_as_none() -> None:
    with pytest.raises(MeshfitError, match="gave a tensor its gradient"):
        record(Sneaky(), X, share=0.0)


class Asks(nn.Module):
    """Asks for the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x.requires_grad_()
        return torch.autograd.grad(self.f(x).tanh().sum(), x, create_graph=True)[0]


def test_requires_grad_is_recorded() -> None:
    torch.manual_seed(0)
    model = Asks()
    torch.testing.assert_close(replay(record(model, X, share=0.0), model, X), model(X))


@pytest.mark.parametrize(
    ("plan", "kept"),
    every_other(
        ["shard=2 zero=3", "shard=2 zero=1", "shard=2 zero=2 microbatches=2", "offload=parameters"], [True, False]
    ),
)
def test_gradients_that_a_function_asks_autograd_for_reach_the_shards(plan: str, kept: bool) -> None:
    assert_like_one_device(plan, Solver, kept)


class Reads(torch.autograd.Function):
    """Like ``Adjoint``, but its backward reads the parameters from the module."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor, flat: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.f(x)
        first, *others = torch.autograd.grad(y, (x, *ctx.f.parameters()), g)
        return None, first, torch.cat([each.flatten() for each in others])


class ReadsThem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.cat([parameter.flatten() for parameter in self.f.parameters()])
        return self.head(Reads.apply(self.f, x, flat))  # type: ignore[arg-type]


def test_a_function_that_reads_parameters_from_a_module_is_refused_where_they_are_gathered() -> None:
    assert_like_one_device("data=2", ReadsThem)
    with pytest.raises(MeshfitError, match=r"hand them to the Function"):
        fit(ReadsThem(), "shard=2")


@pytest.mark.parametrize("plan", ["data=2 recompute=full", "shard=2 recompute=full", "pipeline=2 microbatches=2"])
def test_and_under_other_plans(plan: str) -> None:
    assert_like_one_device(plan, Solver, False)


class Functional(nn.Module):
    """Calls a block with other weights than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            other = {"0.weight": torch.ones(32, 8) / 8, "0.bias": torch.zeros(32)}
            x = x + block(x) + torch.func.functional_call(block, other, (x,))
        return self.head(x)


def test_weights_that_the_model_puts_in_are_not_replaced_by_gathered_ones() -> None:
    assert_like_one_device("shard=2", Functional)


class Loses(nn.Module):
    """A layer whose gradient is lost wherever ``told(weight)``; and parameters that have none on one device either."""

    def __init__(self, told: str = "") -> None:
        super().__init__()
        self.told = told
        self.enter, self.middle, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.b.weight)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Parameter(torch.ones(16), requires_grad=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).relu()
        weight = self.middle.weight
        told = {"": False, "gathered": not weight.is_leaf, "watched": bool(weight._post_accumulate_grad_hooks)}[
            self.told
        ]
        h = (self.middle(h).detach() if told else self.middle(h)) * self.frozen
        h = h + self.b(self.a(h))
        chosen = (h[:, :3].argmax(1), self.experts)  # the last is never chosen
        h = h + torch.stack([chosen[1][int(i)](row) for i, row in zip(chosen[0], h, strict=True)])  # type: ignore[operator]
        return self.leave(h)


@pytest.mark.parametrize(("plan", "told"), [("shard=2", "gathered"), ("data=2", "watched")])
def test_a_lost_gradient_stops_the_run_by_its_name(plan: str, told: str) -> None:
    torch.manual_seed(0)
    model = Loses(told)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MeshfitError, match=r"no gradient arrives at enter.bias, enter.weight, middle.bias, middle.w"):
        fit(model, plan)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("plan", ["data=2", "shard=2", "data=2 exchange=local"])
def test_a_gradient_that_is_zero_on_one_device_too_passes(plan: str) -> None:
    torch.manual_seed(0)
    fit(Loses(), plan)
