"""Linear layers in fp8: scaled by rows, so that shares of a batch are quantised as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.axes.fp8 import LinearInFp8, product, quantise
from meshfit.errors import PlanError
from tests.few import more
from tests.small import fit, losses

X = torch.randn(48, 16, generator=torch.Generator().manual_seed(3))
Y = (X[:, 0] > 0).long()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def train(plan: str, **how: Any) -> meshfit.Result:
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    defaults = {"model": net(), "data": (X, Y), "loss": F.cross_entropy, "optimizer": sgd, "steps": 5}
    return fit(f"{plan} precision=fp8", **(defaults | how))


def test_a_row_is_quantised_by_itself() -> None:
    rows, weight = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    rows[3] *= 1000
    whole = product(rows, weight)
    assert torch.equal(product(rows[:7], weight), whole[:7])
    want = rows.float() @ weight.float().t()
    assert (whole - want).norm() / want.norm() < 0.05
    assert quantise(rows)[0].dtype == torch.float8_e4m3fn


def test_gradients_are_near_those_of_fp32() -> None:
    x, layer = torch.randn(24, 32, requires_grad=True), nn.Linear(32, 48)
    layer(x).square().mean().backward()
    want = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    with LinearInFp8():
        made = layer(x)
    assert made.dtype == torch.bfloat16
    made.float().square().mean().backward()
    for mine, theirs in zip([x.grad, layer.weight.grad, layer.bias.grad], want, strict=True):
        assert mine.dtype == torch.float32
        assert 0 < (mine - theirs).norm() / theirs.norm() < 0.1


def test_odd_sizes_stay_as_they_are() -> None:
    x, layer = torch.randn(4, 10), nn.Linear(10, 16)
    with LinearInFp8():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("plan", ["data=2", "shard=2", more("shard=2 zero=1"), "microbatches=3", "pipeline=2"])
def test_as_on_one_device(plan: str) -> None:
    alone, got = losses(train("data=1")), losses(train(plan))
    assert got[0] == pytest.approx(alone[0], rel=1e-6)  # the same weights: quantised alike
    assert got == pytest.approx(alone, rel=5e-3)
    bf16 = losses(fit("precision=bf16", model=net(), data=(X, Y), loss=F.cross_entropy, steps=1))
    assert abs(bf16[0] - alone[0]) > 1e-5


def test_resumes_to_the_bit(tmp_path: Path) -> None:
    alone = train("data=1")
    train("data=1", steps=3, out=tmp_path / "run", checkpoint=3)
    rest = train("data=1", out=tmp_path / "run", checkpoint=3, resume=True)
    want = alone.model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in rest.model.state_dict().items())
    assert any("emulated" in note for note in rest.notes)


@pytest.mark.parametrize("plan", ["tensor=2", "recompute=full", "compile=block", "server=1 data=2"])
def test_refused_with_what_works(plan: str) -> None:
    with pytest.raises(PlanError, match="works, and fp8 under data, shard and pipeline"):
        train(plan)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_computes_what_is_emulated() -> None:
    rows, weight = torch.randn(100, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    torch.testing.assert_close(product(rows.cuda(), weight.cuda()).cpu(), product(rows, weight), rtol=2e-2, atol=2e-2)
