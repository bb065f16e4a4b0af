"""Every private piece of torch that meshfit leans on is there and does what is expected of it."""

import sys

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from meshfit import torch_private
from meshfit.launch.devices import Devices
from meshfit.launch.local import Ranks
from meshfit.launch.world import World

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_fused_optimizers_take_what_they_are_told_on_the_device() -> None:
    """Set after construction; ``found_inf`` skips the step, ``grad_scale`` divides the gradient."""
    for kind in torch_private.FUSED_OPTIMIZERS:
        weight = nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)
        optimizer.param_groups[0]["fused"] = True
        weight.grad = torch.ones(3) * 4
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
        optimizer.step()
        assert torch.equal(weight, torch.ones(3))
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
        optimizer.step()
        plain = nn.Parameter(torch.ones(3))
        plain.grad = torch.ones(3)
        kind([plain], lr=0.1, fused=False, foreach=False).step()
        torch.testing.assert_close(weight.detach(), plain.detach())


def test_gather_is_there() -> None:
    assert callable(torch_private.all_gather_single)


def test_loss_scale_kernel_is_there() -> None:
    assert callable(torch._amp_update_scale_)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return 2 * gradient


_double = _Double.apply


def test_functions_are_watched_however_they_are_called() -> None:
    seen = []

    def watch(function, apply, args, kwargs):
        seen.append(function)
        return apply(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with torch_private.watched_functions(watch), torch_private.watched_functions(watch):
        (_double(x) + _Double.apply(x)).sum().backward()  # type: ignore[operator]
    _double(x)
    assert seen == [_Double] * 4
    assert torch.equal(x.grad, torch.full((2,), 4.0))  # type: ignore[arg-type]


def test_a_node_knows_whether_backward_will_come_to_another() -> None:
    said = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    beside = x.clone()
    product = y * beside
    product.grad_fn.register_hook(lambda *_: said.append(torch_private.will_run(beside.grad_fn)))  # type: ignore[union-attr]
    torch.autograd.grad(product.sum(), y, retain_graph=True)
    product.sum().backward()
    assert said == [False, True]


def _in_a_world_of_two(world: World, _: object) -> list[object]:
    """Four ranks, two by two: what they sum within their own two, within a group made there, and with the others."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    own, other = pairs[world.rank // 2], across[world.rank % 2]
    torch_private.become_world(own, other)  # type: ignore[arg-type]
    within, both = dist.new_group([1, 0]), dist.get_process_group_ranks(dist.group.WORLD)  # type: ignore[arg-type]
    sums = [torch.tensor(10.0**world.rank) for _ in range(3)]
    for each, group in zip(sums, (None, within, other), strict=True):
        dist.all_reduce(each, group=group)
    said = [None, None]
    dist.all_gather_object(said, world.rank)
    return [dist.get_rank(), dist.get_world_size(), both, [float(each) for each in sums], said, dist.get_rank(other)]


def test_a_group_can_be_the_world() -> None:
    with Ranks(_in_a_world_of_two, size=4, devices=Devices("cpu", None)) as ranks:
        found = ranks.results
    assert found[0] == [0, 2, [0, 1], [11.0, 11.0, 101.0], [0, 1], 0]
    assert found[3] == [1, 2, [0, 1], [1100.0, 1100.0, 1010.0], [2, 3], 1]
