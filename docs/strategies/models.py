"""The models that the strategies are shown with, and their data: small, with enough to compute that phases show."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, WORDS, LAYERS = 192, 64, 256, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Each token goes to the best of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(perceptron() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, choice = self.router(rows).softmax(-1).max(-1)
        found = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mine = (choice == i).nonzero().squeeze(1)
            found = found.index_add(0, mine, weight[mine, None] * expert(rows[mine]))
        return found.view_as(x)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = Mixture() if mixture else perceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, mixture: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(mixture) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(words) + self.places))


class Towers(nn.Module):
    """One for images, one for texts, both as vectors; what they make is compared."""

    def __init__(self) -> None:
        super().__init__()
        tower = lambda: nn.Sequential(*(Block(mixture=False) for _ in range(2)))
        self.image, self.text, self.head = tower(), tower(), nn.Linear(WIDTH, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        image, text = pairs.chunk(2, 1)
        return self.head(self.image(image).mean(1) * self.text(text).mean(1))


@dataclass(frozen=True)
class Shown:
    """A model and what it learns from."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]


def text() -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (256, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def pairs() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(256, 2 * LENGTH, WIDTH, generator=drawn), torch.randint(8, (256,), generator=drawn)


def next_word(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


GPT_ = Shown(f"a GPT of {LAYERS} blocks", GPT, text, next_word)
MIXTURE = Shown("a GPT of 2 blocks with 4 experts each", lambda: GPT(mixture=True, layers=2), text, next_word)
TOWERS = Shown("two towers of 2 blocks", Towers, pairs, F.cross_entropy)
