"""Local steps: weights averaged now and then, with and without an outer optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshfit.errors import PlanError
from meshfit.exchange import allreduce
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.local import Local, Outer
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.update import Update
from tests.distributed import distributed

CPU = torch.device("cpu")
X = torch.randn(36, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(36, 2, generator=torch.Generator().manual_seed(2))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def parts(step: int, uneven: bool) -> slice:
    """This rank's samples: with ``uneven`` rank 0 has one, rank 1 three, and the last at times none."""
    start, edges = step * 6 % 36, ([0, 1, 4, 4 if step % 2 else 6] if uneven else [0, 2, 4, 6])
    return slice(start + edges[dist.get_rank()], start + edges[dist.get_rank() + 1])


def train(exchange: Any, model: nn.Module, update: Update, steps: int, *, uneven: bool = False) -> list[float]:
    """As the loop does: a rank's gradient is that of its own sum over the number of all samples."""
    losses, summed = [], isinstance(exchange, AllReduce)
    for step in range(steps):
        at = parts(step, uneven)
        count = at.stop - at.start
        whole = 6 if not uneven or step % 2 == 0 else 4
        x, y = (X[at], Y[at]) if count else (X[:2], Y[:2])
        model.eval()  # BatchNorm by its running statistics: what it does over ranks is not what is tested
        loss = F.mse_loss(model(x), y) * (count / whole)
        exchange.arm(StepScalars(loss.item(), float(count)))
        loss.backward()
        scalars = exchange.finish()
        correction = 1.0 if summed else whole / scalars.count
        update(exchange.gradients, scalars.loss * correction, correction, exchange.norm)
        losses.append(float(scalars.loss * correction))
        exchange.clear()
    return losses


def sgd(model: nn.Module, **how: Any) -> Update:
    return Update(torch.optim.SGD(model.parameters(), lr=0.1, **how))


def spread(model: nn.Module) -> float:
    """How far apart the ranks' weights are."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return float((high - low).max())


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("how", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}], ids=str)
@distributed(world=3)
def test_averaged_every_step_is_all_reduce(how: dict[str, float], uneven: bool) -> None:
    if uneven and "momentum" in how:
        return  # a rank's momentum is of its own samples: only with equal shares is the mean that of all
    one, other = net(), net()
    train(AllReduce(one.parameters(), dist.group.WORLD, CPU), one, sgd(one, **how), 12, uneven=uneven)
    train(Local(other, dist.group.WORLD, CPU, every=1), other, sgd(other, **how), 12, uneven=uneven)
    for want, got in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outer", [None, Outer()])
@pytest.mark.parametrize("overlap", [0, 2])
@distributed(world=3)
def test_ranks_meet_every_h_steps(outer: Outer | None, overlap: int) -> None:
    model = net()
    exchange = Local(model, dist.group.WORLD, CPU, every=4, outer=outer, overlap=overlap)
    update = Update(torch.optim.AdamW(model.parameters(), lr=1e-2))
    apart = []
    for _ in range(9):
        train(exchange, model, update, 1)
        apart.append(spread(model))
    assert (apart[3] < 1e-6) == (apart[7] < 1e-6) == (not overlap)
    assert apart[1] > 1e-4
    exchange.settle()
    assert spread(model) < 1e-6
    with exchange.agreed():
        assert spread(model) < 1e-6


@distributed(world=3)
def test_diloco_steps_with_nesterov_momentum_on_the_mean_change() -> None:
    """Against torch's own SGD as the outer optimizer."""
    model, inner, reference = net(), net(), net()
    exchange = Local(model, dist.group.WORLD, CPU, every=3, outer=Outer(lr=0.5, momentum=0.8))
    update = Update(torch.optim.AdamW(model.parameters(), lr=1e-2))
    outer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.8, nesterov=True)
    alone = Local(inner, None, CPU, every=3)
    steps = Update(torch.optim.AdamW(inner.parameters(), lr=1e-2))
    for _ in range(4):
        train(exchange, model, update, 3)
        train(alone, inner, steps, 3)
        for common, own in zip(reference.parameters(), inner.parameters(), strict=True):
            mean = own.detach().clone()
            dist.all_reduce(mean)
            common.grad = common.detach() - mean / 3
        outer.step()
        with torch.no_grad():
            for common, own, got in zip(reference.parameters(), inner.parameters(), model.parameters(), strict=True):
                own.copy_(common)
                torch.testing.assert_close(got, common)
    for p, own in zip(model.parameters(), inner.parameters(), strict=True):  # the inner state went on by itself
        torch.testing.assert_close(
            update.optimizers[0].state[p]["exp_avg"], steps.optimizers[0].state[own]["exp_avg"], rtol=1e-3, atol=1e-6
        )


@distributed(world=2)
def test_overlap_adds_what_averaging_would_have_changed() -> None:
    """Steps that do not depend on the weights come out the same, only later."""
    model, late = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    late.load_state_dict(model.state_dict())
    for m in (model, late):
        dist.broadcast(m.weight.data, 0)
    gradient = torch.tensor([[1.0, -1.0]]) * (dist.get_rank() + 1)
    for m, overlap in ((model, 0), (late, 1)):
        exchange = Local(m, dist.group.WORLD, CPU, every=4, overlap=overlap)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(9):
            exchange.arm(StepScalars(0.0, 1.0))
            m.weight.grad = gradient.clone()
            exchange.finish()
            optimizer.step()
            exchange.clear()
    torch.testing.assert_close(model.weight, late.weight)


@distributed(world=2)
def test_one_rank_that_stops_stops_all_when_they_meet() -> None:
    model = net()
    exchange = Local(model, dist.group.WORLD, CPU, every=3)
    seen = []
    for step in range(5):
        exchange.arm(StepScalars(0.0, 1.0, stop=float(dist.get_rank() == 1 and step == 1)))
        seen.append(bool(exchange.finish().stop))
        exchange.clear()
    assert seen == [False, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("outer", [None, Outer()])
@distributed(world=2)
def test_cost_is_what_runs(dtype: torch.dtype, outer: Outer | None) -> None:
    allreduce.BUCKET_BYTES = allreduce.FIRST_BUCKET_BYTES = 50
    model = net(dtype)
    calls, plain = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **kwargs: (
        calls.append(tensor.numel() * tensor.element_size()) or plain(tensor, **kwargs)
    )
    exchange = Local(model, dist.group.WORLD, CPU, every=5, outer=outer)
    for _ in range(10):
        exchange.arm(StepScalars(0.0, 1.0))
        exchange.finish()
        exchange.clear()
    cost = exchange.cost()
    assert 2 * sum(cost.moved.values()) == sum(calls)
    assert 2 * sum(cost.calls.values()) == len(calls) > 2
    held = sum(
        b.flat.nbytes + sum(t.nbytes for t in (b.common, b.momentum) if t is not None) for b in exchange._buckets
    )
    assert cost.held["averaging"] == held


def test_what_makes_no_sense_is_refused() -> None:
    for how in ({"every": 0}, {"every": 4, "overlap": 4}, {"every": 4, "overlap": -1}):
        with pytest.raises(PlanError):
            Local(net(), None, CPU, **how)
