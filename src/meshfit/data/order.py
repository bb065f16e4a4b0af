"""The order in which samples are visited: a pure function, O(1) memory.

A Feistel network permutes the integers below 4^b; indices that land outside [0, n) walk on through the
same permutation until they land inside (cycle walking), which keeps it a bijection on [0, n). Six rounds:
four to eight cannot be told from a random permutation by lag correlation or fixed points, three can.

Where samples are in blocks of which one costs as much to read as all (row groups far away), order goes by windows: the
blocks are permuted, then the samples inside each window of ``WINDOW`` blocks. Each sample still comes once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfit.errors import DataError

_ROUNDS = 6
_CHUNK = 16384  # indices computed at a time: numpy's overhead per call is spread over them
_u64 = np.uint64
WINDOW = 8  # blocks whose samples are mixed


@dataclass(frozen=True)
class Permutation:
    """``permutation[i]`` for an array of positions ``i``; computed, not stored."""

    n: int
    keys: NDArray[np.uint64]

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        x = self._shuffle(positions.astype(_u64))
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = y = self._shuffle(x[outside])
            outside = outside[y >= self.n]
        return x.astype(np.int64)

    def _shuffle(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = _u64(max(1, (int(self.n - 1).bit_length() + 1) // 2))
        mask = (_u64(1) << bits) - _u64(1)
        left, right = x >> bits, x & mask
        for key in self.keys:
            mixed = mix(right, key)
            mixed &= mask
            mixed ^= left
            left, right = right, mixed
        left = left << bits
        left |= right
        return left


def mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash 64-bit integers under ``key``: the one source of randomness tied to samples."""
    x = x ^ key
    x *= _u64(0x9E3779B97F4A7C15)  # in place: arrays of integers overflow without a word
    x ^= x >> _u64(32)
    x *= _u64(0xD6E8FEB86659FD93)
    x ^= x >> _u64(32)
    return x


def stream_seed(share: int, step: int, seed: int) -> int:
    """Of the random numbers that share ``share`` of a batch draws from ``step`` on: no other share or step has it."""
    key = mix(np.array([share, step], np.uint64), np.uint64(seed % 2**64))
    return int((key[0] ^ (key[1] << np.uint64(1))) >> np.uint64(1))


def order(n: int, *, seed: int, epoch: int) -> Permutation:
    """The order in which epoch ``epoch`` visits ``n`` samples.

    Depends on nothing else: not the number of devices, not the rank, not where a run was cut. So a run may
    stop on 64 devices and go on with 48, and every sample is still seen once an epoch.
    """
    with np.errstate(over="ignore"):
        start = mix(np.array([seed % 2**64, epoch], _u64), _u64(0x5851F42D4C957F2D))
        keys = mix(np.arange(_ROUNDS, dtype=_u64), start[0] + start[1] * _u64(3))
    return Permutation(n, keys)


def part_of(edges: NDArray[np.int64], i: int) -> tuple[int, int]:
    """Of what begins at ``edges``, files say, the one that holds ``i``, and where it is in that."""
    part = int(np.searchsorted(edges, i, "right") - 1)
    return part, int(i - edges[part])


def by_part(
    edges: NDArray[np.int64], ids: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """For each part that holds some of ``ids``: the part, where these are in ``ids``, and where they are in it."""
    parts = np.searchsorted(edges, ids, "right") - 1
    for part in np.unique(parts).tolist():
        at = np.flatnonzero(parts == part)
        yield part, at, ids[at] - edges[part]


class Windows:
    """``windows[i]`` for an array of positions ``i``: blocks shuffled, then samples inside windows of blocks.

    ``edges`` are the first samples of the blocks, and the number of samples. Memory: one number a block.
    """

    def __init__(self, edges: NDArray[np.int64], *, seed: int, epoch: int):
        self.seed, self.epoch = seed, epoch
        shuffled = order(len(edges) - 1, seed=seed, epoch=epoch)[np.arange(len(edges) - 1)]
        self.firsts = edges[shuffled]
        self.starts = np.concatenate([[0], np.cumsum(np.diff(edges)[shuffled])])
        """Positions at which the shuffled blocks start."""

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        edges = np.append(self.starts[:-1:WINDOW], self.starts[-1])
        found = np.empty(len(positions), np.int64)
        for window, at, inner in by_part(edges, positions):
            low, high = edges[window : window + 2]
            place = low + order(int(high - low), seed=self.seed + (window + 1) * 2**32, epoch=self.epoch)[inner]
            block = np.searchsorted(self.starts, place, "right") - 1
            found[at] = self.firsts[block] + place - self.starts[block]
        return found


class Ids:
    """Which samples each batch of an epoch holds: ``ids(epoch, batch)``. With ``blocks``, their edges, by windows."""

    name = ""

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        blocks: NDArray[np.int64] | None = None,
        drop_last: bool = False,
    ):
        self.n, self.batch_size, self.seed, self.shuffle, self.blocks = n, batch_size, seed, shuffle, blocks
        self.drop_last = drop_last
        self._chunk: tuple[int, int, int, NDArray[np.int64]] = (-1, 0, 0, np.empty(0, np.int64))

    @property
    def batches(self) -> int:
        """Batches an epoch has; the last may be short."""
        if self.drop_last and self.n >= self.batch_size:
            return self.n // self.batch_size
        return -(-self.n // self.batch_size)

    def count(self, epoch: int) -> int:
        return self.batches

    def before(self, epoch: int, batch: int) -> int:
        """Samples of an epoch before a batch."""
        return batch * self.batch_size

    def at(self, epoch: int, consumed: int) -> int:
        """The batch that follows so many samples."""
        batch, left = divmod(consumed, self.batch_size)
        if left:
            raise DataError(
                f"the run stopped after {consumed} samples of an epoch",
                f"that is no whole number of batches of {self.batch_size}",
                "resume with the batch_size it had",
            )
        return batch

    def __call__(self, epoch: int, batch: int) -> NDArray[np.int64]:
        first = batch * self.batch_size
        last = min(first + self.batch_size, self.n)
        if not self.shuffle:
            return np.arange(first, last)
        at, low, high, chunk = self._chunk
        if at != epoch or first < low or last > high:
            low, high = first, min(max(last, first + _CHUNK), self.n)
            chunk = self._order(epoch)[np.arange(low, high)]
            self._chunk = (epoch, low, high, chunk)
        return chunk[first - low : last - low]

    def _order(self, epoch: int) -> "Permutation | Windows":
        if self.blocks is None or len(self.blocks) < 3:
            return order(self.n, seed=self.seed, epoch=epoch)
        return Windows(self.blocks, seed=self.seed, epoch=epoch)


def share(size: int, part: int, parts: int) -> slice:
    """The ``part``-th of ``parts`` consecutive shares of ``size`` things; they differ by one at most."""
    return slice(size * part // parts, size * (part + 1) // parts)
