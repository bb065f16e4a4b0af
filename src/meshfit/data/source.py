"""Where samples come from: anything with a length that can be read by a batch of indices, or a stream.

``open_source`` turns what the user gave into one of three:

    Memory   tensors and arrays, nested as they like; a batch is one gather, or a view when in order
    Map      a map-style data set; ``__getitems__`` where there is one, collated as torch does
    Stream   an iterable without a length: read in order, by every rank, each keeping its share
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from meshfit.data import tree
from meshfit.errors import DataError


class Source(Protocol):
    """Samples by index. ``fetch`` returns one batch: a tree of tensors whose first dim is the sample."""

    def __len__(self) -> int: ...

    def fetch(self, ids: NDArray[np.int64]) -> Any: ...


class Memory:
    """Tensors that lie in memory, nested in tuples and dicts; all of one length."""

    def __init__(self, arrays: Any):
        self.arrays = tree.to_tensors(arrays)
        lengths = {len(t) if t.dim() else 0 for t in tree.tensors(self.arrays)}
        if len(lengths) != 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in tree.tensors(self.arrays)) or "no tensor at all"
            raise DataError("the tensors of data= differ in length", f"shapes: {shapes}", "the first dim is the sample")
        (self.length,) = lengths

    def __len__(self) -> int:
        return self.length

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        first, last = int(ids[0]), int(ids[-1])
        if last - first == len(ids) - 1 and (len(ids) < 3 or bool((np.diff(ids) == 1).all())):
            return tree.map_tensors(lambda t: t[first : last + 1], self.arrays)  # in order: no copy
        index = torch.from_numpy(np.ascontiguousarray(ids))
        return tree.map_tensors(lambda t: t.index_select(0, index.to(t.device)), self.arrays)


class Map:
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

    def __init__(self, samples: Iterable[Any]):
        self.samples = samples

    def batches(self, size: int) -> Iterator[list[Any]]:
        """Lists of ``size`` samples; the last may be short."""
        held: list[Any] = []
        for sample in self.samples:
            held.append(sample)
            if len(held) == size:
                yield held
                held = []
        if held:
            yield held


def open_source(data: Any) -> Source | Stream:
    """The source that ``data`` stands for. A function is called, here, in the process that reads."""
    if isinstance(data, DataLoader):
        raise DataError(
            "data= is a DataLoader, but meshfit makes the batches itself",
            "pass the data set: data=loader.dataset, batch_size= for the whole batch over all devices",
        )
    if hasattr(data, "fetch") and hasattr(data, "__len__"):
        return data
    if isinstance(data, TensorDataset):
        return Memory(data.tensors)
    if isinstance(data, torch.Tensor | np.ndarray | tuple | Mapping):
        return Memory(dict(data) if isinstance(data, Mapping) else data)
    if isinstance(data, list) and data and all(isinstance(x, torch.Tensor | np.ndarray) for x in data):
        return Memory(tuple(data)) if len({len(x) for x in data}) == 1 and len(data) < 9 else Map(data)
    if isinstance(data, IterableDataset):
        return Stream(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Map(data)
    if isinstance(data, Iterable):
        if isinstance(data, Iterator):
            raise DataError(
                "data= is an iterator, which can be read only once and by one rank",
                "pass an iterable (an IterableDataset, say) or a function that returns one: data=lambda: ...",
            )
        return Stream(data)
    if callable(data):
        return open_source(_Fresh(data) if inspect.isgeneratorfunction(data) else data())
    raise DataError(
        f"data= is a {type(data).__name__}, which holds no samples",
        "give tensors, arrays, a Dataset, an IterableDataset, or a function that returns one of them",
    )


class _Fresh:
    """A generator function as an iterable that starts anew each time."""

    def __init__(self, function: Callable[[], Any]):
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return self.function()


def sample_count(data: Any) -> int | None:
    """Samples in ``data`` as far as can be told without calling a function of the user's."""
    if callable(data) and not hasattr(data, "__len__"):
        return None
    source = open_source(data)
    return None if isinstance(source, Stream) else len(source)


def few_samples(source: Source, most: int = 16) -> Any:
    """A batch of samples from all over ``source``, to try things on."""
    return source.fetch(np.unique(np.linspace(0, len(source) - 1, most).astype(np.int64)))
