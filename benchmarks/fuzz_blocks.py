"""Blocks for fuzz.py to compose models of: ordinary ones, and those that a library is easily wrong about.

Each is a class without arguments; called, it takes and gives (samples, LENGTH, WIDTH). Blocks of tests/odd_blocks.py
are drawn beside them.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests import odd_blocks

LENGTH, WIDTH, HEADS = 8, odd_blocks.WIDTH, odd_blocks.HEADS
SIZE = WIDTH // HEADS


def _with_bias(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    return out + module.bias


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TiedWithin(nn.Module):
    """One matrix up and, transposed, down."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.up(x)), self.up.weight.t())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Scalars(nn.Module):
    """Parameters of no dim, of one element, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2))
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.randn(LENGTH, 1))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x * self.dict["a"] + self.dict["b"]


class Frozen(nn.Module):
    """A frozen layer under one that trains, and a buffer that is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.free = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.register_buffer("mix", torch.randn(LENGTH, LENGTH) / 3, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix @ self.free(torch.tanh(self.frozen(x)))


class HalfFrozen(nn.Module):
    """Of one layer the weight trains and the bias does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        arms = {name: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for name in ("a", "b")}
        self.arms = nn.ModuleDict({"inside": nn.ModuleDict(arms)})

    def forward(self, x: Tensor) -> Tensor:
        arms = self.arms["inside"]
        assert isinstance(arms, nn.ModuleDict)
        return torch.stack([arm(x) for arm in arms.values()]).sum(0)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.LazyLinear(24), nn.LazyLinear(WIDTH)
        self(torch.zeros(1, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


# Norms


class Norm(nn.Module):
    """A norm of (samples, channels, length)."""

    make: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(WIDTH, WIDTH), type(self).make()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.into(x).transpose(1, 2)).transpose(1, 2))


def normed(name: str, make: Callable[[], nn.Module]) -> type[Norm]:
    return type(name, (Norm,), {"make": staticmethod(make), "__module__": __name__, "__qualname__": name})


BatchNorm = normed("BatchNorm", lambda: nn.BatchNorm1d(WIDTH))
BatchNormSlow = normed("BatchNormSlow", lambda: nn.BatchNorm1d(WIDTH, momentum=None, affine=False))
BatchNormUntracked = normed("BatchNormUntracked", lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False))
Groups = normed("Groups", lambda: nn.GroupNorm(4, WIDTH))
Instances = normed("Instances", lambda: nn.InstanceNorm1d(WIDTH, affine=True))
Local = normed("Local", lambda: nn.LocalResponseNorm(3))
LayerNorm = normed("LayerNorm", lambda: nn.LayerNorm((WIDTH, LENGTH), bias=False))
RMSNorm = normed("RMSNorm", lambda: nn.RMSNorm(LENGTH, eps=1e-6))


class BatchNormTwice(nn.Module):
    """One BatchNorm, called twice in a forward; and one in eval mode for good."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fixed = nn.BatchNorm1d(LENGTH), nn.BatchNorm1d(LENGTH)

    def train(self, mode: bool = True) -> "BatchNormTwice":
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.fixed(self.norm(x))))


# Attention


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Causal(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / SIZE**0.5).masked_fill(~self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Padded(nn.Module):
    """Each sample hides positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[..., 0] > 1.0
        return self.attention(x, x, x, key_padding_mask=hidden)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Decoder(nn.Module):
    """Looks at the block's own input, and at a learned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
        self.memory = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.memory.expand(len(x), -1, -1))


# Convolutions and recurrence


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(WIDTH, 24, 3, padding=1), nn.ConvTranspose1d(24, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x.transpose(1, 2)))).transpose(1, 2)


class Image(nn.Module):
    """The same numbers as an image, halved and doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(WIDTH // 2, 12, 3, stride=2, padding=1)
        self.norm, self.up = nn.BatchNorm2d(12), nn.ConvTranspose2d(12, WIDTH // 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.norm(self.down(x.reshape(-1, WIDTH // 2, 4, 4))))).reshape(x.shape)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Cell(nn.Module):
    """A recurrence written out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.start = nn.GRUCell(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, outs = self.start.expand(len(x), -1), []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outs.append(state)
        return torch.stack(outs, 1)


class Buckets(nn.Module):
    """Activations choose rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(5, WIDTH, padding_idx=0), nn.EmbeddingBag(5, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        at = (x[..., :3].detach() > 0).sum(-1)
        return self.table(at) + self.bag(at)[:, None]


class Position(nn.Module):
    wave: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.register_buffer("wave", torch.arange(LENGTH)[:, None] * torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.wave.cos() + self.table[: x.shape[1]]


# Mixtures


class Experts(nn.Module):
    """The best two of four, as modules; an expert that no token chooses is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if len(token):
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


class OneExpert(nn.Module):
    """The best one, all of them computed, weights in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        mask = F.one_hot(share.argmax(-1), 3).to(x.dtype) * share
        return torch.einsum("btd,edf,bte->btf", x, self.weight, mask)


class Towers(nn.Module):
    """Three that do not need each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = MLP(), Convolution(), Attention()
        self.join = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([self.left(x), self.middle(x), self.right(x)], -1))


# State


class Parity(nn.Module):
    """Another branch in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.even, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return torch.tanh(self.odd(x) if self.calls % 2 else self.even(x))


class OnlyInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.training_only = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return torch.tanh(y + self.training_only(x) if self.training else y)


class Average(nn.Module):
    """A moving average of activations, of which the forward uses the one before; a counter."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x - self.mean)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
                self.count += 1
        return torch.tanh(y)


class Largest(nn.Module):
    """Another tensor in a buffer's place: the largest activation so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x / self.top
        if self.training:
            self.top = torch.maximum(self.top, x.detach().abs().max())
        return y


class Teacher(nn.Module):
    """Frozen parameters that a forward moves after those that train."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x) - 0.1 * self.teacher(x)
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return torch.tanh(y)


# Autograd


class _Odd(torch.autograd.Function):
    """A backward that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight * 0.7, (gradients[0] * x).sum((0, 1)) * 0.5


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Odd.apply(torch.tanh(x), self.weight)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.complex128) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.turn, n=x.shape[1], dim=1)


class Mixed(nn.Module):
    """A layer in single precision between others in double."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(x)) + 0.5 * self.narrow(x.float()).to(x.dtype)


def of_linear(name: str, change: Callable[[nn.Module], nn.Module]) -> type[nn.Module]:
    """Two layers whose weights are made from other parameters."""

    def init(self: nn.Module) -> None:
        nn.Module.__init__(self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.a, self.b = change(nn.Linear(WIDTH, WIDTH)), change(nn.Linear(WIDTH, WIDTH))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    made = {"__init__": init, "forward": forward, "__module__": __name__, "__qualname__": name}
    return type(name, (nn.Module,), made)


WeightNorm = of_linear("WeightNorm", parametrizations.weight_norm)
SpectralNorm = of_linear("SpectralNorm", parametrizations.spectral_norm)
Orthogonal = of_linear("Orthogonal", parametrizations.orthogonal)
OldWeightNorm = of_linear("OldWeightNorm", nn.utils.weight_norm)


class Functional(nn.Module):
    """Called with weights that are computed from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.delta = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional_call(self.inner, {"weight": self.inner.weight + self.delta}, (x,)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.a(self.a(y)), x, use_reentrant=True) if self.training else self.a(self.a(x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        y[:, :2] *= 0.5
        part = y[:, 2:4, :8]
        part.add_(x[:, :2, 8:16])
        return F.relu_(y)


class Hooked(nn.Module):
    """Hooks before, after and on the way back; one on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = MLP(), nn.Parameter(torch.ones(WIDTH))
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
        self.inner.up.register_forward_hook(_with_bias)
        self.inner.down.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 1.5)
        return y * self.scale


class Detached(nn.Module):
    """Straight through: values rounded, gradients not; and a part without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.no_grad():
            scale = y.square().mean(-1, keepdim=True)
        return y + ((y * 8).round() / 8 - y).detach() + 0.1 * scale


class Slope(nn.Module):
    """A gradient taken in the forward, which is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.inner(x)).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * slope


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda one: torch.tanh(one * self.weight).cumsum(0) / LENGTH)(x)


class Skips(nn.Module):
    """Runs where any of the samples at hand wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wanted = x[:, :1, :1] > 0.8
        return torch.where(wanted, self.inner(x), x) if wanted.any() else x


class LooksAtOthers(nn.Module):
    """Depends on the other samples of the batch, a little."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) - 0.1 * x.mean(0, keepdim=True))


class Sized(nn.Module):
    """Depends on how many samples there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) / len(x) ** 0.5


@dataclasses.dataclass
class Held:
    x: Tensor
    more: dict[str, Any]


class _Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, held: Held, *, scale: float = 1.0) -> tuple[Held, Tensor]:
        return Held(self.inner(held.x) * scale, {"was": held.x, "nothing": None}), held.x.mean()


class Structures(nn.Module):
    """A dataclass in, by keyword too; a dataclass and a tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _Inside(), _Inside()

    def forward(self, x: Tensor) -> Tensor:
        held, _ = self.a(Held(x, {}), scale=0.5)
        held, _ = self.b(held)
        return held.x + held.more["was"]


class Sorted(nn.Module):
    """Sorts, rolls, gathers and scatters within a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.roll(1, 1))
        at = y[..., :1].argsort(1).expand_as(y)
        return torch.tanh(y.gather(1, at)).scatter_add(1, at, x)


OWN: dict[str, type[nn.Module]] = {
    name: each
    for name, each in list(globals().items())
    if isinstance(each, type) and issubclass(each, nn.Module) and not name.startswith("_") and each is not Norm
}
BLOCKS: dict[str, Callable[[], nn.Module]] = OWN | {
    each.__name__: each for each in (*odd_blocks.PAIRED, *odd_blocks.OTHERS)
}
del BLOCKS["Scaled"], BLOCKS["Interleaved"]  # Scaled adds up; Interleaved drops out

BATCH_NORMS = ("BatchNorm", "BatchNormSlow", "BatchNormUntracked", "BatchNormTwice", "Image", "GatedConvolution")
"""Over each microbatch by itself."""
COUNTING = ("Parity",)
"""Keep in Python what a checkpoint does not hold."""
SINGLE = ("Mixed",)
"""Computed in single precision."""
