"""Small models and steps that sharding is easily wrong about, each exact on one device.

Every model takes (samples, 8) and gives (samples, 4). ``MODELS`` are trained with a mean squared error, ``STEPS`` are
steps on a plain one.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Plain(nn.Module):
    """The frame of most others, which change its blocks or what happens between them."""

    block: Callable[[], nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.last = nn.Linear(WIDTH, 4)

    def between(self, i, block, x):
        return block(x)

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = self.between(i, block, x)
        return self.last(x)


# Parameters used more than once


class Tied(nn.Module):
    """One weight under three names: an embedding and two heads."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head, self.other = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.head.weight = self.other.weight = self.token.weight

    def forward(self, x):
        x = self.token((x.abs() * 5).long().clamp(max=23)).mean(1)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) + self.other(torch.tanh(x)))[:, :4]


class SharedBlock(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[2] = self.blocks[0]


class CalledTwice(Plain):
    def between(self, i, block, x):
        return block(block(x) * 0.5)


class _ReadsOwnPart(Block):
    def forward(self, x):
        return super().forward(x) + F.linear(x, self.up.weight).mean(-1, keepdim=True)


class UsedTwice(Plain):
    block = _ReadsOwnPart


class TwoParents(nn.Module):
    def __init__(self):
        super().__init__()
        shared = Block()
        self.a, self.b = (nn.Sequential(shared, nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.blocks, self.last = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.last(self.b(self.blocks(torch.tanh(self.a(x)))))


class ReadsSibling(Plain):
    def between(self, i, block, x):
        return block(x) * self.blocks[(i + 1) % 3].norm.weight + self.last.bias.sum()


class _Peeking(Block):
    other: tuple[nn.Module, ...] = ()  # not a submodule

    def forward(self, x):
        return super().forward(x) * self.other[0].norm.weight


class PeeksAtSibling(Plain):
    block = _Peeking

    def __init__(self):
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.other = (self.blocks[(i + 1) % 3],)


class _Slicing(Block):
    def forward(self, x, table):
        return super().forward(x + table[:8, :].mean(0))


class HandsWeight(Plain):
    """A weight is read outside the blocks, handed to them, and cut there by an operation of their own (DeBERTa)."""

    block = _Slicing

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)

    def forward(self, x):
        x, table = self.first(x), self.table.weight
        for block in self.blocks:
            x = block(x, table)
        return self.last(x)


# Parameters of many makes


class FrozenBlocks(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[:2].requires_grad_(False)


class OnlyHead(Plain):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.last.requires_grad_(True)


class _Adapted(Block):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


class Adapters(Plain):
    block = _Adapted


class Huge(Plain):
    """Nine tenths of all parameters in one layer."""

    def __init__(self):
        super().__init__()
        self.huge, self.back = nn.Linear(WIDTH, 1500, bias=False), nn.Linear(1500, 4)
        self.back.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + 0.1 * self.back(torch.tanh(self.huge(x)))


class Odd(nn.Module):
    """Scalars, shapes with fewer elements than ranks, and one with none."""

    def __init__(self):
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.three, self.deep = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1, 5, 1))
        self.empty = nn.Parameter(torch.zeros(0))
        self.first, self.last = nn.Linear(8, 3), nn.Linear(3, 4)

    def forward(self, x):
        x = self.first(x) * self.scale + self.three * self.one + self.deep.sum() + self.empty.sum()
        return self.last(torch.tanh(x))


class TwoScalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return x[:, :4] * self.a + self.b


class _Mixed(Block):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH).double(), nn.Parameter(torch.ones(WIDTH).bfloat16())
        self.narrow.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) * self.narrow.float() + self.wide(x.double()).float() * 0.5


class Dtypes(Plain):
    """fp32, fp64 and bf16 in one block. (bf16 is frozen: its gradient would be rounded once more on each rank.)"""

    block = _Mixed


class NotFloating(Plain):
    """Integers stay whole on every rank; complex numbers are cut."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.tensor([1, 0, 3, 2, 4, 5, 7, 6]), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(x[:, self.order]) * self.turn.abs() + (self.turn * (1 + 2j)).real


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 1), nn.Linear(32, 4)
        self.convs = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.first(x.view(-1, 1, 2, 4).to(memory_format=torch.channels_last))
        return self.last(torch.tanh(self.convs(x)).flatten(1))


class NonContiguous(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
            block.down.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH)[:, ::2] * 0.2)


class _ActingTwice(Block):
    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x):
        return x + self.act(self.down(self.act(self.up(self.norm(x)))))


class ActsTwice(Plain):
    """A block calls one of its modules twice: that is no second call of the block."""

    block = _ActingTwice


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(4))
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(8)), "b": nn.Parameter(torch.randn(8, 4))})

    def forward(self, x):
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return (x + self.dict["a"]) @ self.dict["b"]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.cell, self.last = nn.GRU(12, 5, batch_first=True), nn.GRUCell(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        x = self.gru(self.lstm(x.view(-1, 4, 2))[0])[0][:, -1]
        return self.last(self.cell(x, x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.cross = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = x[:, None] * torch.linspace(0, 1, 3)[:, None]
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        x = x + self.cross(x, x[..., :4], x[..., 4:])[0]
        return self.last(self.encoder(x).mean(1))


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Layers whose weight is made from other parameters: in a hook before forward, or as a property."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(*(m for _ in range(3) for m in (norm(nn.Linear(8, 8)), nn.Tanh())), nn.Linear(8, 4))


def _scale_input(module: nn.Module, args: tuple) -> tuple:
    return (args[0] * module.norm.weight,)


def _shift_output(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    return out + module.down.bias


class Hooked(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(_scale_input)
            block.register_forward_hook(_shift_output)


# What blocks take and return, and what becomes of it


class _Viewing(Block):
    def forward(self, x):
        return super().forward(x)[:, :]


class InPlace(Plain):
    """Views come out of a block and are changed in place."""

    block = _Viewing

    def between(self, i, block, x):
        y = block(x)
        y += 0.5
        y[:, :2] *= 2.0
        part = y[:, 2:4]
        part += x[:, 2:4]
        return y


@dataclasses.dataclass
class Result:
    x: Tensor
    more: list[Tensor | None]


class _Returning(Block):
    def forward(self, x, *, i):
        y = super().forward(x)
        return Result(y, [self.up.weight[:4], None]), {"bias": self.down.bias}


class ReturnsWeights(Plain):
    """A dataclass and a dict come out of a block, with views of its weights in them."""

    block = _Returning

    def between(self, i, block, x):
        result, more = block(x, i=i)
        weight = result.more[0]
        return result.x + (result.x @ weight.t() @ weight) * 0.1 + more["bias"]


class _WithMethod(Block):
    def run(self, x):
        return self.forward(x) * self.norm.weight


class CallsMethods(Plain):
    block = _WithMethod

    def between(self, i, block, x):
        return block.run(x) if i else block.forward(x)


class Unused(Plain):
    """A head without gradient, one that is not called, and memory of the first."""

    def __init__(self):
        super().__init__()
        self.aux, self.never = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40)

    def forward(self, x):
        self.seen = self.aux(x)
        return super().forward(x)


class PartWithoutGradient(Plain):
    def forward(self, x):
        with torch.inference_mode():
            seen = self.blocks[0](self.first(x))
        with torch.no_grad():
            again = self.blocks[1](self.first(x))
        return super().forward(x) + (seen.clone() + again).mean(-1, keepdim=True)


# Checkpoints of the model's own


class Checkpointed(Plain):
    def between(self, i, block, x):
        return checkpoint(block, x, use_reentrant=False)


class CheckpointedOver(Plain):
    def forward(self, x):
        x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), self.first(x), use_reentrant=False)
        return self.last(self.blocks[2](x))


class Reentrant(Plain):
    def between(self, i, block, x):
        return checkpoint(lambda y: block(block(y)), x, use_reentrant=True)


class _CheckpointsItself(Block):
    def forward(self, x):
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), self.norm(x), use_reentrant=True)


class ReentrantInside(Plain):
    block = _CheckpointsItself


# What runs is decided on the way


class SkipsLayers(Plain):
    """A layer runs where any of the samples at hand wants it."""

    def between(self, i, block, x):
        wanted = x[:, :1] > 0.3 * i
        return torch.where(wanted, block(x), x) if wanted.any() else x


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        top, y = share.argmax(-1), x
        for i, expert in enumerate(self.experts):
            at = (top == i).nonzero()[:, 0]
            if len(at):
                y = y.index_add(0, at, expert(x[at]) * share[at, i : i + 1])
        return y


class MixtureOfExperts(Plain):
    block = _Experts


class Mapped(Plain):
    def forward(self, x):
        return super().forward(x) + torch.vmap(lambda row: self.last(self.first(row)))(x)


FAMILIES: dict[str, dict[str, Callable[[], nn.Module]]] = {
    family: {made.__name__: made for made in many}
    for family, many in {
        "shared": (
            Tied,
            SharedBlock,
            CalledTwice,
            ActsTwice,
            UsedTwice,
            TwoParents,
            ReadsSibling,
            PeeksAtSibling,
            HandsWeight,
        ),
        "frozen": (FrozenBlocks, OnlyHead, Adapters, Unused, PartWithoutGradient),
        "tensors": (Huge, Odd, TwoScalars, Dtypes, NotFloating, ChannelsLast, NonContiguous, Lists),
        "modules": (Recurrent, Attention, Hooked, Mapped, InPlace, ReturnsWeights, CallsMethods),
        "checkpoints": (Checkpointed, CheckpointedOver, Reentrant, ReentrantInside),
        "decisions": (SkipsLayers, MixtureOfExperts),
    }.items()
}
FAMILIES["normed"] = {
    "weight_norm": lambda: normed(nn.utils.weight_norm),
    "spectral_norm": lambda: normed(nn.utils.spectral_norm),
    "parametrized weight_norm": lambda: normed(parametrizations.weight_norm),
    "parametrized spectral_norm": lambda: normed(parametrizations.spectral_norm),
}
MODELS = {name: made for many in FAMILIES.values() for name, made in many.items()}


# Steps


def parts(model: Any, batch: Any) -> Tensor:
    """Not through the model's own forward."""
    x = model.first(batch[0])
    for block in model.blocks:
        x = block(x)
    return F.mse_loss(model.last(x), batch[1])


def looks(model: Any, batch: Any) -> Tensor:
    """What runs depends on the samples, and is not decided in the model: that cannot be traced."""
    x = model.first(batch[0])
    for i, block in enumerate(model.blocks):
        wanted = x[:, :1] > 0.3 * i
        if wanted.any():
            x = torch.where(wanted, block(x), x)
    return F.mse_loss(model.last(x), batch[1])


def twice(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) + F.mse_loss(model(2 * batch[0]), batch[1])


def decay(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) + 0.01 * sum(p.square().sum() for p in model.parameters())


def penalty(model: Any, batch: Any) -> Tensor:
    """Of the gradient by the inputs, itself differentiated."""
    x = batch[0].clone().requires_grad_()
    with torch.enable_grad():
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.mse_loss(y, batch[1]) + slope.square().sum(1).mean()


STEPS = {step.__name__: step for step in (parts, looks, twice, decay, penalty)}
