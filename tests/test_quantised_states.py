"""8-bit optimizer states by their own libraries: stepped whole by the owner of each matrix, so that their blocks are
those of one device; saved and resumed as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.anatomy.probe_optimizer import probe_optimizer
from tests.few import more
from tests.small import fit, losses

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
X = torch.randn(48, 16, generator=torch.Generator().manual_seed(3))
Y = (X[:, 0] > 0).long()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2))


def bitsandbytes(params: Any) -> Any:
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.AdamW8bit(params, lr=1e-2, min_8bit_size=256)


def torchao(params: Any) -> Any:
    return pytest.importorskip("torchao.optim").AdamW8bit(params, lr=1e-2)


KINDS = [bitsandbytes, pytest.param(torchao, marks=pytest.mark.more)]  # which compiles its step


def train(plan: str, optimizer: Any, **how: Any) -> meshfit.Result:
    return fit(
        plan, **({"model": net(), "data": (X, Y), "loss": F.cross_entropy, "steps": 6, "optimizer": optimizer} | how)
    )


@pytest.mark.parametrize("optimizer", KINDS)
def test_blocks_do_not_fit_cuts_and_the_trial_finds_it(optimizer: Any) -> None:
    found = probe_optimizer(optimizer(net().parameters()))
    assert not found.elementwise
    assert found.separate


@pytest.mark.parametrize(
    "plan", ["data=2", "shard=2", more("tensor=2"), "pipeline=2", more("server=1 data=2"), "offload=optimizer"]
)
@pytest.mark.parametrize("optimizer", KINDS)
def test_as_on_one_device(plan: str, optimizer: Any) -> None:
    """Up to a code: what is added in another order may be rounded to the next of 256."""
    optimizer([nn.Parameter(torch.zeros(2))])  # skips where it is not installed
    alone, got = train("data=1", optimizer), train(plan, optimizer)
    assert losses(got) == pytest.approx(losses(alone), rel=1e-3)
    for mine, theirs in zip(got.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("first", "then"), [("data=1", "data=1"), ("shard=2", "shard=2"), ("shard=2", "data=2")])
@pytest.mark.parametrize("optimizer", KINDS)
def test_resumes_to_the_bit(first: str, then: str, optimizer: Any, tmp_path: Path) -> None:
    optimizer([nn.Parameter(torch.zeros(2))])
    alone = train(first, optimizer)
    train(first, optimizer, steps=4, out=tmp_path / "run", checkpoint=2)
    rest = train(then, optimizer, out=tmp_path / "run", checkpoint=2, resume=True)
    assert [step.step for step in rest.history] == [5, 6]
    want = alone.model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in rest.model.state_dict().items())
