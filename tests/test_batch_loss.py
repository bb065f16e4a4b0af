"""Losses of the whole batch: exact wherever a batch is cut, or refused."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.errors import JobError, PlanError, RankError

X = torch.randn(29, 8, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def net(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6))


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    """InfoNCE: each sample against the next one, among all others."""
    z = F.normalize(out, dim=-1)
    return F.cross_entropy(z @ z.T / 0.5 - 1e9 * torch.eye(len(z)), (torch.arange(len(z)) + 1) % len(z))


def statistics(out: Tensor, y: Tensor) -> Tensor:
    """Variance and covariance over the batch, as VICReg has them."""
    z = out - out.mean(0)
    covariance = z.T @ z / (len(z) - 1)
    spread = F.relu(1 - (out.var(0) + 1e-4).sqrt()).mean()
    return spread + covariance.square().mean() + F.cross_entropy(out, y)


def ranking(out: Tensor, y: Tensor) -> Tensor:
    """Every pair of samples of different classes."""
    score = out[:, 0]
    pairs = y[:, None] > y[None]
    return (F.softplus(score[None] - score[:, None]) * pairs).sum() / pairs.sum().clamp(min=1)


def drawing(out: Tensor, y: Tensor) -> Tensor:
    return contrastive(out + 0.1 * torch.randn_like(out), y)


def fit(plan: str, loss: Any = contrastive, model: nn.Module | None = None, **how: Any) -> meshfit.Result:
    """Batches of 8 of 29 samples: the last has 5, uneven over ranks and microbatches."""
    defaults = {"batch_size": 8, "steps": 5, "devices": "cpu", "progress": False, "loss": loss}
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    return meshfit.fit(net() if model is None else model, (X, Y), optimizer=optimizer, plan=plan, **(defaults | how))


def assert_like_one_device(got: meshfit.Result, want: meshfit.Result) -> None:
    theirs = want.model.state_dict()
    for name, tensor in got.model.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    ours, wanted = ([step.loss for step in result.history] for result in (got, want))
    assert ours == pytest.approx(wanted, rel=1e-5)


PLANS = [
    "data=2",
    "data=3",
    "shard=2",
    "microbatches=2",
    "data=2 microbatches=3",
    "pipeline=2 microbatches=2",
    "pipeline=2 microbatches=3 data=2",
    "pipeline=2 microbatches=4 schedule=zbv",
    "tensor=2 data=2",
    "server=1 data=2",
    "server=1 data=2 shard=2 microbatches=2",
]


@pytest.fixture(scope="module")
def alone() -> dict[Any, meshfit.Result]:
    return {loss: fit("data=1", loss) for loss in (contrastive, statistics, ranking, drawing)}


@pytest.mark.parametrize("plan", PLANS)
def test_trains_like_one_device(plan: str, alone) -> None:
    got = fit(plan)
    assert_like_one_device(got, alone[contrastive])
    (note,) = [note for note in got.notes if note.startswith("loss:")]
    assert "not a mean over samples" in note
    assert ("448 B a step" in note) == any(word in plan for word in ("data=", "shard="))
    assert ("twice" in note) == ("microbatches" in plan)


@pytest.mark.parametrize("plan", ["data=3", "microbatches=2", "pipeline=2 microbatches=2"])
@pytest.mark.parametrize("loss", [statistics, ranking])
def test_other_losses(loss, plan: str, alone) -> None:
    assert_like_one_device(fit(plan, loss), alone[loss])


@pytest.mark.parametrize("plan", ["data=2", "data=2 microbatches=2", "server=1 data=2"])
def test_a_loss_that_draws_random_numbers(plan: str, alone) -> None:
    """All ranks draw what one device does."""
    assert_like_one_device(fit(plan, drawing), alone[drawing])


@pytest.mark.parametrize("plan", ["microbatches=2", "pipeline=2 microbatches=2 schedule=gpipe"])
def test_the_second_forward_is_the_first_one_again(plan: str) -> None:
    """Dropout draws the same, and BatchNorm counts a batch once."""
    trained = fit(plan, model=net(dropout=0.3, norm=True))
    counted = [int(b) for name, b in trained.model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counted == [2 * 5]
    again = fit(plan, model=net(dropout=0.3, norm=True))
    assert_like_one_device(again, trained)
    if plan == "microbatches=2":
        assert_like_one_device(trained, by_hand(net(dropout=0.3, norm=True)))


def by_hand(model: nn.Module) -> Any:
    """The same on one device, with the graphs of both microbatches kept."""
    from types import SimpleNamespace

    import numpy as np

    from meshfit.data.loader import shares
    from meshfit.data.order import Ids, mix

    torch.manual_seed(int(mix(np.array([0], np.uint64), np.uint64(0))[0] >> np.uint64(1)))
    optimizer, history = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    order = Ids(len(X), 8, seed=0, shuffle=True)
    for step in range(5):
        ids = torch.as_tensor(order(*divmod(step, order.batches)))
        parts = [ids[at] for at in shares(len(ids), 0, 1, 2)]
        loss = contrastive(torch.cat([model(X[part]) for part in parts]), Y[ids])
        history.append(SimpleNamespace(loss=float(loss.detach())))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return SimpleNamespace(model=model, history=history)


def test_outputs_of_several_kinds() -> None:
    """Features of two towers in a dict, and a temperature that is a parameter: each rank has a part of its gradient."""
    two = lambda out, y: F.cross_entropy(out["a"] @ out["b"] * out["scale"].exp(), torch.arange(len(out["a"])))
    want = fit("data=1", two, Towers())
    for plan in ("data=3", "pipeline=2 microbatches=2"):
        assert_like_one_device(fit(plan, two, Towers()), want)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.scale = nn.Linear(8, 6), nn.Linear(8, 6), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": self.a(x).tanh(), "b": self.b(x).T, "scale": self.scale * 1.0}  # samples are the second dim of b


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, 1, 8) * torch.arange(1, 9).view(-1, 1)).mean(1)


class Wide(Towers):
    def __init__(self):
        super().__init__()
        one = lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
        self.a, self.b = one(), one()


@pytest.mark.parametrize(("plan", "model"), [("branch=2 data=2", Wide), ("context=2 data=2", Sequence)])
def test_where_ranks_share_samples(plan: str, model: Any) -> None:
    towers = lambda out, y: F.cross_entropy(out["a"] @ out["b"] * out["scale"].exp(), torch.arange(len(out["a"])))
    loss = towers if model is Wide else contrastive
    assert_like_one_device(fit(plan, loss, model()), fit("data=1", loss, model()))


# In a step of the user's own


def gathered(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    out = model(x)
    return contrastive(meshfit.gather(out), y) + F.cross_entropy(out, y)  # over the batch, and a mean over samples


@pytest.mark.parametrize("plan", ["data=2", "data=3", "shard=2", "tensor=2 data=2", "server=1 data=2"])
def test_gather_in_a_step(plan: str) -> None:
    assert_like_one_device(fit(plan, None, step=gathered), fit("data=1", None, step=gathered))


def test_gather_alone_gives_back_its_argument() -> None:
    assert meshfit.gather(X) is X


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("data=2 microbatches=2", "data=2 works"),
        ("pipeline=2 data=2 microbatches=1", "data=4 works"),
        ("data=2 exchange=local", "steps by its own samples"),
    ],
)
def test_gather_is_refused_where_it_cannot_work(plan: str, words: str) -> None:
    with pytest.raises(PlanError, match=r"meshfit\.gather") as refused:
        fit(plan, None, step=gathered)
    assert words in str(refused.value)


# Refused


@pytest.mark.parametrize(
    ("plan", "works"),
    [
        ("server=1 data=2 staleness=2", "server=1 data=2 works"),
        ("data=2 exchange=local", "data=2 works"),
        ("data=2 exchange=diloco every=2", "data=2 works"),
        ("server=1 data=2 lost=average", "server=1 data=2 works"),
    ],
)
def test_refused_beside_steps_of_ones_own(plan: str, works: str) -> None:
    with pytest.raises(PlanError, match="not a mean over samples") as refused:
        fit(plan)
    assert works in str(refused.value)


def test_a_step_is_refused_with_the_remedy() -> None:
    step = lambda model, batch: contrastive(model(batch[0]), batch[1])
    with pytest.raises(PlanError, match=r"meshfit\.gather"):
        fit("data=2", None, step=step)
    fit("data=1", None, step=step, valid=(X, Y))  # batches are whole


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": contrastive(self.net(x), y)}


def test_a_models_own_loss_is_refused_with_the_remedy() -> None:
    with pytest.raises(PlanError, match="give loss="):
        fit("microbatches=2", None, OwnLoss())


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return z @ z.T


def test_outputs_that_cannot_be_gathered_are_refused() -> None:
    with pytest.raises(PlanError, match=r"\(8, 8\)"):
        fit("data=2", lambda out, y: F.cross_entropy(out, torch.arange(len(out))), Matrix())


# Evaluation


def valid_loss(trained: meshfit.Result) -> float:
    measured = trained.history[-1].valid
    assert measured is not None
    return measured["loss"]


def test_evaluated_like_one_device() -> None:
    trained = fit("data=1", valid=(X, Y), valid_every=5)
    want = valid_loss(trained)
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, len(X), 8)]
    with torch.no_grad():
        by_hand = sum(float(contrastive(trained.model(x), y)) * len(x) for x, y in batches) / len(X)
    assert want == pytest.approx(by_hand, rel=1e-5)
    for plan in ("data=3", "server=1 data=2"):
        assert valid_loss(fit(plan, valid=(X, Y), valid_every=5)) == pytest.approx(want, rel=1e-4)
    step = lambda model, batch: contrastive(meshfit.gather(model(batch[0])), batch[1])
    for plan, how in (
        ("shard=3", {"loss": contrastive}),
        ("data=2 pipeline=2", {"loss": contrastive}),
        ("data=3", {"step": step}),
    ):
        measured = meshfit.evaluate(trained.model, (X, Y), batch_size=8, plan=plan, devices="cpu", **how)
        assert measured["loss"] == pytest.approx(want, rel=1e-5)


# The user's own errors


def test_float_targets_are_refused_in_torchs_own_words() -> None:
    with pytest.raises(RankError, match=r"RuntimeError: .*dtype") as raised:
        meshfit.fit(
            nn.Linear(8, 2),
            (X, Y.float()),
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            batch_size=8,
            steps=1,
            plan="data=2",
            devices="cpu",
            progress=False,
        )
    assert "functional.py" in raised.value.trace


@pytest.mark.parametrize("plan", ["data=1", "data=2"])
def test_a_model_on_the_meta_device_is_refused(plan: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 6)
    with pytest.raises(JobError, match="weight has a shape, but no values"):
        fit(plan, model=model)
    with pytest.raises(JobError, match="meta device"):
        meshfit.predict(model, X, plan=plan, devices="cpu")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.as_tensor(np.random.randn(*x.shape), dtype=x.dtype))


def test_numpys_random_numbers_are_not_taken_for_a_loss_of_the_whole_batch() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with pytest.raises(PlanError, match=r"(?s)cannot be tried.*NumPy or Python.*draw them with torch"):
        meshfit.fit(
            Noisy(),
            (x, y),
            loss=F.mse_loss,
            optimizer=torch.optim.SGD,
            batch_size=4,
            steps=1,
            plan="data=2",
            devices="cpu",
        )
