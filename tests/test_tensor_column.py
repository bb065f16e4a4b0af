"""Layers cut by output channels: gradients are those of plain layers, and their sum is under way while the weights get
theirs."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from meshfit.axes.tensor.functions import Entrance, is_product
from meshfit.comm import collectives
from meshfit.comm.group import CountingGroup, RankGroup, Wait
from meshfit.passes.backward import input_backward
from meshfit.torch_private.modules import own_parameters
from tests.distributed import distributed


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


def layers() -> list[Any]:
    torch.manual_seed(0)
    return [nn.Linear(6, 4), nn.Linear(6, 3, bias=False), Conv1D(5, 6)]


def through(every: list[nn.Module], x: Tensor, group: Any = None) -> list[Tensor]:
    if group is None:
        return [layer(x) for layer in every]
    entrance = Entrance(x, every, group, alone=True)
    return [entrance.product(layer) for layer in every]


def gradients(outs: list[Tensor], x: Tensor, every: list[nn.Module], **how: Any) -> tuple[Tensor, ...]:
    loss = torch.stack([(out.float() ** 3).sum() for out in outs]).sum()
    return torch.autograd.grad(loss, [x, *(p for layer in every for p in layer.parameters())], **how)


def test_which_layers_are_products() -> None:
    class Other(nn.Linear):
        pass

    linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.forward = lambda x: x  # type: ignore[method-assign]
    found = [is_product(each) for each in (linear, other, Other(2, 2), Conv1D(2, 2), nn.Conv1d(2, 2, 1))]
    assert found == [True, False, False, True, False]


def test_gradients_are_those_of_plain_layers_and_can_be_differentiated_again() -> None:
    every, x = layers(), torch.randn(2, 7, 6, requires_grad=True)
    found = []
    for group in (None, CountingGroup()):
        outs = through(every, x, group)
        first = gradients(outs, x, every, create_graph=True)
        second = gradients([grad for grad in first if grad.requires_grad], x, every)
        found.append((*gradients(through(every, x, group), x, every), *first, *second))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_a_layer_called_twice_and_frozen_weights() -> None:
    every, x = layers(), torch.randn(4, 6, requires_grad=True)
    every[2].weight.requires_grad_(False)
    trained = [p for layer in every for p in layer.parameters() if p.requires_grad]
    found = []
    for group in (None, CountingGroup()):
        outs = through([*every, every[0]], x, group)
        found.append(torch.autograd.grad(torch.stack([out.square().sum() for out in outs]).sum(), [x, *trained]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_under_autocast_as_plain_layers() -> None:
    every, x = layers(), torch.randn(2, 7, 6, requires_grad=True)
    found = []
    for each in (None, CountingGroup()):
        with torch.autocast("cpu", torch.bfloat16):
            outs = through(every, x * 1.0, each)
        assert {out.dtype for out in outs} == {torch.bfloat16}
        found.append(gradients(outs, x, every))
    for one, two in zip(*found, strict=True):
        assert one.dtype == two.dtype == torch.float32
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02 * float(one.abs().max()))


@pytest.mark.parametrize("frozen", [False, True])
def test_halves_are_the_whole(frozen: bool) -> None:
    """Of a backward in two halves, weights come in the second."""
    every, x = layers(), torch.randn(4, 6, requires_grad=True)
    every[1].requires_grad_(not frozen)
    want = torch.autograd.grad(
        [out.sum() for out in through(every, x)], [x, every[0].weight, every[2].weight], allow_unused=True
    )
    outs = through(every, x.requires_grad_(), CountingGroup())
    weights = input_backward([torch.stack([out.sum() for out in outs]).sum()], [None], [x])
    assert every[0].weight.grad is None
    torch.testing.assert_close(x.grad, want[0])
    weights.run()
    torch.testing.assert_close(every[0].weight.grad, want[1])
    torch.testing.assert_close(every[2].weight.grad, want[2])


class Noted(RankGroup):
    def __init__(self, group: Any):
        super().__init__(group)
        self.log: list[str] = []

    def start_all_reduce(self, x: Tensor) -> tuple[Tensor, Wait]:
        self.log.append(f"start {x.dtype}")
        return self._noted(*super().start_all_reduce(x))

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        self.log.append("scatter")
        return self._noted(*super().start_reduce_scatter(x))

    def _noted(self, x: Tensor, wait: Wait) -> tuple[Tensor, Wait]:
        return x, lambda: (self.log.append("wait"), wait())


@distributed(world=2)
def test_the_sum_is_under_way_while_weights_get_their_gradients() -> None:
    group = Noted(dist.group.WORLD)
    for length, half in ((0, False), (0, True), (5, False)):
        every, norm = layers(), nn.LayerNorm(6)
        parameters = {id(p): name for layer in (*every, norm) for name, p in layer.named_parameters()}
        group.log = []
        for layer in (*every, norm):
            for p in layer.parameters():
                p.register_post_accumulate_grad_hook(lambda p, names=parameters: group.log.append(names[id(p)]))
        own = torch.randn(2, 3 - group.rank if length else 5, 6)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            entrance = Entrance(norm(own), every, group, length, alone=True)
            outs = [F.gelu(entrance.product(layer)) for layer in every]
        assert entrance.x.shape[1] == 5
        torch.stack([out.sum() for out in outs]).sum().backward()
        first, *weights = group.log[:6]
        assert first == ("scatter" if length else f"start {torch.bfloat16 if half else torch.float32}")
        assert sorted(weights) == ["bias", "bias", "weight", "weight", "weight"]
        assert group.log[6:] == ["wait", "weight", "bias"] or group.log[6:] == ["wait", "bias", "weight"]


def test_a_sum_in_place_of_what_autograd_saved_is_told() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        collectives.reduce(x.exp(), CountingGroup(), alone=True).sum().backward()
    collectives.reduce(x * 2, CountingGroup(), alone=True).sum().backward()
    with torch.inference_mode():  # which counts no changes
        assert collectives.reduce(torch.ones(3) * 2, CountingGroup(), alone=True).sum() == 6


def test_the_graph_does_not_hold_on_to_weights_that_hooks_pack_away() -> None:
    """As under sharding, where gathered weights are dropped after the forward: the memory of all layers was held."""
    layer = nn.Linear(6, 4, bias=False)
    weight = layer.weight * 1  # what is gathered stands in place of the parameter
    own_parameters(layer)["weight"] = weight
    gathered, x = StorageWeakRef(weight.untyped_storage()), torch.randn(2, 6, requires_grad=True)
    with saved_tensors_hooks(lambda t: t.shape, torch.zeros):
        (out,) = through([layer], x, CountingGroup())
    own_parameters(layer)["weight"] = None
    del weight
    gc.collect()
    assert out.requires_grad
    assert gathered.expired()
