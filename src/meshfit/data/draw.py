"""Random numbers that follow the sample: hashes of (seed, epoch, which transform, sample id, which number).

Nothing else enters: not the rank, the worker, the share of the batch, nor where a run was cut. So augmentation is
the same bytes under every plan and after every resume.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshfit.data.order import mix

_u64 = np.uint64


@dataclass(frozen=True, slots=True)
class Key:
    """What all samples of a batch have in common: the run's seed and the epoch; ``place`` counts transforms."""

    seed: int = 0
    epoch: int = 0
    place: int = 0

    def at(self, place: int) -> Self:
        return replace(self, place=place)

    @property
    def number(self) -> np.uint64:
        return _number(self)


@lru_cache(maxsize=256)  # small arrays take NumPy as long as a batch of them
def _number(key: Key) -> np.uint64:
    parts = np.array([key.seed % 2**64, key.epoch, key.place], _u64)
    with np.errstate(over="ignore"):
        hashed = mix(parts, _u64(0xA0761D6478BD642F))
        return mix(hashed[:1] + hashed[1:2] * _u64(3) + hashed[2:] * _u64(7), _u64(0xE7037ED1A0B428DB))[0]


@lru_cache(maxsize=256)
def _columns(number: int, call: int, count: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        hashed = mix(np.arange(count, dtype=_u64), _u64(number) + _u64(call) * _u64(0x9E3779B97F4A7C15))
        return hashed[None] * _u64(0x8EBC6AF09C88C6E3)


class SampleRandom:
    """The random numbers of a batch's samples: each call gives new ones, a row a sample."""

    def __init__(self, ids: NDArray[np.int64], key: Key):
        self.ids, self.key, self._calls = ids, key, 0
        self._rows: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def bits(self, count: int = 1) -> NDArray[np.uint64]:
        """(samples, count) 64-bit integers."""
        self._calls += 1
        number = self.key.number
        if self._rows is None:
            self._rows = mix(self.ids.astype(_u64), number)[:, None]
        return mix(self._rows + _columns(int(number), self._calls, count), _u64(0x589965CC75374CC3))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """(samples, *shape) float32 in [low, high)."""
        whole = (self.bits(int(np.prod(shape, dtype=int))) >> _u64(40)).astype(np.float32) * np.float32(2**-24)
        return torch.from_numpy(whole).view(len(self), *shape) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(samples, *shape) int64 in [low, high)."""
        bits = self.bits(int(np.prod(shape, dtype=int))) >> _u64(32)
        return torch.from_numpy(((bits * _u64(high - low)) >> _u64(32)).astype(np.int64) + low).view(len(self), *shape)

    def beta(self, alpha: float) -> Tensor:
        """(samples,) float32 of Beta(alpha, alpha), by Jöhnk's rejection; the chance that 48 tries fail is below 2e-4
        for alpha up to 2, and gives one half."""
        found = torch.full((len(self),), 0.5)
        tries = self.uniform(48, 2).clamp_min(1e-7).double() ** (1 / alpha)
        total = tries.sum(2)
        good = (total <= 1) & (total > 0)
        first = good.int().argmax(1)
        rows = torch.arange(len(self))
        value = (tries[rows, first, 0] / total[rows, first].clamp_min(1e-300)).float()
        return torch.where(good.any(1), value, found)

    def seeds(self) -> list[int]:
        """One whole number a sample, to seed generators with."""
        return (self.bits()[:, 0] >> _u64(32)).tolist()

    def generators(self) -> list[np.random.Generator]:
        """One NumPy generator a sample."""
        return [np.random.Generator(np.random.Philox(key=seed)) for seed in self.seeds()]
