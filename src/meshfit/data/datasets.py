"""The user's own data: ``open_source`` turns what ``data=`` was given into a source or a stream.

    Memory         tensors and arrays, nested as they like; a batch is one gather
    Map            a map-style data set; ``__getitems__`` where there is one, collated as torch does
    SampleStream   an iterable without a length: read in order, by every rank, each keeping its share

A path or URL is opened (opening.py); what ``meshfit.data``'s functions return are sources already.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from meshfit.data import tree
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.seeding import CodeGenerators, beside_training, exclusive, global_generators, put_back, reading
from meshfit.data.source import Memory, Source, hashed, spread
from meshfit.errors import DataError

NO_KEY = Key()
TRIAL = 0.5  # seconds in which to see whether a data set draws random numbers


class Map(Source):
    """A map-style data set: ``len(data)`` and ``data[i]``. Where it draws random numbers, all generators are seeded for
    each sample (seeding.py), and samples are read one by one."""

    def __init__(self, samples: Any):
        self.samples = samples
        self.own_code = not isinstance(samples, list | tuple)
        self.generators = CodeGenerators(samples)
        self.draws = False
        """Whether it was seen to draw."""
        self._tried = False
        self._searched: int | None = None
        """The epoch in which its generators were looked for."""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def global_random(self) -> bool:
        if self.own_code and not self._tried:
            self._tried = True
            start = time.perf_counter()
            for some in np.array_split(spread(len(self), 256), 16):
                if len(some) and not self.draws and time.perf_counter() - start < TRIAL:
                    self.read(some, Key())
        return self.draws

    @property
    def fingerprint(self) -> str:
        """Of a list the values of some samples; of a data set its length is all that can be known."""
        if self.own_code:
            return super().fingerprint
        some = [self.samples[i] for i in spread(len(self), 1024).tolist()]
        return f"{super().fingerprint}, values {hashed(torch.as_tensor(x) for x in map(_number, tree.leaves(some)))}"

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return self.read(ids, Key())

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        if not self.own_code or (beside_training() and not self.draws):
            return self._collated(ids)
        first = self._searched is None
        with exclusive() if first or self.draws else reading:
            if self._searched != key.epoch:
                self.generators.search_again()
                self._searched = key.epoch
            if self.draws:
                return self._seeded(ids, key)
            before = self.generators.mark()
            made = self._collated(ids)
            made_one = first and self.generators.search_again()  # a generator, when it was first read
            if self.generators.mark() == before and not made_one:
                return made
            put_back(before)
        self.draws = True
        return self.read(ids, key)

    def _seeded(self, ids: NDArray[np.int64], key: Key) -> Any:
        found = []
        for i, seed in zip(ids.tolist(), SampleRandom(ids, key).seeds(), strict=True):
            self.generators.seed(seed)
            found += self._samples([i])
        return default_collate(found)

    def _collated(self, ids: NDArray[np.int64]) -> Any:
        return default_collate(self._samples(ids.tolist()))

    def _samples(self, ids: list[int]) -> list[Any]:
        if hasattr(self.samples, "__getitems__"):
            return self.samples.__getitems__(ids)
        found = []
        for i in ids:
            try:
                found.append(self.samples[i])
            except Exception as error:  # the user's own: it keeps its type and its trace
                error.add_note(f"while reading sample {i} of {type(self.samples).__name__}")
                raise
        return found


class SampleStream:
    """Samples that come one after another, with no length. Every epoch starts the iterable anew.

    What can be promised: the same stream gives the same batches under every plan, because every rank reads
    all of it and keeps its share. The random numbers it draws follow the seed and the epoch: its generators are seeded
    when an epoch begins, and what is drawn elsewhere changes nothing. Shuffling, and going on from the middle, are the
    stream's own affair.
    """

    def __init__(self, start: Callable[[], Iterable[Any]]):
        self.start = start
        self.generators = CodeGenerators(start)

    def batches(self, size: int, key: Key = NO_KEY) -> Iterator[list[Any]]:
        """Lists of ``size`` samples; the last may be short."""
        if beside_training():  # only where it was not seen to draw
            samples = iter(self.start())
            while held := list(islice(samples, size)):
                yield held
            return
        samples, state = None, None
        while True:
            with exclusive():
                if samples is None or state is None:
                    self.generators.search_again()
                    self.generators.seed(SampleRandom(np.zeros(1, np.int64), key).seeds()[0])
                    samples = iter(self.start())
                else:
                    state.restore()
                held = list(islice(samples, size))
                state = global_generators()
            if not held:
                return
            yield held

    @cached_property
    def draws(self) -> bool:
        """Whether its first samples draw random numbers."""
        with exclusive():
            samples = iter(self.start())
            self.generators.search_again()
            before = self.generators.mark()
            list(islice(samples, 4))
            return self.generators.search_again() or self.generators.mark() != before

    def few(self, most: int = 16) -> Any:
        """A batch of the first samples, to try things on."""
        held = next(self.batches(most), None)
        if held is None:
            raise DataError("data= holds no sample")
        return default_collate(held)


def open_source(data: Any, name: str = "data") -> Source | SampleStream:
    """The source that ``data`` stands for. A function is called, here, in the process that reads."""
    if isinstance(data, DataLoader):
        raise DataError(
            f"{name}= is a DataLoader, but meshfit makes the batches itself",
            f"pass the data set: {name}=loader.dataset, batch_size= for the whole batch over all devices",
        )
    if isinstance(data, Source | SampleStream):
        return data
    if isinstance(data, TensorDataset):
        return Memory(data.tensors, name)
    if isinstance(data, torch.Tensor | np.ndarray | tuple | Mapping):
        return Memory(dict(data) if isinstance(data, Mapping) else data, name)
    if isinstance(data, list) and data and all(isinstance(x, torch.Tensor | np.ndarray) for x in data):
        return Memory(tuple(data), name) if len({len(x) for x in data}) == 1 and len(data) < 9 else Map(data)
    if isinstance(data, str | Path):
        from meshfit.data.opening import open

        return open(data)
    if isinstance(data, IterableDataset):
        return SampleStream(lambda: data)
    if callable(data) and (isinstance(data, type) or not hasattr(data, "__len__")):
        made: Any = data()
        if not isinstance(made, Iterator):
            return open_source(made, name)
        function, first = data, [made]  # of the first epoch; the function is called again for each one after it
        return SampleStream(lambda: first.pop() if first else function())  # type: ignore[arg-type]
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Map(data)
    if isinstance(data, Iterator):
        raise DataError(
            f"{name}= is an iterator, which can be read only once and by one rank",
            f"pass an iterable (an IterableDataset, say) or a function that returns one: {name}=lambda: ...",
        )
    if isinstance(data, Iterable):
        return SampleStream(lambda: data)
    raise DataError(
        f"{name}= is a {type(data).__name__}, which holds no samples",
        "give tensors, arrays, a Dataset, an IterableDataset, or a function that returns one of them",
    )


def sample_count(data: Any, name: str = "data") -> int | None:
    """Samples in ``data`` as far as can be told without calling a function of the user's."""
    if callable(data) and (isinstance(data, type) or not hasattr(data, "__len__")):
        return None
    source = open_source(data, name)
    return None if isinstance(source, SampleStream) else len(source)


def _number(leaf: Any) -> Any:
    """A leaf as something that is a tensor."""
    return leaf if isinstance(leaf, torch.Tensor | np.ndarray | int | float) else list(repr(leaf).encode())
