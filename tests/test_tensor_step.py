"""Steps of a model that is cut: in half precision, with dropout, with blocks computed again."""

import copy
import warnings
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor as Array
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshfit.axes.cut_parameters import CutParameters
from meshfit.axes.spec import whole_output
from meshfit.axes.tensor.cut import split_model
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.sliced import SlicedTensor
from tests import odd_blocks
from tests.distributed import distributed

cloudpickle.register_pickle_by_value(odd_blocks)

WIDTH, CLASSES = odd_blocks.WIDTH, 48


class Block(nn.Module):
    """Attention and MLP on a residual stream, with dropout in the one and after the other."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.attend = nn.LayerNorm(WIDTH), odd_blocks.Interleaved()
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.inner, self.outer = nn.Dropout(drop), nn.Dropout(drop)
        self.attend.drop.p = drop

    def forward(self, x: Array) -> Array:
        x = x + self.attend(self.first(x))
        return x + self.outer(self.down(self.inner(F.gelu(self.up(self.second(x))))))


class Model(nn.Module):
    def __init__(self, drop: float, tie: bool = True) -> None:
        super().__init__()
        self.again = False
        self.token, self.drop = nn.Embedding(CLASSES, WIDTH, padding_idx=40), nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        nn.init.normal_(self.token.weight, std=0.3)
        if tie:
            self.head.weight = self.token.weight

    def forward(self, ids: Array) -> Array:
        x = self.drop(self.token(ids))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def text() -> Array:
    return torch.randint(0, CLASSES, (4, 12), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, ids: Array) -> Array:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def built(drop: float = 0.0, tie: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Model(drop, tie)


def spread(model: nn.Module) -> CutParameters:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_tensor(model, lambda m: loss_of(m, text()), 2)
    assert {region.kind for region in plan.regions} >= {"attention", "mlp"}
    return split_model(model, plan, dist.group.WORLD)


def gradients(model: nn.Module, parts: CutParameters | None = None, **auto: Any) -> tuple[float, dict[str, Array]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(auto)):
        loss = loss_of(model, text())
    loss.backward()
    if parts is None:
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}
    parts.after_backward()
    return loss.item(), {name: parts.whole(p, p.grad).clone() for name, p in model.named_parameters()}


def error(got: dict[str, Array], want: dict[str, Array]) -> float:
    return max(float((got[name] - want[name]).norm() / want[name].norm()) for name in want)


@distributed(world=2)
def test_half_precision_rounds_as_on_one_device() -> None:
    for tie in (True, False):
        alone = built(tie=tie)
        model = copy.deepcopy(alone)
        parts = spread(model)
        exact, want = gradients(alone)
        near, rounded = gradients(alone, autocast=True)
        loss, found = gradients(model, parts, autocast=True)
        assert abs(loss - near) < 5e-3
        assert error(found, want) < 1.5 * error(rounded, want) + 1e-3
        loss, found = gradients(model, parts)
        assert abs(loss - exact) < 1e-5
        assert error(found, want) < 1e-4
        assert not want["token.weight"][40].any() or tie


@distributed(world=2)
def test_blocks_that_are_computed_again_drop_the_same() -> None:
    model: Any = built(drop=0.3)
    parts = spread(model)
    found = []
    for again in (False, True):
        model.again = again
        torch.manual_seed(11)
        found.append(gradients(model, parts))
        found.append(gradients(model, parts))
    (first, one), (second, two), (first_again, three), (second_again, four) = found
    assert first != second
    assert (first, second) == (first_again, second_again)
    assert error(three, one) < 1e-6
    assert error(four, two) < 1e-6


@distributed(world=2)
def test_masks_agree_on_what_is_whole_and_differ_on_shares() -> None:
    model: Any = built(drop=0.3)
    parts = spread(model)
    masks: dict[str, Array] = {}

    def note(name: str, out: Array) -> None:
        masks[name] = (out == 0).int()

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, a, out, name=name: note(name, out))
    torch.manual_seed(5)
    gradients(model, parts)
    same = {name: torch.equal(*parts.ranks.all_gather(mask)) for name, mask in masks.items()}
    assert same["drop"]
    assert all(same[f"blocks.{i}.outer"] and not same[f"blocks.{i}.inner"] for i in (0, 1))


@distributed(world=2)
def test_predictions_are_made_whole_and_undo_gives_all_back() -> None:
    for tie in (True, False):
        alone = built(tie=tie)
        model: Any = copy.deepcopy(alone)
        parts = spread(model)
        assert parts.is_cut(model.token.weight)
        assert len(model.token.weight) == len(model.head.weight) == CLASSES // 2
        assert (model.head.weight is model.token.weight) == tie
        with torch.no_grad():
            out = model.eval()(text())
            assert isinstance(out, SlicedTensor)
            plain = whole_output({"logits": [out], "other": 1})["logits"][0]
            assert type(plain) is Array
            torch.testing.assert_close(plain, alone.eval()(text()))
            assert torch.equal(out.argmax(-1), alone(text()).argmax(-1))
        parts.undo()
        assert model.token.padding_idx == 40
        assert (model.head.weight is model.token.weight) == tie
        assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), model.parameters(), strict=True))
        assert vars(model.token).keys() == vars(alone.token).keys()
        torch.testing.assert_close(model(text()), alone(text()))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n) for n in (WIDTH, 8, 8, WIDTH))
        self.groups, self.norm = 4, nn.LayerNorm(WIDTH)

    def forward(self, x: Array) -> Array:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(out.transpose(1, 2).flatten(2))


@distributed(world=4)
def test_shares_held_by_several_ranks_count_once_in_the_norm() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(Grouped(), Grouped()).double()
    model, x = copy.deepcopy(alone), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_tensor(model, lambda m: m(x).square().mean(), 4)
    assert [region.kind for region in plan.regions] == ["attention"] * 2, plan.explain()
    parts = split_model(model, plan, dist.group.WORLD)
    assert sum(cut.copies == 2 for cut in parts.cuts.values()) == 8
    for each in (alone, model):
        each(x).square().mean().backward()
    parts.after_backward()
    own = sum(parts.weight(p) * p.grad.square().sum() for p in model.parameters())
    want = torch.stack([p.grad.norm() for p in alone.parameters()]).norm()
    torch.testing.assert_close(parts.ranks.all_reduce(own).sqrt(), want)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parts.whole(p, p.grad), q.grad, rtol=1e-9, atol=1e-12)
        assert torch.equal(parts.part(p, parts.whole(p, p.data)), p.data)
    parts.undo()
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), model.parameters(), strict=True))
