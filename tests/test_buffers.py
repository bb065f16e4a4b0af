"""Buffers that a forward writes: under every plan those of one device, or refused before training."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.axes.buffers.find import Written, find
from meshfit.axes.buffers.watch import buffers_kept
from meshfit.data.source import spread
from meshfit.errors import PlanError
from tests.few import more

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
Y = (X[:, 0] > 0).long()


class Quantiser(nn.Module):
    """A vector quantiser with an EMA codebook, as it is usually written."""

    def __init__(self, codes: int = 8, width: int = 4, decay: float = 0.8):
        super().__init__()
        self.codes, self.decay = codes, decay
        embed = torch.randn(codes, width, generator=torch.Generator().manual_seed(1))
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
        nearest = distance.argmin(1)
        chosen = F.one_hot(nearest, self.codes).type(flat.dtype)
        quantised = F.embedding(nearest, self.embed).view_as(x)
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(chosen.t() @ flat.detach(), alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + self.codes * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(1))
        return x + (quantised - x).detach()


class Replaced(nn.Module):
    """The same with new tensors in the place of the old, a parameter that is not trained, and averages by a child."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.table.weight = nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), False)
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.table.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.table.weight).argmin(1)
        quantised = self.table(nearest)
        if self.training:
            chosen = F.one_hot(nearest, 8).to(x.dtype)
            self.sizes = self.sizes * 0.9 + 0.1 * chosen.sum(0)
            self.sums = self.sums * 0.9 + 0.1 * torch.matmul(chosen.t(), x.detach())
            self.table.weight.data.copy_(self.sums / self.sizes.clamp(min=1e-3).unsqueeze(1))
        return x + (quantised - x).detach()


class Tallies(nn.Module):
    """Sums, means, extremes, counts."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "mean", "squares", "centre"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("peak", torch.full((4,), -9.0))
        self.register_buffer("lowest", torch.full((4,), 9.0))
        self.register_buffer("histogram", torch.zeros(5))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(0))

    @torch.no_grad()
    def _tally(self, x: Tensor) -> None:
        self.total = self.total + x.sum(0)
        self.mean.lerp_(x.mean(0), 0.1)
        self.squares.mul_(0.9).add_(0.1 * x.pow(2).mean(0))
        self.peak.copy_(torch.maximum(self.peak, x.amax(0)))
        self.lowest = torch.minimum(self.lowest, x.min(0).values)
        self.histogram.index_add_(0, x[:, 0].sigmoid().mul(4).long(), torch.ones(len(x), dtype=x.dtype))
        self.steps += 1
        self.seen += len(x)
        self.centre.copy_(self.total / self.seen)

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x - self.centre) / (1 + self.squares - self.mean**2).clamp(min=0.1).sqrt()
        if self.training:
            self._tally(x)
        return scaled


class Counter(nn.Module):
    """Counts its calls, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Net(nn.Module):
    """``middle`` between two layers."""

    def __init__(self, *middle: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 4), nn.Sequential(*middle), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def every_kind() -> nn.Module:
    torch.manual_seed(0)
    old = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    new = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return Net(Tallies(), old, Quantiser(), new, Counter(), Replaced())


def trained(plan: str, model: Callable[[], nn.Module] = every_kind, **how) -> meshfit.Result:
    defaults = {
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batch_size": 13,  # of 40: the last of an epoch has one sample
        "steps": 6,
        "devices": "cpu",
        "seed": 3,
        "progress": False,
    }
    return meshfit.fit(model, (X, Y), plan=plan, **(defaults | how))


@cache
def alone(model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in trained("data=1", model).model.state_dict().items()}


def assert_alone(result: meshfit.Result, model: Callable[[], nn.Module]) -> None:
    for name, tensor in result.model.state_dict().items():
        want = alone(model)[name]
        torch.testing.assert_close(tensor, want, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "plan",
    [
        more("data=2"),
        "data=3",
        more("microbatches=2"),
        "microbatches=3 recompute=full",
        more("pipeline=2 microbatches=2"),
        "data=2 pipeline=2 microbatches=4",
        "server=1 data=2",
    ],
)
def test_weights_and_buffers_are_those_of_one_device(plan: str) -> None:
    result = trained(plan)
    assert_alone(result, every_kind)
    assert any("middle.2.embed" in note and "from the whole batch" in note for note in result.notes)
    assert any("middle.4.calls" in note and "do not depend on samples" in note for note in result.notes)


def buffers_alone() -> nn.Module:
    return Net(Tallies(), Quantiser(), nn.Linear(4, 4))


@pytest.mark.parametrize("plan", [more("shard=2"), "shard=2 zero=1 microbatches=2", "data=2 tensor=2"])
def test_where_weights_are_cut(plan: str) -> None:
    assert_alone(trained(plan, buffers_alone), buffers_alone)


def in_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the whole batch."""
    return F.cross_entropy(outputs @ outputs.t(), targets) + outputs.var(0).mean()


@pytest.mark.parametrize("plan", ["microbatches=2", "pipeline=2 microbatches=2"])
def test_where_microbatches_go_forward_twice(plan: str) -> None:
    want = trained("data=1", buffers_alone, loss=in_pairs, steps=3).model.state_dict()
    for name, tensor in trained(plan, buffers_alone, loss=in_pairs, steps=3).model.state_dict().items():
        torch.testing.assert_close(tensor, want[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


# What is found


def found(model: nn.Module) -> Written:
    """And the model, and random numbers, are left alone."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    drawn = torch.get_rng_state()
    written = find(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda: (X, Y), torch.device("cpu"))
    assert torch.equal(drawn, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    return written


def test_a_model_that_writes_no_buffer_is_not_tried() -> None:
    assert found(Net(nn.BatchNorm1d(4))) == Written()


class InItsOwnForward(nn.Module):
    """The model itself keeps an average, behind a BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x)
        if self.training:
            self.average.mul_(0.9).add_(0.1 * inner.detach().pow(2).mean(0))
        return self.head(inner)


def test_batchnorm_and_dropout_around_it_do_not_matter() -> None:
    written = found(InItsOwnForward())
    assert written.combined == ("average",)
    with pytest.raises(PlanError, match="forward of the whole model"):
        trained("pipeline=2 microbatches=2", InItsOwnForward)


class Refused(nn.Module):
    """``how`` says what its forward does to its buffer."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.register_buffer("held", torch.ones(4))
        self.register_buffer("queue", torch.zeros(64, 4))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        with torch.no_grad():
            mean = x.mean(0)
            if self.how == "variance":
                self.held.mul_(0.9).add_(0.1 * x.var(0))
            elif self.how == "queue":
                self.queue.copy_(torch.cat([x, self.queue])[:64])
            elif self.how == "turn":
                self.turn += 1
                self.queue[self.turn % 64].copy_(mean)
            elif self.how == "random":
                self.held.lerp_(mean, 0.1).add_(torch.randn_like(self.held))
            elif self.how == "median":
                self.held.lerp_(x.median(0).values, 0.1)
            elif self.how == "decides":
                self.held.lerp_(mean, 0.1)
                if self.held.sum() < -100:
                    self.held.zero_()
            elif self.how == "marks":
                self.held[x.argmax(1)] = 0.0
            else:
                self.held.lerp_(mean, 0.1)
        return x - self.held if self.how == "used" else x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Refused("plain")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class TwoNames(nn.Module):
    """Writes, too, to a buffer of a module that it knows by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Refused("plain")
        self.other = self.one

    def forward(self, x: Tensor) -> Tensor:
        out = self.other(x)
        self.one.held.mul_(0.99)
        return out


def test_a_module_with_two_names_is_one() -> None:
    assert found(Net(TwoNames())).combined == ("middle.0.one.held",)


REFUSED = {
    "variance": "neither a sum nor a mean",
    "queue": "neither a sum nor a mean",
    "turn": "depends on the samples, or on the calls before",
    "random": "random numbers",
    "median": "neither a sum nor a mean",
    "decides": "depends on values that it has just written",
    "marks": "neither a sum nor a mean",
    "used": "computed from what it has just written",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_combined_is_known_before(how: str) -> None:
    written = found(Net(Refused(how)))
    (name,) = written.refused
    assert name == ("middle.0.queue" if how in ("queue", "turn") else "middle.0.held")
    assert REFUSED[how] in written.refused[name]


def test_a_module_that_is_called_twice_reads_what_its_first_call_wrote() -> None:
    assert "called 2 times" in found(Net(Twice())).refused["middle.0.inner.held"]


def test_a_parameter_in_slices_is_not_written() -> None:
    with pytest.raises(PlanError, match="data=2 works"):
        trained("shard=2", lambda: Net(Replaced()), steps=1)


def test_a_refusal_names_the_buffer_and_the_remedy() -> None:
    with pytest.raises(PlanError) as error:
        trained("microbatches=2", lambda: Net(Refused("variance")), steps=2)
    assert "middle.0.held" in str(error.value)
    assert "buffers=local" in str(error.value)
    local = trained("microbatches=2 buffers=local", lambda: Net(Refused("variance")), steps=2)
    assert any("every rank updates its own" in note for note in local.notes)
    assert trained("data=1", lambda: Net(Refused("variance")), steps=2).history  # one device takes it as it is


@pytest.mark.parametrize("plan", ["data=2 exchange=local every=2", "server=1 data=2 staleness=2", "context=2"])
def test_plans_that_do_not_step_like_one_device_refuse_it(plan: str) -> None:
    from meshfit.axes.buffers.check import check
    from meshfit.plan import Plan

    with pytest.raises(PlanError, match=r"middle\.0\."):
        check(Plan.parse(plan), found(Net(Quantiser())), by_rows=False, joins=False)


# Forwards that are no training


def test_evaluation_leaves_buffers_as_they_were() -> None:
    ends = {}
    for plan in ("data=1", "microbatches=2"):
        result = trained(plan, lambda: Net(Counter()), valid=(X, Y), valid_every=2)
        ends[plan] = int(result.model.state_dict()["middle.0.calls"])
    assert ends == {"data=1": 6, "microbatches=2": 6}
    model = Net(Counter())
    meshfit.evaluate(model, (X, Y), loss=F.cross_entropy, batch_size=8, devices="cpu")
    assert int(model.middle[0].calls) == 0


def test_a_step_that_is_not_taken_leaves_them_too() -> None:
    broken = X.clone()
    broken[5] = torch.nan
    for plan in ("data=1", "microbatches=2"):
        how = {"on_nan": "skip", "shuffle": False, "steps": 3}
        model = Net(Quantiser(), Counter())
        result = meshfit.fit(
            model,
            (broken, Y),
            loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=13,
            plan=plan,
            devices="cpu",
            progress=False,
            **how,
        )
        held = result.model.state_dict()
        assert int(held["middle.1.calls"]) == 2
        assert held["middle.0.embed"].isfinite().all()


# What is written in unusual ways


class Assigned(nn.Module):
    """Sets the memory of its buffer, in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean * 0.5 + x.detach().mean(0)
        return x


def test_forwards_that_are_no_training_do_not_set_buffers() -> None:
    model = Assigned()
    with buffers_kept(model):
        model(torch.ones(3, 4))
    assert model.mean.tolist() == [0.0] * 4


class Odd(nn.Module):
    """A mean over samples, then over positions, through memory that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.scratch = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scratch.copy_(x.detach().mean(0).mean(0))
            self.mean.lerp_(self.scratch, 0.1)
        return x


class Lengths(nn.Module):
    """Samples of the first half are of three positions, those of the second of four."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.head = Odd(), nn.Linear(6, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return self.head(self.odd(x[:, : int(length.max())]).mean(1))


def test_a_statistic_may_be_made_of_tensors_of_any_length() -> None:
    x = torch.randn(512, 4, 6, generator=torch.Generator().manual_seed(0))
    tried = {int(i) // 8 for count in (4, 8, 13, 16, 32) for i in spread(512, count)}
    length = torch.tensor([3 if i // 8 in tried else 4 for i in range(512)])
    ends = []
    for plan in ("data=1", "microbatches=2"):
        torch.manual_seed(0)
        model = Lengths()
        how = {"loss": F.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "batch_size": 8, "epochs": 1}
        data = ((x, length), torch.arange(512) % 2)
        meshfit.fit(model, data, plan=plan, devices="cpu", shuffle=False, progress=False, **how)
        ends.append(model.odd.mean)
    assert length.max() == 4
    torch.testing.assert_close(ends[0], ends[1])
