"""Where samples come from: anything with a length that can be read by a batch of indices, or a stream.

``open_source`` turns what the user gave into one of three:

    Memory   tensors and arrays, nested as they like; a batch is one gather
    Map      a map-style data set; ``__getitems__`` where there is one, collated as torch does
    Stream   an iterable without a length: read in order, by every rank, each keeping its share
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from meshfit.data import tree
from meshfit.errors import DataError


class Source(ABC):
    """Samples by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, ids: NDArray[np.int64]) -> Any:
        """One batch: a tree of tensors whose first dim is the sample, in memory of its own."""

    def few(self, most: int = 16) -> Any:
        """A batch of samples from all over, to try things on."""
        if len(self) == 0:
            raise DataError("data= holds no sample")
        return self.fetch(np.unique(np.linspace(0, len(self) - 1, most).astype(np.int64)))


class Memory(Source):
    """Tensors that lie in memory, nested in tuples and dicts; all of one length."""

    def __init__(self, arrays: Any, name: str = "data"):
        self.arrays = _as_tensors(arrays)
        shapes = [tuple(t.shape) for t in tree.tensors(self.arrays)]
        if not shapes:
            raise DataError(f"{name}= holds no tensor", "give tensors or arrays whose first dim is the sample")
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            found = ", ".join(map(str, shapes))
            raise DataError(
                f"the tensors of {name}= differ in length", f"shapes: {found}", "the first dim is the sample"
            )
        self.length = shapes[0][0]

    def __len__(self) -> int:
        return self.length

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        index = torch.from_numpy(np.ascontiguousarray(ids))
        return tree.map_tensors(lambda t: t.index_select(0, index if t.is_cpu else index.to(t.device)), self.arrays)


class Map(Source):
    """A map-style data set: ``len(data)`` and ``data[i]``."""

    def __init__(self, samples: Any):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        wanted = ids.tolist()
        if hasattr(self.samples, "__getitems__"):
            return default_collate(self.samples.__getitems__(wanted))
        return default_collate([self.samples[i] for i in wanted])


class Stream:
    """Samples that come one after another, with no length. Every epoch starts the iterable anew.

    What can be promised: the same stream gives the same batches under every plan, because every rank reads
    all of it and keeps its share. Shuffling, and going on from the middle, are the stream's own affair.
    """

    def __init__(self, start: Callable[[], Iterable[Any]]):
        self.start = start

    def batches(self, size: int) -> Iterator[list[Any]]:
        """Lists of ``size`` samples; the last may be short."""
        samples = iter(self.start())
        while held := list(islice(samples, size)):
            yield held

    def few(self, most: int = 16) -> Any:
        """A batch of the first samples, to try things on."""
        held = next(self.batches(most), None)
        if held is None:
            raise DataError("data= holds no sample")
        return default_collate(held)


def open_source(data: Any, name: str = "data") -> Source | Stream:
    """The source that ``data`` stands for. A function is called, here, in the process that reads."""
    if isinstance(data, DataLoader):
        raise DataError(
            f"{name}= is a DataLoader, but meshfit makes the batches itself",
            f"pass the data set: {name}=loader.dataset, batch_size= for the whole batch over all devices",
        )
    if isinstance(data, Source | Stream):
        return data
    if isinstance(data, TensorDataset):
        return Memory(data.tensors, name)
    if isinstance(data, torch.Tensor | np.ndarray | tuple | Mapping):
        return Memory(dict(data) if isinstance(data, Mapping) else data, name)
    if isinstance(data, list) and data and all(isinstance(x, torch.Tensor | np.ndarray) for x in data):
        return Memory(tuple(data), name) if len({len(x) for x in data}) == 1 and len(data) < 9 else Map(data)
    if isinstance(data, str | bytes | Path):
        raise DataError(f"{name}={data!r} is a path, not samples", "give a Dataset, or tensors, read from it")
    if isinstance(data, IterableDataset):
        return Stream(lambda: data)
    if callable(data) and (isinstance(data, type) or not hasattr(data, "__len__")):
        made = data()
        return Stream(_Again(data, made)) if isinstance(made, Iterator) else open_source(made, name)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Map(data)
    if isinstance(data, Iterator):
        raise DataError(
            f"{name}= is an iterator, which can be read only once and by one rank",
            f"pass an iterable (an IterableDataset, say) or a function that returns one: {name}=lambda: ...",
        )
    if isinstance(data, Iterable):
        return Stream(lambda: data)
    raise DataError(
        f"{name}= is a {type(data).__name__}, which holds no samples",
        "give tensors, arrays, a Dataset, an IterableDataset, or a function that returns one of them",
    )


class _Again:
    """A function that returns iterators, called anew each time; the first was made already."""

    def __init__(self, function: Callable[[], Any], first: Iterator[Any]):
        self.function, self.first = function, [first]

    def __call__(self) -> Iterator[Any]:
        return self.first.pop() if self.first else self.function()


def sample_count(data: Any, name: str = "data") -> int | None:
    """Samples in ``data`` as far as can be told without calling a function of the user's."""
    if callable(data) and (isinstance(data, type) or not hasattr(data, "__len__")):
        return None
    source = open_source(data, name)
    return None if isinstance(source, Stream) else len(source)


def _as_tensors(arrays: Any) -> Any:
    """``arrays`` with NumPy arrays and lists of numbers as tensors."""
    if isinstance(arrays, np.ndarray):
        with warnings.catch_warnings():  # that it may not be written to: nor is it, batches are copies
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.as_tensor(arrays)
    if isinstance(arrays, Mapping):
        return {key: _as_tensors(value) for key, value in arrays.items()}
    if isinstance(arrays, list) and arrays and all(isinstance(value, int | float) for value in arrays):
        return torch.tensor(arrays)
    if isinstance(arrays, tuple | list) and not hasattr(arrays, "_fields"):
        return type(arrays)(_as_tensors(value) for value in arrays)
    return arrays
