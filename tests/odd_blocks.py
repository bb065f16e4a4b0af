"""Blocks in the manner of many papers, for tensor parallelism to find its way through. None is in the zoo."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SIZE = 32, 4, 8


class Host(nn.Module):
    """A block on a residual stream, between norms."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.enter, self.before = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)
        self.block = block
        self.after, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.after(x + self.block(self.before(x))))


class MultiQuery(nn.Module):
    """One head of keys and values; a temperature and a slope for each head of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, SIZE).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        apart = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)
        scores = q @ k.transpose(-1, -2) * self.temperature - self.slopes[:, None, None] * apart.abs()
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class NormedHeads(nn.Module):
    """Queries and keys normed by weights that all heads share; the number of heads stands in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, SIZE).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, self.heads * SIZE))


class Interleaved(nn.Module):
    """Queries, keys and values of one head beside each other; a dropout on the weights and one on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * SIZE)).transpose(1, 2).chunk(3, -1)
        weights = self.drop((q @ k.transpose(-1, -2) / SIZE**0.5).softmax(-1))
        return self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))


class Latents(nn.Module):
    """Learned queries look at the sequence, and the sequence at what they saw: torch's own attention, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))
        self.read = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.write = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -1] = True
        seen, _ = self.read(self.latents.expand(len(x), -1, -1), x, x, key_padding_mask=padding)
        return self.write(x, seen, seen, need_weights=False)[0]


class RelativeWindows(nn.Module):
    """Attention within windows, with a learned bias for each distance and head."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 4
        self.into = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Unflatten(-1, (3, HEADS, SIZE)))
        self.table, self.back = nn.Parameter(torch.randn(2 * 4 - 1, HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        windows = x.reshape(batch * length // self.window, self.window, width)
        q, k, v = self.into(windows).permute(2, 0, 3, 1, 4)
        places = torch.arange(self.window, device=x.device)
        bias = self.table[places[:, None] - places + self.window - 1].permute(2, 0, 1)
        out = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype).expand(len(q), -1, -1, -1))
        return self.back(out.transpose(1, 2).flatten(2)).view(batch, length, width)


class SoftExperts(nn.Module):
    """Every expert sees every token; raw weights and einsum."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 48) / 8)
        self.down = nn.Parameter(torch.randn(experts, 48, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("btd,edh->beth", x, self.up))
        each = torch.einsum("beth,ehd->betd", hidden, self.down)
        return torch.einsum("betd,bte->btd", each, self.router(x).softmax(-1))


class Scaled(nn.Module):
    """One MLP, twice, with a learned scale inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down((self.up(x) * self.scale).relu())
        return x


class GatedConvolution(nn.Module):
    """Along the sequence: pointwise, gate, depthwise, BatchNorm, channels weighed by their means, pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.deep = nn.Conv1d(WIDTH, 96, 1), nn.Conv1d(48, 48, 3, padding=1, groups=48)
        self.norm, self.out = nn.BatchNorm1d(48), nn.Conv1d(48, WIDTH, 1)
        self.squeeze, self.excite = nn.Conv1d(48, 12, 1), nn.Conv1d(12, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(F.glu(self.into(x.transpose(1, 2)), 1)))
        y = F.silu(y)
        y = y * self.excite(self.squeeze(y.mean(-1, keepdim=True)).relu()).sigmoid()
        return self.out(y).transpose(1, 2)


class Grouped(nn.Module):
    """Grouped convolution and GroupNorm between two that mix all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.groups = nn.Conv1d(WIDTH, 64, 1), nn.Conv1d(64, 64, 3, padding=1, groups=8)
        self.norm, self.out = nn.GroupNorm(8, 64), nn.Conv1d(64, WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.groups(self.into(x.transpose(1, 2)).relu())).relu()).transpose(1, 2)


class LowRank(nn.Module):
    """An MLP with frozen weights and small trained ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 64, bias=False)
        nn.init.zeros_(self.b.weight)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x) + self.b(self.a(x))))


class Configured(nn.Module):
    """The number of heads stands in an object that others may read too."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(heads=HEADS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.config.heads, SIZE)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RawBias(nn.Module):
    """Raw weights, with a bias that would be summed along."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 64) / 8), nn.Parameter(torch.randn(64, WIDTH) / 8)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up) @ self.down + self.bias


class NormInside(nn.Module):
    """No pair: the norm needs all channels. Its layers are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Returns(nn.Module):
    """Attention that returns its weights as well, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = NormedReturn()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, mask=None)["out"]


class NormedReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> dict[str, Any]:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return {"out": self.o((weights @ v).transpose(1, 2).flatten(2)), "weights": weights, "mask": mask}


PAIRED = (
    MultiQuery,
    NormedHeads,
    Interleaved,
    Latents,
    RelativeWindows,
    SoftExperts,
    Scaled,
    GatedConvolution,
    Grouped,
    LowRank,
    Returns,
)
OTHERS = (Configured, RawBias, NormInside)
