"""Decoders that several benchmarks train: a GPT as nanoGPT has it, a Llama without transformers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GptShape:
    """By default GPT-2, 124M."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    length: int = 1024


class GPT(nn.Module):
    """``tied``: its head is its embedding. ``checkpointed``: blocks are computed again in backward, by torch."""

    def __init__(self, shape: GptShape, *, tied: bool = True, dropout: float = 0.0, checkpointed: bool = False):
        super().__init__()
        width = shape.width
        self.token, self.place = nn.Embedding(shape.vocabulary, width), nn.Embedding(shape.length, width)
        self.blocks = nn.ModuleList(GptBlock(width, shape.heads, dropout) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.vocabulary, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), GptAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), GptMlp(width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GptAttention(nn.Module):
    """Each head's query, key and value lie beside each other in one weight, as in Megatron: it can be cut by heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class GptMlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class LlamaShape:
    """By default Llama 3, 8B."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    inner: int = 14336
    vocabulary: int = 128256
    length: int = 8192


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm, self.head = Norm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.length), 500000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():  # a second time, as transformers does
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.norm1, self.attention = Norm(shape.width), LlamaAttention(shape)
        self.norm2, self.mlp = Norm(shape.width), LlamaMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.head = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.k = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.v = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.out = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x``: [samples, positions, heads, width of a head]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = (t[None, : x.shape[1], None] for t in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class LlamaMlp(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """In fp32 everywhere: on CUDA autocast leaves the log-softmax of ``F.cross_entropy`` in bf16."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
