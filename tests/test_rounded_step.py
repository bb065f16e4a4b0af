"""Weights and optimizer states in bf16: stepped in fp32, rounded stochastically, alike under every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import meshfit
from benchmarks.matrix_optimizers import Distance, Muon
from meshfit.checkpoint.box import runs, whole
from meshfit.checkpoint.pieces import LocalBox, ShardLayout, whole_of
from meshfit.errors import PlanError
from meshfit.rounded_step import RoundedStep
from tests.few import more
from tests.small import assert_same, fit, losses

X = torch.randint(-2, 3, (48, 8), generator=torch.Generator().manual_seed(1)).float()
Y = torch.zeros(48)
BOTH = "precision=bf16-true states=bf16"


class Sums(nn.Module):
    """Gradients are sums of small integers, exact in any order: what differs between plans is then the rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], 1)


def total(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.float().sum(1).mean()


def train(plan: str, **how: Any) -> meshfit.Result:
    adamw = lambda params: AdamW(params, lr=1e-2)
    defaults = {"model": Sums(), "data": (X, Y), "loss": total, "batch_size": 16, "steps": 6, "optimizer": adamw}
    return fit(plan, **(defaults | how))


def weights(result: meshfit.Result) -> dict[str, Tensor]:
    return result.model.state_dict()


@pytest.fixture(scope="module", params=["precision=bf16-true", "states=bf16", BOTH])
def words(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    "plan",
    ["data=2", "shard=3", more("shard=2 zero=1"), "tensor=2", more("pipeline=2"), more("shard=2 tensor=2"),
     "microbatches=2 offload=optimizer", more("offload=parameters")],
)  # fmt: skip
def test_the_bits_of_one_device(plan: str, words: str) -> None:
    alone, got = weights(train(f"data=1 {words}")), weights(train(f"{plan} {words}"))
    assert all(torch.equal(got[name], alone[name]) for name in alone)


def test_a_model_that_a_function_builds_and_matrices_that_are_stepped_whole() -> None:
    optimizers = lambda model: [
        Muon([model.first.weight, model.second.weight]),
        AdamW([model.first.bias, model.second.bias]),
    ]
    alone = train(f"data=1 {BOTH}", optimizer=optimizers)
    got = train(f"shard=2 {BOTH}", model=Sums, optimizer=optimizers)
    assert all(torch.equal(weights(got)[name], tensor) for name, tensor in weights(alone).items())


@pytest.mark.parametrize(("first", "then"), [("data=1", "data=1"), ("shard=2", "data=1 offload=optimizer")])
def test_resumes_to_the_bit(first: str, then: str, words: str, tmp_path: Path) -> None:
    alone = train(f"data=1 {words}")
    train(f"{first} {words}", steps=4, out=tmp_path / "run", checkpoint=2)
    rest = train(f"{then} {words}", out=tmp_path / "run", checkpoint=2, resume=True)
    assert [step.step for step in rest.history] == [5, 6]
    assert all(torch.equal(weights(rest)[name], tensor) for name, tensor in weights(alone).items())


def test_states_of_another_precision_do_not_fit(tmp_path: Path) -> None:
    train("states=bf16", steps=2, out=tmp_path / "run", checkpoint=2)
    with pytest.raises(meshfit.MeshfitError, match="states=bf16"):
        train("data=1", out=tmp_path / "run", checkpoint=2, resume=True)


def test_what_is_held_in_bf16_and_what_is_given_back() -> None:
    seen: dict[str, Any] = {}

    class Look(Sums):
        def forward(self, x: Tensor) -> Tensor:
            seen.update({name: p.dtype for name, p in self.named_parameters()})
            return super().forward(x)

    result = train("precision=bf16-true", model=Look())
    assert seen["first.weight"] == torch.bfloat16
    assert seen["first.bias"] == torch.float32
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    held = result.model.first.weight
    assert torch.equal(held, held.bfloat16().float())


def test_small_updates_are_not_lost() -> None:
    """A 4096th of a weight, 64 times: rounded to the nearest none would count."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    at = iter(range(64))
    around = RoundedStep({weight: whole_of((64, 64))}, {weight: "w"}, states=None, seed=0, step=lambda: next(at))
    optimizer = torch.optim.SGD([weight], lr=2.0**-12)
    for _ in range(64):
        weight.grad = torch.ones(64, 64)
        with around([weight], optimizer.state):
            optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert weight.float().mean().item() == pytest.approx(1 - 64 / 4096, abs=3e-4)
    assert len(weight.float().unique()) > 2


def test_a_piece_is_rounded_as_in_the_whole() -> None:
    wide, steps = torch.randn(7, 10), lambda: 3

    def rounded(part: Tensor, layout: ShardLayout) -> Tensor:
        p = nn.Parameter(part.bfloat16())
        p.grad_dtype = torch.float32
        p.grad = torch.zeros_like(part)
        with RoundedStep({p: layout}, {p: "w"}, states=None, seed=5, step=steps)([p], {}):
            p.data.copy_(part)
        return p.data

    want = rounded(wide, whole_of((7, 10)))
    assert not torch.equal(want, wide.bfloat16())
    start, stop = 13, 58  # as shard= cuts, through rows
    at, pieces = 0, []
    for box in runs((7, 10), start, stop):
        size = tuple(b - a for a, b in box)
        pieces.append(LocalBox(box, tuple(slice(0, n) for n in size), at, size, (0, 1)))
        at += size[0] * size[1]
    assert torch.equal(
        rounded(wide.flatten()[start:stop], ShardLayout((7, 10), tuple(pieces))), want.flatten()[start:stop]
    )
    columns = ((0, 7), (4, 9))  # as tensor= cuts
    layout = ShardLayout((7, 10), (LocalBox(columns, (slice(0, 7), slice(0, 5))),))
    assert torch.equal(rounded(wide[:, 4:9].contiguous(), layout), want[:, 4:9])
    assert whole((7, 10)) == ((0, 7), (0, 10))


def test_an_average_of_rounded_weights_is_not_rounded() -> None:
    result = train("precision=bf16-true", ema=0.9, valid=(X, Y), valid_every=2)
    again = train("precision=bf16-true", ema=0.9)
    assert_same(result, again, 0)  # looking at the average, which swaps it in, changes nothing


@pytest.mark.parametrize("optimizer", [Distance, lambda params: torch.optim.LBFGS(params)])
def test_optimizers_that_step_all_parameters_at_once_are_refused(optimizer: Any) -> None:
    with pytest.raises(PlanError, match="works"):
        train("data=1 precision=bf16-true", optimizer=optimizer)


@pytest.mark.parametrize("plan", ["server=1 data=2", "data=2 exchange=local every=2"])
def test_other_exchanges_are_refused(plan: str) -> None:
    with pytest.raises(PlanError, match="does not go with"):
        train(f"{plan} {BOTH}")


def test_the_loss_is_that_of_fp32() -> None:
    data, loss = (X, (X[:, 0] > 0).long()), nn.functional.cross_entropy
    net = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    torch.manual_seed(1)
    model = net()
    how: dict[str, Any] = {"data": data, "loss": loss, "steps": 40}
    full = train("data=1", model=model, **how)
    torch.manual_seed(1)
    narrow = train(f"data=1 {BOTH}", model=net(), **how)
    assert losses(narrow)[-1] == pytest.approx(losses(full)[-1], rel=0.2)
    assert losses(narrow)[-1] < 0.5 * losses(narrow)[0]
