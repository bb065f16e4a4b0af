"""What people's scripts do beside a plain model and a mean: as in a loop of one device, or refused for its reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.record import record
from meshfit.errors import JobError, MeshfitError, PlanError

X = torch.randn(10, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(4, (10,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
PIPELINE = "pipeline=2 microbatches=2"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def fit(model: nn.Module, plan: str, step: Any) -> nn.Module:
    """Two epochs of 4, 4 and 2 samples."""
    data = {"x": X, "y": Y, "w": WEIGHTS}
    sgd = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    asked = {"batch_size": 4, "epochs": 2, "shuffle": False, "devices": "cpu", "progress": False}
    return meshfit.fit(model, data, step=step, optimizer=sgd, plan=plan, **asked).model


def looped(model: nn.Module, step: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 4, 8) * 2:
        part = slice(start, start + 4)
        loss = step(model, {"x": X[part], "y": Y[part], "w": WEIGHTS[part]})
        optimizer.zero_grad()
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
    return model


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["w"]).sum(), batch["w"].sum()


def mean_by_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total, weights = weighted(model, batch)
    return total / weights


def regularised(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return plain(model, batch) + 0.01 * model.last.weight.square().sum() + 0.01 * model.blocks[0][0].weight.abs().sum()


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.cross_entropy(outputs, batch["y"]) + (slope.norm(dim=1) - 1).square().mean()


class Constrained(Net):
    """Its weights are computed from others before each forward, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.last)


class Parametrized(Net):
    """A weight that torch computes from others, by a class that torch does not pickle."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.last)
        nn.utils.parametrizations.orthogonal(self.blocks[0][0])  # type: ignore[index]


class Hooked(Net):
    """The gradient of an activation is changed on its way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 0.5)
        return self.last(self.blocks[1](self.blocks[0](x)))


class Mixed(Net):
    """A block in single precision, between casts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.blocks[1](self.blocks[0](x.float()).double()))


@pytest.mark.parametrize(
    ("build", "step", "plan"),
    [
        (Net, weighted, "data=2"),
        (Net, weighted, PIPELINE),
        (Net, regularised, "shard=2 microbatches=2"),
        (Net, regularised, "tensor=2"),
        (Net, penalised, "tensor=2"),
        (Constrained, plain, "tensor=2"),
        (Parametrized, plain, "data=2"),
        (lambda: torch.compile(Net(), backend="eager"), plain, "shard=2"),
        (Hooked, plain, "data=2"),
    ],
)
def test_as_in_a_loop_of_one_device(build: type[nn.Module], step: Any, plan: str) -> None:
    torch.testing.assert_close(fit(build(), plan, step).state_dict(), looped(build(), step).state_dict())


@pytest.mark.parametrize(
    ("model", "step", "plan", "said"),
    [
        (Net, mean_by_weights, "microbatches=2", r"return \(l \* w\)\.sum\(\), w\.sum\(\)"),
        (Net, penalised, PIPELINE, "does not run without autograd"),
        (Hooked, plain, PIPELINE, "a hook is registered on the gradient of a tensor"),
        (lambda: torch.compile(Net(), backend="eager"), plain, "tensor=2", "is compiled by torch.compile"),
    ],
)
def test_refused_for_its_reason(model: Any, step: Any, plan: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        fit(model(), plan, step)


def test_a_hook_on_an_activation_is_not_lost_in_a_recording() -> None:
    with pytest.raises(MeshfitError, match="a hook is registered"):
        record(Hooked(), X, share=0.0)


def test_a_model_of_several_precisions_is_recorded_as_it_is() -> None:
    dtypes = {view.dtype for view in AtenTrace.of(Mixed(), X).whole.values()}
    assert dtypes >= {torch.float32, torch.float64}


class Calls(Net):
    """Counts its forwards in Python, and does something else in every third."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls % 3 == 0 else 1)


class Thaws(Calls):
    """Freezes its blocks for the first steps."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.blocks.parameters():
            p.requires_grad_(self.calls > 2)
        return super().forward(x)


class FrozenNorm(Net):
    """Keeps its BatchNorm in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16).double()
        self.norm.register_buffer("running_mean", torch.linspace(0, 1, 16, dtype=torch.float64))

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Looks(Net):
    """At the mean of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.mean() > 0.1 else 1)


class Remembers(Net):
    """The last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        carried = x if self.before is None else x + 0.1 * self.before.mean(0)
        self.before = x.detach()
        return self.last(carried)


class Begins(Net):
    """Its first batch sets a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.begun = nn.Parameter(torch.zeros(8, dtype=torch.float64)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.shift.data, self.begun = -x.mean(0), True
        return super().forward(x + self.shift)


class Clamps(Net):
    """A weight, in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Sparse(Net):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16, sparse=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.table((x[:, 0] > 0).long()))


def counted() -> Any:
    """A step that counts its calls: a loss weighed in over the first ones."""
    state = {"step": 0}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        state["step"] += 1
        return plain(model, batch) * min(1.0, state["step"] / 4)

    return step


@pytest.mark.parametrize(
    ("build", "step", "plan"),
    [
        (Calls, lambda: plain, "data=2 microbatches=2"),
        (Calls, lambda: plain, "tensor=2"),
        (Net, counted, "shard=2"),
        (Net, counted, "microbatches=2"),
        (Thaws, lambda: plain, "data=2"),
        (FrozenNorm, lambda: plain, "data=2"),
        (Clamps, lambda: plain, "data=2"),
        (Begins, lambda: plain, "tensor=2"),
    ],
)
def test_what_is_kept_in_python_is_as_in_a_loop(build: type[nn.Module], step: Any, plan: str) -> None:
    want = looped(build().train(), step())
    torch.testing.assert_close(fit(build(), plan, step()).state_dict(), want.state_dict())


class OwnLoss(Net):
    """It returns its loss and more, as Hugging Face's models do without return_dict."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return F.cross_entropy(outputs, y), outputs


class SecondLoss(OwnLoss):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        loss, outputs = super().forward(x, y)
        return outputs, loss


def test_a_loss_that_the_model_returns_first() -> None:
    data, sgd = (X, Y), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    asked = {"optimizer": sgd, "batch_size": 4, "epochs": 2, "shuffle": False, "devices": "cpu", "progress": False}
    got = meshfit.fit(OwnLoss(), data, plan="data=2", **asked).model
    want = looped(OwnLoss(), lambda model, batch: model(batch["x"], batch["y"])[0])
    torch.testing.assert_close(got.state_dict(), want.state_dict())
    with pytest.raises(JobError, match=r"(?s)returned no loss.*model\(\*batch\)\[1\] takes the one number"):
        meshfit.fit(SecondLoss(), data, **asked)


def test_fields_that_the_model_does_not_take_are_named() -> None:
    data = {"x": X, "y": Y, "name": X}
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    with pytest.raises(meshfit.DataError, match="got an unexpected keyword argument 'name'") as caught:
        meshfit.fit(Net(), data, loss=F.cross_entropy, optimizer=sgd, steps=1, devices="cpu", progress=False)
    assert "step=lambda model, batch" in str(caught.value)


def trimmed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Over as many features as the largest label of the batch says."""
    return model(batch["x"])[:, : int(batch["y"].max()) + 1].square().mean()


@pytest.mark.parametrize(
    ("model", "step", "plan", "said"),
    [
        (Looks, plain, "microbatches=2", "parts of 1 is"),
        (Net, trimmed, "microbatches=2", "parts of 1 is"),
        (Remembers, plain, "microbatches=2", "the loss depends on before, which is kept"),
        (Begins, plain, "data=2", "not a mean|shift, a weight that the forward writes"),
        (Calls, plain, PIPELINE, "each call of the loss changes calls"),
        (Clamps, plain, "microbatches=2", "the forward writes last.weight"),
        (Clamps, plain, "server=1 data=2", "the forward writes last.weight"),
        (Sparse, plain, "microbatches=2", "sparse gradients"),
    ],
)
def test_what_parts_of_a_batch_would_do_otherwise_is_refused(model: Any, step: Any, plan: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        fit(model(), plan, step)


@pytest.mark.parametrize("plan", ["data=2", "microbatches=2"])
def test_a_model_that_mixes_samples_is_refused_though_its_loss_is_a_mean(plan: str) -> None:
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    asked = {"optimizer": sgd, "batch_size": 4, "steps": 1, "devices": "cpu", "progress": False}
    with pytest.raises(PlanError, match="depends on the others of its batch"):
        meshfit.fit(Looks(), (X, Y), loss=F.cross_entropy, plan=plan, **asked)


def test_a_loss_with_a_state_of_its_own_is_left_as_it_was_by_trials() -> None:
    centre = nn.BatchNorm1d(4, affine=False).double()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(centre.train()(model(batch["x"])), batch["y"])

    with pytest.raises(PlanError):
        fit(Net(), "microbatches=2", step)
    assert torch.equal(centre.running_mean, torch.zeros(4).double())  # type: ignore[arg-type]


class Leaves(Net):
    """Its features in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.blocks[1](self.blocks[0](self.first(x)))
        return self.last(self.features)


class Replaced(Net):
    """A module is called with weights that are computed from its own."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 1.1 * p for name, p in self.last.named_parameters()}
        return torch.func.functional_call(self.last, weights, (self.first(x),))


def by_jacobian(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: model(x[None])[0]))(batch["x"])
    return plain(model, batch) + 0.01 * jacobian.square().sum((1, 2)).mean()


def test_transforms_of_torch_func_under_shard_are_refused_for_their_reason() -> None:
    with pytest.raises(PlanError, match=r"differentiates by torch\.func"):
        fit(Net(), "shard=2", by_jacobian)


def by_features(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return plain(model, batch) + 0.1 * model.features.square().mean()


@pytest.mark.parametrize(
    ("model", "step", "plan", "said"),
    [
        (Leaves, by_features, "tensor=2", "the step reads features, which the forward leaves in the model"),
        (Replaced, plain, PIPELINE, "other tensors for its parameters"),
    ],
)
def test_what_a_recording_or_a_split_would_lose_is_refused(model: Any, step: Any, plan: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        fit(model(), plan, step)


@pytest.mark.parametrize("plan", ["data=1", "shard=2", PIPELINE, "server=1 data=2"])
def test_clip_is_over_what_the_optimizer_steps(plan: str) -> None:
    def sgd(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.last.parameters(), lr=0.5)

    want = Net()
    optimizer = sgd(want)
    for start in (0, 4, 8):
        optimizer.zero_grad()
        F.cross_entropy(want(X[start : start + 4]), Y[start : start + 4]).backward()
        nn.utils.clip_grad_norm_(want.last.parameters(), 0.05)
        optimizer.step()
    asked = {"optimizer": sgd, "batch_size": 4, "epochs": 1, "shuffle": False, "devices": "cpu", "progress": False}
    got = meshfit.fit(Net(), (X, Y), loss=F.cross_entropy, clip=0.05, plan=plan, **asked).model
    torch.testing.assert_close(got.state_dict(), want.state_dict())
    assert all(p.requires_grad for p in got.parameters())


ASKED = {"data": (X, Y), "loss": F.cross_entropy, "batch_size": 4, "epochs": 2, "devices": "cpu"}


def clamped_in_a_loop(plan: str) -> tuple[Any, float]:
    """Weights, that the loop clamps after each step, and the last learning rate."""
    model = Net()
    rates = []
    for step in meshfit.steps(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan=plan, **ASKED):
        rates.append(step.lr)
        with torch.no_grad():
            model.first.weight.clamp_(-0.1, 0.1)
    return model.first.weight, rates[-1]


def slowed_in_a_loop(plan: str) -> tuple[Any, float]:
    """A learning rate that the loop sets."""
    model, rates = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in meshfit.steps(model, optimizer=optimizer, plan=plan, **ASKED):
        rates.append(step.lr)
        optimizer.param_groups[0]["lr"] = 0.01
    return model.first.weight, rates[-1]


def test_what_a_loop_changes_is_refused_where_it_would_be_lost() -> None:
    with pytest.raises(JobError, match=r"first\.weight was changed in this process"):
        clamped_in_a_loop("data=2")
    with pytest.raises(JobError, match="the optimizer's lr of group 0 was changed in this process"):
        slowed_in_a_loop("data=2")
    assert clamped_in_a_loop("data=1")[0].abs().max() <= 0.1  # one device takes it
    assert slowed_in_a_loop("data=1")[1] == 0.01


def test_a_callback_that_reaches_the_model_is_told_whose_weights_it_finds() -> None:
    model = Net()
    average = [p.detach().clone() for p in model.parameters()]

    def averaged(step: meshfit.Step) -> None:
        for mine, p in zip(average, model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    for callback, said in ((averaged, True), (lambda step: None, False)):
        result = meshfit.fit(model, optimizer=sgd, plan="data=2", callbacks=callback, progress=False, **ASKED)
        assert any("averaged can reach the model" in note for note in result.notes) is said
