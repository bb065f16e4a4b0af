"""Cutting a model into stages: who holds what, what crosses, and what cannot be cut."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import zoo
from meshfit.anatomy.record_build import tied
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.pipeline.staged import Staged
from meshfit.axes.pipeline.stages import FoundStages, Pipeline, part_of_trace
from meshfit.errors import PlanError
from meshfit.loss.objective import Objective
from tests.few import few
from tests.ranked import built

CPU = torch.device("cpu")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
MSE = Objective(F.mse_loss)


class Skips(nn.Module):
    """Several tensors cross each cut: a skip connection, a mask, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        mask, order = early > 0, early.argsort(1)
        middle = self.second(early.tanh())
        late = self.third(middle).masked_fill(mask, 0.1)
        return self.last(late.gather(1, order) + early) * self.scale + self.shift


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.add_(1.0)
        return self.second(hidden.relu_())


class Stateful(nn.Module):
    """One BatchNorm, called at the beginning and at the end: its statistics can live in one place only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(self.norm(x)))


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(hidden) if hidden.sum() > 0 else hidden


def found(model: nn.Module, stages: int = 2, batch: Any = None, objective: Any = MSE, **asked: Any) -> FoundStages:
    batch = (X, X) if batch is None else batch
    return Pipeline(degree=stages, **asked).find(model, objective, batch, device="cpu")


def all_stages(model: nn.Module, stages: int, batch: Any, objective: Any = MSE, **asked: Any) -> list[Staged]:
    pipeline = Pipeline(degree=stages, **asked)
    where = pipeline.find(model, objective, batch, device="cpu").to_send()
    return [Staged.of(pipeline, model, where, rank, drop=False) for rank in range(stages)]


def through(staged: list[Staged], objective: Any, content: Any, *, training: bool = True) -> Any:
    """All stages one after the other, in this process; gradients flow through."""
    received: list[Tensor] = []
    result, layouts = None, {}
    for stage, part in enumerate(staged):
        root = part.root(objective)
        program = part.programs(objective).of(content, root, CPU, training=training)
        program.layouts = layouts
        ran = program.run(stage, root, program.bind(content), received, CPU)
        received, result = ran.made, ran.result
    return result


def test_a_stage_holds_its_own_parameters_under_their_names() -> None:
    model = Skips()
    names = [name for name, _ in model.named_parameters()]
    parts = [set(dict(staged.model.named_parameters())) for staged in all_stages(model, 2, (X, X))]
    assert parts[0] | parts[1] == set(names)
    assert not parts[0] & parts[1]
    assert "first.weight" in parts[0]
    assert {"scale", "last.weight"} <= parts[1]
    staged = all_stages(model, 2, (X, X))
    assert [set(dict(part.model.named_buffers())) for part in staged] == [set(), {"shift"}]
    assert staged[1].model.get_submodule("last") is model.last
    assert isinstance(staged[0].model, Shell)


def test_what_is_not_held_is_let_go() -> None:
    model = built(zoo.TiedGPT)
    ties, names = tied(model), list(dict(model.named_parameters()))
    pipeline = Pipeline(degree=2)
    objective = Objective(lambda out, y: F.cross_entropy(out.view(-1, zoo.VOCABULARY), y.view(-1)))
    where = pipeline.find(model, objective, zoo.next_tokens(4), device="cpu")
    staged = Staged.of(pipeline, model, where, 0)
    assert list(dict(model.named_parameters())) == names
    assert tied(model) == ties
    held = dict(staged.model.named_parameters())
    for name, p in model.named_parameters():
        assert (p.numel() == 0) == (name not in held)
    assert not any(p.is_meta for p in held.values())


def test_tied_parameters_are_on_both_sides_under_one_name() -> None:
    model = built(zoo.TiedGPT)
    objective = Objective(lambda out, y: F.cross_entropy(out.view(-1, zoo.VOCABULARY), y.view(-1)))
    first, last = all_stages(model, 2, zoo.next_tokens(4), objective)
    assert first.tied == last.tied == {"token.weight": (0, 1)}
    for staged in (first, last):
        assert "token.weight" in dict(staged.model.named_parameters())
        assert "head.weight" not in dict(staged.model.named_parameters())
        assert staged.owners["token.weight"] == 0
    v_shaped = Pipeline(degree=2, word="zbv", microbatches=4)
    staged = Staged.of(
        v_shaped, model, v_shaped.find(model, objective, zoo.next_tokens(4), device="cpu"), 0, drop=False
    )
    assert staged.tied == {}, "both ends are on one rank, where it is one tensor"


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("make", [Skips, InPlace])
def test_stages_in_a_row_are_the_model(make: Any, stages: int) -> None:
    model = built(make)
    if make is InPlace and stages > 3:
        stages = 3
    staged = all_stages(model, stages, (X, X))
    for size in (6, 3, 2):  # recorded again for each
        content = (X[:size].clone(), X[:size].clone())
        model.zero_grad()
        want = MSE(model, content)
        want.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        got = through(staged, MSE, content)
        got.backward()
        assert torch.equal(want, got)
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, gradients[name])


def test_predictions_through_stages_cut_for_training() -> None:
    """They have no loss, and dropout is gone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4))
    staged = all_stages(model, 4, (X, X[:, :4]))
    model.eval()
    got = through(staged, lambda model, batch: model(batch), X[:3], training=False)
    assert torch.equal(got, model(X[:3]))


def test_a_branch_that_depends_on_the_inputs() -> None:
    case = zoo.ZOO["partial"]
    model, objective = case.build(), Objective(case.loss)
    x, y = case.data(12)
    staged = all_stages(model, 2, (x[:4], y[:4]), objective)
    assert {"branch.weight", "unused"} <= set(staged[0].tied), "any stage may come to use it"
    for at in (slice(0, 4), slice(8, 12)):  # the second takes the branch
        assert torch.equal(through(staged, objective, (x[at], y[at])), objective(model, (x[at], y[at])))


def test_cut_by_names() -> None:
    model = built(zoo.TiedGPT)
    objective = Objective(lambda out, y: F.cross_entropy(out.view(-1, zoo.VOCABULARY), y.view(-1)))
    batch = zoo.next_tokens(4)
    first, last = found(model, 2, batch, objective, cut=("norm",)).split.parameters
    assert set(last) == {"norm.weight", "norm.bias", "token.weight"}
    with pytest.raises(PlanError, match="calls no such module"):
        found(model, 2, batch, objective, cut=("head.nothing",))
    with pytest.raises(PlanError, match=r"2 stages, but 3 are needed(.|\n)*name 2 modules"):
        found(model, 3, batch, objective, cut=("norm",))
    with pytest.raises(PlanError, match="in the order in which they run"):
        found(model, 3, batch, objective, cut=("norm", "blocks.1"))
    names = {name for name in first if not name.startswith("blocks")}
    assert names == {"token.weight", "position"}


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot be cut into 3 stages(.|\n)*norm.* is written in the forward"):
        found(Stateful(), 3)
    with pytest.raises(PlanError, match=r"only as a whole(.|\n)*bool(.|\n)*data=2 and shard=2"):
        found(Decides())
    with pytest.raises(PlanError, match=r"cannot be cut into 9 stages(.|\n)*pipeline=\d is the most"):
        found(nn.Linear(8, 8), 9)


@pytest.mark.parametrize("name", few(["unet-diffusers", "t5", "gpt2", "resnet10"], "t5", "gpt2"))
def test_real_models(name: str) -> None:
    case = zoo.ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, objective = case.build().train(), Objective(case.loss)
        data = case.data(4)
        batch = (*data[0], data[1]) if isinstance(data, tuple) and isinstance(data[0], tuple) else data
        staged = all_stages(model, 4, batch, objective)
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        got = through(staged, objective, batch)
        changed = {n: b.clone() for n, b in model.named_buffers()}
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
        want = objective(model, batch)
    assert torch.equal(got, want)
    for n, b in model.named_buffers():
        assert torch.equal(b, changed[n])
    assert set().union(*(dict(s.model.named_parameters()) for s in staged)) == set(dict(model.named_parameters()))


def test_cost_of_a_rank() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pipeline = Pipeline(degree=2, word="1f1b", microbatches=4)
    trace = pipeline.find(model, MSE, (X, X), device="cpu").trace
    assert trace is not None
    cut = pipeline.cut_of(trace)
    for rank in range(2):
        mine, added, alive = pipeline.cost(trace, rank)
        assert mine.parameter_bytes == 2 * (8 * 8 + 8) * 4
        assert added.moved == {"send": 4 * X.numel() * 4}
        assert added.calls == {"send": 4}
        assert alive == 2 - rank
        assert [event.index for event in mine.events] == list(range(len(mine.events)))
    whole = part_of_trace(trace, cut, (0, 1))
    assert whole.cost == trace.cost
    sizes = [sum(trace.events[i].cost.kept for i in events) for events in cut.ranges]
    assert pipeline.kept(trace, cut) == (2 * sizes[0], sizes[1])
