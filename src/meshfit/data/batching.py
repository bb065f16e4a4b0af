"""Which samples make a batch, where these are not simply the next ones: by their lengths, or as a sampler says.

    ByLength     samples of similar lengths together; a fixed number of them, or as many as ``tokens`` hold
    BySampler    as a sampler, or a batch sampler, of torch gives them

All batches of an epoch are listed when it begins: a pure function of seed and epoch, the same on every rank.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshfit.data.draw import Key, SampleRandom
from meshfit.data.order import order
from meshfit.data.seeding import CodeGenerators, exclusive
from meshfit.data.source import Source
from meshfit.errors import DataError

WINDOW = 50  # batches whose samples are sorted by length together
READ = 1024  # samples read at a time, to learn their lengths
PLACE = 2**21  # sets a sampler's random numbers apart

Batches = list[NDArray[np.int64]]


class Batching(Protocol):
    """How a source wants its samples grouped."""

    def batches(self, size: int, *, seed: int, shuffle: bool, epoch: int) -> Batches: ...

    @property
    def name(self) -> str:
        """Changes when the batches do."""
        ...


class ListedBatches:
    """``order.Ids`` for batches that are listed epoch by epoch."""

    def __init__(self, batching: Batching, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool = False):
        self.batching, self.batch_size, self.seed, self.shuffle = batching, batch_size, seed, shuffle
        self.drop_last = drop_last
        self.name = f"{batching.name}, batches of {batch_size}"
        self._held: tuple[int, Batches] = (-1, [])

    def __call__(self, epoch: int, batch: int) -> NDArray[np.int64]:
        return self._listed(epoch)[batch]

    def count(self, epoch: int) -> int:
        return len(self._listed(epoch))

    def before(self, epoch: int, batch: int) -> int:
        """Samples of an epoch before a batch."""
        return sum(map(len, self._listed(epoch)[:batch]))

    def at(self, epoch: int, consumed: int) -> int:
        """The batch that follows so many samples."""
        ends = np.cumsum([0, *map(len, self._listed(epoch))])
        found = np.flatnonzero(ends == consumed)
        if not len(found):
            raise DataError(f"the run stopped after {consumed} samples of an epoch", "no batch of it ends there now")
        return int(found[0])

    def _listed(self, epoch: int) -> Batches:
        if self._held[0] != epoch:
            made = self.batching.batches(self.batch_size, seed=self.seed, shuffle=self.shuffle, epoch=epoch)
            if self.drop_last and len(made) > 1 and len(made[-1]) < self.batch_size:
                made.pop()
            self._held = epoch, made
        return self._held[1]


@dataclass(frozen=True)
class ByLength:
    """``tokens``: a batch's samples, each as long as the longest, hold at most so many; None: it has ``size`` samples.
    Not shuffled, the samples keep their order."""

    lengths: NDArray[np.int64]
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and len(self.lengths) and (longest := int(self.lengths.max())) > self.tokens:
            at = int(self.lengths.argmax())
            raise DataError(
                f"sample {at} has a length of {longest}, more than batch_tokens={self.tokens}",
                "cut such samples, or allow more",
            )

    @property
    def name(self) -> str:
        digest = hashlib.blake2b(np.ascontiguousarray(self.lengths).tobytes(), digest_size=8).hexdigest()
        return f"lengths {digest}, {self.tokens} tokens"

    def mean_size(self) -> int:
        """Samples of a batch by tokens, about."""
        assert self.tokens is not None
        return max(1, int(self.tokens / max(1.0, float(self.lengths.mean()))))

    def batches(self, size: int, *, seed: int, shuffle: bool, epoch: int) -> Batches:
        samples = len(self.lengths)
        if not shuffle:
            return self._cut(np.arange(samples), size)
        shuffled = order(samples, seed=seed, epoch=epoch)[np.arange(samples)]
        window = WINDOW * (size if self.tokens is None else self.mean_size())
        parts = [shuffled[at : at + window] for at in range(0, samples, window)]
        made = self._cut(np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts]), size)
        short = [made.pop()] if self.tokens is None and len(made[-1]) < size else []
        return [made[i] for i in order(len(made), seed=seed + 1, epoch=epoch)[np.arange(len(made))].tolist()] + short

    def _cut(self, ids: NDArray[np.int64], size: int) -> Batches:
        if self.tokens is None:
            return _by_size(ids, size)
        made, start, longest = [], 0, 0
        for at, length in enumerate(self.lengths[ids].tolist()):
            if max(longest, length) * (at + 1 - start) > self.tokens:
                made.append(ids[start:at])
                start, longest = at, 0
            longest = max(longest, length)
        return [*made, ids[start:]]


@dataclass(frozen=True)
class BySampler:
    """``sampler`` gives samples, or, ``whole``, batches of them."""

    sampler: Iterable[Any]
    whole: bool = False

    @property
    def name(self) -> str:
        return type(self.sampler).__name__

    def batches(self, size: int, *, seed: int, shuffle: bool, epoch: int) -> Batches:
        with exclusive():
            generators = CodeGenerators(self.sampler)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            generators.seed(SampleRandom(np.zeros(1, np.int64), Key(seed, epoch, PLACE)).seeds()[0])
            given = list(self.sampler)
        if self.whole:
            return [np.asarray(batch, np.int64) for batch in given]
        return _by_size(np.asarray(given, np.int64), size)


def _by_size(ids: NDArray[np.int64], size: int) -> Batches:
    return [ids[at : at + size] for at in range(0, len(ids), size)]


Length = str | Callable[[Any], Any] | Sequence[int] | NDArray[np.int64]


def lengths_of(source: Source, length: Length) -> NDArray[np.int64]:
    """Of every sample: a field's name, a function of a sample, or the lengths themselves. The first two read all."""
    if isinstance(length, np.ndarray) and length.dtype.kind in "iu" and length.ndim == 1:
        found = length
    elif not isinstance(length, str) and not callable(length):
        found = np.array(list(map(_whole, length, count())), np.int64)
    else:
        parts = (np.arange(at, min(at + READ, len(source))) for at in range(0, len(source), READ))
        given = (_said(sample, length) for part in parts for sample in source.samples(part, Key()))
        found = np.array(list(map(_whole, given, count())), np.int64)
    if len(found) != len(source):
        raise DataError(f"length= holds {len(found)} lengths for {len(source)} samples")
    if len(found) and found.min() < 0:
        raise DataError(f"length= says that sample {found.argmin()} has a length of {found.min()}")
    return found.astype(np.int64, copy=False)


def _whole(value: Any, i: int) -> int:
    """The length that ``value`` says, a number or a sequence of that length."""
    try:
        number = len(value) if getattr(value, "ndim", 1) and hasattr(value, "__len__") else int(value)
        if isinstance(value, float) and value != number:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"length= gives {value!r} for sample {i}", "a whole number, or a sequence of that length"
        ) from None
    return number


def _said(sample: Any, length: str | Callable[[Any], Any]) -> Any:
    if callable(length):
        return length(sample)
    try:
        return sample[length]
    except (KeyError, TypeError, IndexError):
        known = f"it has {', '.join(map(str, sample))}" if isinstance(sample, dict) else "a function of a sample may do"
        raise DataError(f"length={length!r}: a sample has no such field", known) from None
