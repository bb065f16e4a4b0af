"""``precision=bf16-compute``: one device computes as a copy of the model in bf16 does, and every plan as one device."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.axes.shard.units import traced
from meshfit.errors import PlanError
from meshfit.loss.objective import Objective
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from tests.few import more
from tests.small import fit

WORD = "precision=bf16-compute"
IDS = torch.randint(40, (48, 9), generator=torch.Generator().manual_seed(1))
X, Y = IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(t: Tensor) -> Tensor:
            first, second = t.float().chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(t.dtype)

        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tiny(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(40, width), nn.Linear(width, 40)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x)


class Images(nn.Module):
    """Of fp32, through BatchNorm and a layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 16, 4)
        self.mixed = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x - 0.5)).relu().flatten(2).mT
        x = x + torch.linspace(0, 1, 16)[:, None]  # in fp32, and the sum too
        return self.last((x + self.mixed(x, x, x, need_weights=False)[0]).flatten(1))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def train(plan: str, **how: Any) -> meshfit.Result:
    model = how.pop("model", None) or Tiny()
    defaults = {"data": (X, Y), "loss": token_loss, "batch_size": 8, "steps": 4, "shuffle": False, "optimizer": sgd}
    return fit(f"{plan} {WORD}", model=model, **(defaults | how))


def by_hand(optimizer: Any, steps: int = 4) -> tuple[nn.Module, list[float]]:
    """fp32 weights, gradients and optimizer; a copy of the weights in bf16 that computes, each step anew."""
    model, losses = Tiny(), []
    stepped = optimizer(model.parameters())
    for step in range(steps):
        low, some = copy.deepcopy(model), slice(8 * step, 8 * step + 8)
        for p in low.parameters():  # and not the rotary tables
            p.data = p.data.bfloat16()
        loss = token_loss(low(X[some]).float(), Y[some])
        loss.backward()
        losses.append(loss.item())
        for p, q in zip(model.parameters(), low.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.float()
        stepped.step()
    return model, losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_one_device_is_a_copy_in_bf16_to_the_bit(optimizer: Any) -> None:
    want, losses = by_hand(optimizer)
    got = train("data=1", optimizer=optimizer)
    assert [step.loss for step in got.history] == losses
    assert torch.equal(weights(got.model), weights(want))
    assert {p.dtype for p in got.model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore")  # dynamo looks at what it warns of itself
@pytest.mark.parametrize(
    "plan",
    ["microbatches=2", "recompute=full", "recompute=loss", more("recompute=selective"), more("offload=parameters"),
     more("offload=activations"), "data=2", "shard=2", "shard=2 zero=2", more("shard=2 zero=1 microbatches=2"),
     more("shard=2 recompute=full"), more("data=2 shard=2"), "tensor=2", more("tensor=2 sequence=split"), "context=2",
     "pipeline=2", more("pipeline=2 schedule=zbv"), more("pipeline=2 shard=2"), more("pipeline=2 tensor=2"),
     more("shard=2 tensor=2"), more("server=1 data=2"), more("compile=whole"), more("shard=2 compile=block")],
)  # fmt: skip
def test_every_plan_computes_like_one_device(plan: str) -> None:
    """Up to bf16's rounding of sums, which are of other terms: a thousandth of what four steps change, or a few."""
    want, losses = by_hand(sgd)
    got, start = train(plan), weights(Tiny())
    assert [step.loss for step in got.history] == pytest.approx(losses, rel=2e-3)
    moved = (weights(want) - start).norm()
    assert (weights(got.model) - weights(want)).norm() < 0.02 * moved


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("plan", ["microbatches=16", "data=2 microbatches=8", "shard=2 zero=2 microbatches=8",
                                  more("shard=2 zero=1 microbatches=8"), more("shard=2 microbatches=8")])  # fmt: skip
def test_gradients_add_up_in_fp32(plan: str) -> None:
    """256 and fifteen times 1: in bf16 all ones would be lost."""
    x = torch.ones(16, 1)
    x[0] = 256.0
    how = {"data": (x, torch.zeros(16)), "loss": lambda made, _: made.mean(), "batch_size": 16, "steps": 1}
    got = train(plan, model=Scalars(), optimizer=lambda ps: torch.optim.SGD(ps, lr=16.0), **how)
    assert weights(got.model).item() == -271.0


@pytest.mark.parametrize("plan", ["data=1", "shard=2"])
def test_resumes_to_the_bit(plan: str, tmp_path: Path) -> None:
    want = train(plan, optimizer=adamw)
    train(plan, optimizer=adamw, steps=2, out=tmp_path / "run", checkpoint=2)
    got = train(plan, optimizer=adamw, out=tmp_path / "run", checkpoint=2, resume=True)
    assert [step.step for step in got.history] == [3, 4]
    assert torch.equal(weights(got.model), weights(want.model))


@pytest.mark.parametrize("plan", ["data=1", "data=2", "shard=2", more("shard=2 zero=1"), more("pipeline=2")])
def test_images_batchnorm_and_what_forwards_mix(plan: str) -> None:
    x, y = torch.rand(32, 3, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4
    how = {"data": (x, y), "loss": F.cross_entropy, "batch_size": 8, "steps": 4, "shuffle": False, "optimizer": sgd}
    got, wide = train(plan, model=Images(), **how), fit("data=1", model=Images(), **how)
    assert got.model.get_buffer("norm.running_mean").dtype == torch.float32
    assert [s.loss for s in got.history] == pytest.approx([s.loss for s in wide.history], rel=2e-2)


def test_what_forward_and_loss_are_given() -> None:
    seen: dict[str, Any] = {}

    class Look(Images):
        def forward(self, x: Tensor) -> Tensor:
            seen.update({name: t.dtype for name, t in (*self.named_parameters(), *self.named_buffers())}, x=x.dtype)
            return super().forward(x)

    def loss(made: Tensor, targets: Tensor) -> Tensor:
        seen["made"] = made.dtype
        return F.cross_entropy(made, targets)

    train("data=1", model=Look(), data=(torch.rand(8, 3, 6, 6), torch.arange(8) % 4), loss=loss, steps=1)
    half = {"first.weight", "first.bias", "last.weight", "last.bias", "mixed.in_proj_weight", "mixed.in_proj_bias"}
    half |= {"mixed.out_proj.weight", "mixed.out_proj.bias"}
    assert {name for name, dtype in seen.items() if dtype == torch.bfloat16} == half


class Mixed(nn.Module):
    """A table in fp32 that a product meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.table


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.mul_(0.5)
        return self.layer(x)


@pytest.mark.parametrize(("model", "said"), [(Mixed(), r"test_bf16_compute.py:\d+"),
                                             (Changing(), "own code changes weights")])  # fmt: skip
def test_what_it_cannot_compute_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(PlanError, match=rf"(?s){said}.*precision=bf16 \(autocast\)"):
        train("data=1", model=model, data=(torch.randn(16, 8), torch.randn(16, 8)), loss=F.mse_loss)


def test_costs_are_of_bf16_throughout() -> None:
    """Residuals, norms and logits in two bytes; the logits once more in fp32 for the loss."""
    model = Tiny()
    kept, held = {}, {}
    for word in ("fp32", "bf16", "bf16-compute"):
        plan = Plan.parse(f"precision={word}")
        trace = traced(model, Objective(token_loss), (X[:8], Y[:8]), device="cuda", plan=plan)
        assert not isinstance(trace, Exception)
        kept[word], held[word] = trace.cost.kept, cost(plan, trace, sgd(model.parameters())).held
    assert kept["bf16-compute"] < 0.85 * kept["bf16"]
    assert kept["bf16-compute"] > 0.5 * kept["fp32"]
    assert held["bf16-compute"]["weights"] == held["fp32"]["weights"]
    assert held["bf16-compute"]["rounded"] == held["fp32"]["weights"] // 2
