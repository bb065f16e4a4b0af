"""Forwards that break naive recorders, each with what is expected of it.

    exact     replay gives the same outputs, gradients and buffers
    guarded   exact on inputs that take the recorded branch, refused at replay on others
    close     the same up to rounding (compiled code rounds otherwise than what it was written as)
    refused   an error that names module, file and line

Every model here takes a tensor of (samples, 3) and has six blocks between two linear layers.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """The frame of all others, which change ``between`` or ``forward``."""

    block: Callable[[], nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(6))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = self.between(i, block, x)
        return self.last(x)

    def between(self, i: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


# Autograd's own state


class PartWithoutGradient(Plain):
    def between(self, i, block, x):
        with torch.no_grad():
            scale = x.square().mean(-1, keepdim=True)
        return block(x) * (1 + 0.1 * scale)


class PartInLowPrecision(Plain):
    def between(self, i, block, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ self.last.weight.t()
        return block(x) + y.float().mean(-1, keepdim=True)


class Odd(torch.autograd.Function):
    """A backward that is not the derivative of its forward: whoever replays the operators inside is found out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * 0.1

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.saved_tensors[0] * 0.7


class OwnGradient(Plain):
    def between(self, i, block, x):
        return block(x) + Odd.apply(x)


class _OddBlock(Block):
    def forward(self, x):
        return super().forward(x) + Odd.apply(x)


class OwnGradientInBlock(Plain):
    block = _OddBlock


class Checkpointed(Plain):
    def between(self, i, block, x):
        return checkpoint(block, F.dropout(x, 0.2), use_reentrant=False)


class CheckpointedReentrant(Plain):
    def between(self, i, block, x):
        return checkpoint(block, x, use_reentrant=True)


class CheckpointedLambda(Plain):
    """Glue inside the checkpoint, random numbers too."""

    def between(self, i, block, x):
        return checkpoint(lambda y: block(F.dropout(y, 0.2)) * 0.5, x, use_reentrant=False)


class GradientInForward(Plain):
    def forward(self, x):
        x = self.first(x)
        energy = self.blocks[0](x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(x - 0.1 * slope)


# Values in Python


class LooksAtInput(Plain):
    def forward(self, x):
        depth = 3 + int((x.sum() > 0).item())
        x = self.first(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.last(x)


class LooksAtActivation(Plain):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if x.abs().mean().item() > 100:
                break
            x = block(x)
        return self.last(x)


class _LookingBlock(Block):
    def forward(self, x):
        y = super().forward(x)
        return y if y.mean() > 0 else -y


class LooksAtActivationInBlock(Plain):
    block = _LookingBlock


class LooksAtConstant(Plain):
    def forward(self, x):
        widths = torch.linspace(0.1, 1.0, 6)
        x = self.first(x)
        for width, block in zip(widths.tolist(), self.blocks, strict=True):
            x = block(x) * width if torch.tensor([1, 2, 3]).sum() == 6 else x
        return self.last(x)


class LooksAtBuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("depth", torch.tensor(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks[: int(self.depth)]:
            x = block(x)
        return self.last(x)


class SearchesInput(Plain):
    def forward(self, x):
        has = 0.0 in x
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(-x if has else x)


class DrawsInPython(Plain):
    def between(self, i, block, x):
        return block(x) if random.random() > 0.3 else x


class DrawsInTorch(Plain):
    def between(self, i, block, x):
        return block(x) if torch.rand(()) > 0.3 else x


class DrawsForNothing(Plain):
    """Layers are dropped with probability 0, as many libraries do: the number is drawn all the same."""

    def between(self, i, block, x):
        return x if torch.rand(()) < 0.0 else block(x)


class DrawsInNumpy(Plain):
    def forward(self, x):
        noise = torch.from_numpy(np.random.rand(WIDTH).astype("float32")).to(x.device)
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * noise
        return self.last(x)


class DrawsFromOwnNumpy(Plain):
    def forward(self, x):
        noise = torch.from_numpy(np.random.default_rng().random(WIDTH).astype("float32"))
        return self.last(self.first(x) * noise)


class SelectsSamples(Plain):
    def between(self, i, block, x):
        (index,) = (x[:, 0] > 0).nonzero(as_tuple=True)
        return block(x).index_add(0, index, x[index])


class CountsSelected(Plain):
    """The number of the samples selected becomes a number in Python."""

    def between(self, i, block, x):
        chosen = x[x[:, 0] > 0]
        return block(x) / (1 + chosen.shape[0])


class Random(Plain):
    def between(self, i, block, x):
        return block(F.dropout(x, 0.3, self.training)) + torch.rand_like(x) * 0.1


# State outside the flow of tensors


class _RememberingBlock(Block):
    def forward(self, x):
        self.hidden = F.relu(self.up(x))
        return super().forward(x)


class ReadsAttributeOfBlock(Plain):
    block = _RememberingBlock

    def between(self, i, block, x):
        y = block(x)
        return y + block.hidden


class _ScaledBlock(Block):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class SetsAttributeOfBlock(Plain):
    block = _ScaledBlock

    def between(self, i, block, x):
        block.scale = 1.0 + 0.1 * i
        return block(x)


class SetsTensorOfBlock(Plain):
    block = _ScaledBlock

    def between(self, i, block, x):
        block.scale = x.mean()
        return block(x)


class _AppendingBlock(Block):
    def forward(self, x, features):
        y = super().forward(x)
        features.append(y)
        return y


class BlocksAppend(Plain):
    block = _AppendingBlock

    def forward(self, x):
        x, features = self.first(x), []
        for block in self.blocks:
            x = block(x, features)
        return self.last(sum(features))


@dataclass
class State:
    hidden: Tensor
    extra: dict


class _StateBlock(Block):
    def forward(self, state):
        return State(super().forward(state.hidden), {**state.extra, "mean": state.hidden.mean()})


class PassesDataclass(Plain):
    block = _StateBlock

    def forward(self, x):
        state = State(self.first(x), {})
        for block in self.blocks:
            state = block(state)
        return self.last(state.hidden) + state.extra["mean"]


class _ChangingBlock(Block):
    def forward(self, state):
        state.hidden = super().forward(state.hidden)


class BlocksChangeObject(Plain):
    """Blocks and glue in turn write to one object."""

    block = _ChangingBlock

    def forward(self, x):
        state = State(self.first(x), {})
        for block in self.blocks:
            block(state)
            state.hidden = state.hidden * 0.9
        return self.last(state.hidden)


class WritesBuffers(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.count += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return self.last(x + self.average / self.count)


class AssignsBuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.last(x + self.average)


class CountsCalls(Plain):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class HoldsTensor(Plain):
    """A tensor that is neither parameter nor buffer, and changes between forwards."""

    def __init__(self):
        super().__init__()
        self.scale = torch.full((WIDTH,), 0.5)

    def forward(self, x):
        return self.last(self.blocks[0](self.first(x)) * self.scale)


class Hooked(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: output * 1.5)
            block.up.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.register_forward_hook(lambda module, args, output: output - 1)


class OwnCall(Plain):
    def __call__(self, x):
        return super().__call__(x * 2) + 1


class _CallingBlock(Block):
    def __call__(self, x):
        return super().__call__(x * 2) + 1


class BlocksOwnCall(Plain):
    block = _CallingBlock


class WritesInPlace(Plain):
    def between(self, i, block, x):
        y = block(x.clone())
        x = x.clone()
        x += y
        x[:, 0] = 0.5
        x[:, 1].mul_(2)
        return F.relu_(x)


# Other degree to compute


class Parametrized(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            weight_norm(block.up)
            spectral_norm(block.down)


class Einsum(Plain):
    def between(self, i, block, x):
        turned = x.unflatten(-1, (4, 4)).transpose(1, 2).flatten(1)
        return block(turned) + torch.einsum("nd,nd->n", x, x)[:, None] * 0.01


class Mapped(Plain):
    def between(self, i, block, x):
        return block(x) + torch.vmap(lambda row: row * row.sum() * 0.01)(x)


class Recurrent(Plain):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def between(self, i, block, x):
        if i < 3:
            y, (_, cell) = self.recurrent[i](x[:, None].expand(-1, 5, -1))
            x = y[:, -1] + cell[0]
        return block(x)


class Shared(Plain):
    def between(self, i, block, x):
        return self.blocks[i % 2](x) + F.linear(x, self.blocks[5].up.weight)


with warnings.catch_warnings(action="ignore"):  # torch.jit is on its way out, not out of use
    gated = torch.jit.trace(lambda x: x * torch.sigmoid(x), torch.zeros(2), check_trace=False)


class Scripted(Plain):
    def between(self, i, block, x):
        return block(x) + gated(x)


class Operators(Plain):
    def between(self, i, block, x):
        return block(x) + torch.ops.aten.silu(x) + torch.ops.aten.relu.default(x)


class Compiled(Plain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)  # type: ignore


class ChoosesByDevice(Plain):
    def between(self, i, block, x):
        return block(x) if x.device.type == "cpu" and not x.is_cuda and not x.is_meta else x


class MakesConstants(Plain):
    def between(self, i, block, x):
        mask = torch.ones(len(x), WIDTH)
        mask[:, i:] = 0.5
        return block(x) * mask + torch.arange(WIDTH, device=x.device) * torch.Tensor([0.1])


EXPECTED: dict[type[nn.Module], str] = {
    Plain: "exact",
    PartWithoutGradient: "exact",
    PartInLowPrecision: "exact",
    OwnGradient: "exact",
    OwnGradientInBlock: "exact",
    Checkpointed: "exact",
    CheckpointedReentrant: "exact",
    CheckpointedLambda: "exact",
    GradientInForward: "exact",
    LooksAtInput: "guarded",
    LooksAtActivation: "refused",
    LooksAtActivationInBlock: "exact",
    LooksAtConstant: "exact",
    LooksAtBuffer: "guarded",
    SearchesInput: "guarded",
    DrawsInPython: "refused",
    DrawsInTorch: "refused",
    DrawsForNothing: "exact",
    DrawsInNumpy: "refused",
    DrawsFromOwnNumpy: "refused",
    SelectsSamples: "exact",
    CountsSelected: "guarded",
    Random: "exact",
    ReadsAttributeOfBlock: "exact",
    SetsAttributeOfBlock: "exact",
    SetsTensorOfBlock: "exact",
    BlocksAppend: "exact",
    PassesDataclass: "exact",
    BlocksChangeObject: "exact",
    WritesBuffers: "exact",
    AssignsBuffer: "exact",
    CountsCalls: "refused",
    HoldsTensor: "exact",
    Hooked: "exact",
    OwnCall: "exact",
    BlocksOwnCall: "exact",
    WritesInPlace: "exact",
    Parametrized: "exact",
    Einsum: "exact",
    Mapped: "refused",
    Recurrent: "exact",
    Shared: "exact",
    Scripted: "close",
    Operators: "exact",
    Compiled: "exact",
    ChoosesByDevice: "exact",
    MakesConstants: "exact",
}
