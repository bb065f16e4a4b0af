"""Gradients summed over ranks: the right sums, the right calls, and what rides along."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshfit.exchange import allreduce
from meshfit.exchange.allreduce import AllReduce, split_buckets
from meshfit.exchange.protocol import StepScalars
from tests.distributed import distributed

CPU = torch.device("cpu")


class Branches(nn.Module):
    """``one`` and ``two`` are used as asked; ``never`` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, two: bool) -> torch.Tensor:
        x = self.one(x) * self.frozen
        return (self.two(x) if two else x).sum()


def exchange_of(model: nn.Module) -> AllReduce:
    return AllReduce(model.parameters(), dist.group.WORLD, CPU)


@pytest.mark.parametrize(("bucket", "turns"), [(1, False), (100, True), (25 * 2**20, False)])
@distributed(world=3)
def test_sums_like_one_device(bucket: int, turns: bool) -> None:
    """Over one communicator, or two in turn."""
    allreduce.BUCKET_BYTES = allreduce.FIRST_BUCKET_BYTES = bucket
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 1))
    model[0].to(memory_format=torch.channels_last)
    alone = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = torch.randn(3, 2, 4, 4)
    torch.func.functional_call(
        model, dict(zip(dict(model.named_parameters()), alone, strict=True)), (x,)
    ).sum().backward()
    second, used = dist.new_group() if turns else None, []
    exchange = AllReduce(model.parameters(), dist.group.WORLD, CPU, second)  # type: ignore[arg-type]
    plain = dist.all_reduce
    dist.all_reduce = lambda tensor, group, **kwargs: used.append(group) or plain(tensor, group=group, **kwargs)
    for _ in range(2):  # the second time over the same buckets
        exchange.arm(StepScalars(1.0 + dist.get_rank(), 2.0))
        model(x[dist.get_rank()][None]).sum().backward()
        scalars = exchange.finish()
        for want, got in zip(alone, model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
        assert scalars.loss == 6.0
        assert scalars.count == 6.0
        assert not scalars.stop
        exchange.clear()
    assert len(set(used)) == (2 if turns else 1)


@distributed(world=2)
def test_riders_tell_who_broke_and_who_stops() -> None:
    model = nn.Linear(2, 1)
    exchange = exchange_of(model)
    mine = float(dist.get_rank() == 1)
    exchange.arm(StepScalars(float("nan"), 1.0, stop=mine, broken=[mine]))
    model(torch.ones(1, 2)).sum().backward()
    scalars = exchange.finish()
    assert scalars.stop
    assert scalars.broken == [0.0, 1.0]


@distributed(world=2)
def test_scalars_are_as_exact_as_the_parameters() -> None:
    """Also where no bucket of gradients has room for them: complex numbers, integers."""
    model = nn.Linear(2, 1, dtype=torch.complex128)
    exchange = exchange_of(model)
    exchange.arm(StepScalars(0.1, 0.2))
    model(torch.ones(1, 2, dtype=torch.complex128)).abs().sum().backward()
    scalars = exchange.finish()
    assert (float(scalars.loss), float(scalars.count)) == (0.2, 0.4)


@distributed(world=2)
def test_a_parameter_has_a_gradient_if_any_rank_used_it() -> None:
    model = Branches()
    exchange = exchange_of(model)
    for used_by in ({0}, {0, 1}, set(), {1}):
        exchange.arm(StepScalars())
        model(torch.ones(1, 3), dist.get_rank() in used_by).backward()
        exchange.finish()
        assert model.never.weight.grad is None
        assert model.one.weight.grad is not None
        assert (model.two.weight.grad is not None) == bool(used_by)
        if used_by:
            total = model.two.weight.grad.clone()
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
            assert torch.equal(total, model.two.weight.grad)
        exchange.clear()


class Held(nn.Module):
    """Of the others these ranks hold one and none, as of an expert that is another rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.mine, self.theirs = nn.Linear(3, 1), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor, chosen: bool = False) -> torch.Tensor:
        return self.one(x).sum() + (self.mine.sum() if chosen else 0.0)


@distributed(world=2)
def test_nobody_asks_whether_others_reached_what_it_does_not_hold() -> None:
    model = Held()
    exchange, asked, tolist = exchange_of(model), [], torch.Tensor.tolist
    for chosen, asks in (({0, 1}, ()), ({1}, (0,)), (set(), (0, 1))):
        exchange.arm(StepScalars())
        model(torch.ones(1, 3), dist.get_rank() in chosen).backward()
        asked.clear()
        with patch.object(torch.Tensor, "tolist", lambda tensor: (asked.append(tensor.numel()), tolist(tensor))[1]):
            exchange.finish()
        assert len(asked) == (2 if dist.get_rank() in asks else 1)  # for the numbers of the step, too
        assert (model.mine.grad is not None) == bool(chosen)
        assert model.theirs.grad is None
        exchange.clear()


@distributed(world=2)
def test_only_the_armed_backward_is_summed() -> None:
    """Microbatches before the last add up on the rank."""
    model = nn.Linear(2, 1, bias=False)
    exchange = exchange_of(model)
    model(torch.ones(1, 2)).sum().backward()
    exchange.arm(StepScalars())
    model(torch.ones(1, 2) * 2).sum().backward()
    exchange.finish()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 6.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
@distributed(world=2)
def test_cost_is_what_runs(dtype: torch.dtype) -> None:
    """Calls and bytes of the real collectives, counted, against ``cost``."""
    allreduce.BUCKET_BYTES = allreduce.FIRST_BUCKET_BYTES = 1000
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 1)).to(dtype)
    exchange = exchange_of(model)
    calls, plain = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **kwargs: (
        calls.append(tensor.numel() * tensor.element_size()) or plain(tensor, **kwargs)
    )
    exchange.arm(StepScalars())
    model(torch.ones(1, 20, dtype=dtype)).sum().abs().backward()
    exchange.finish()
    cost = exchange.cost()
    assert cost.calls == {"all_reduce": len(calls)}
    assert cost.moved == {"all_reduce": sum(calls)}
    assert len(calls) > 1


@distributed(world=2)
def test_sums_start_while_backward_runs() -> None:
    """The last layer's bucket goes before the first layer's gradient is made."""
    allreduce.BUCKET_BYTES = allreduce.FIRST_BUCKET_BYTES = 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    exchange = exchange_of(model)
    happened, plain = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **kwargs: happened.append("sum") or plain(tensor, **kwargs)
    model[0].weight.register_hook(lambda grad: happened.append("first layer"))
    exchange.arm(StepScalars())
    model(torch.ones(1, 4)).sum().backward()
    exchange.finish()
    assert happened.index("sum") < happened.index("first layer")


@distributed(world=2)
def test_leaves_no_trace() -> None:
    model = nn.Linear(2, 1)
    exchange = exchange_of(model)
    exchange.remove()
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_buckets_hold_every_parameter_once_in_reverse() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 300_000, 5_000_000, 20, 4_000_000)]
    buckets = split_buckets(parameters)
    assert [p for bucket in buckets for p in bucket] == parameters[::-1]
    assert len(buckets) == 2  # 16 MB of first bucket is over its limit at once; the rest fits into one
