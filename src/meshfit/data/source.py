"""Where samples come from: anything with a length that can be read by a batch of indices, or a stream.

``open_source`` turns what the user gave into one of three:

    Memory   tensors and arrays, nested as they like; a batch is one gather
    Map      a map-style data set; ``__getitems__`` where there is one, collated as torch does
    Stream   an iterable without a length: read in order, by every rank, each keeping its share

A path or URL is opened (opening.py); what ``meshfit.data``'s functions return are sources already.
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
from meshfit.data.draw import Key
from meshfit.errors import DataError

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Source(ABC):
    """Samples by index. A leaf says what it holds (``__len__``, ``fetch``); the methods make new sources of it."""

    waits = False
    """Whether reads wait for somebody else (a network, a server): then they are worth starting early everywhere."""

    blocks: NDArray[np.int64] | None = None
    """Edges of the blocks of samples that are read together, where one costs as much as all: order keeps to a few
    blocks at a time, see order.py."""

    device_stage = False
    """Whether ``finish`` has work to do, on the device."""

    global_random = False
    """Whether reading draws from the process's own random generators: then one thread at a time may read."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, ids: NDArray[np.int64]) -> Any:
        """One batch: a tree of tensors whose first dim is the sample, in memory of its own."""

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        """The same on its way to the device, with what is random in it drawn for ``key``."""
        return self.fetch(ids)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        """What is left to do to a batch once it is on the device."""
        return content

    def few(self, most: int = 16) -> Any:
        """A batch of samples from all over, to try things on."""
        if len(self) == 0:
            raise DataError("data= holds no sample")
        return handed(self.fetch(np.unique(np.linspace(0, len(self) - 1, most).astype(np.int64))))

    def name_of(self, i: int) -> str:
        """Where sample ``i`` lies, for people: a file, a row, a key."""
        return f"sample {i}"

    @property
    def fingerprint(self) -> str:
        """Changes when the samples behind the indices do; a checkpoint keeps it."""
        return f"{type(self).__name__} of {len(self)}"

    @property
    def left_out(self) -> list[str]:
        """Rows of a table that could not be converted and were left out, with on_bad="skip", and why."""
        return []

    def state(self) -> dict[str, Any]:
        """What a run has learnt of the data and a resumed one must know: small, plain, for the checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Know it again. Most sources learn nothing."""
        return

    def map(self, function: Callable[..., Any], *more: Callable[..., Any], each: bool | None = None) -> "Source":
        """A source whose batches are passed through ``function``, then ``more``. See chain.py."""
        from meshfit.data.chain import mapped

        return mapped(self, (function, *more), each)

    def on_device(self, function: Callable[..., Any], *more: Callable[..., Any]) -> "Source":
        """The same, run on the device once the batch is there: bytes travel, floats do not."""
        from meshfit.data.chain import mapped

        return mapped(self, (function, *more), None, device=True)

    def on_bad(self, what: str, most: float = 0.01) -> "Source":
        """ "stop" at a sample that cannot be read, or "skip" it, up to a share of ``most``. See bad.py."""
        from meshfit.data.bad import Skipping

        if what not in ("stop", "skip"):
            raise DataError(f"on_bad={what!r} is not understood", 'write "stop" or "skip"')
        return self if what == "stop" else Skipping(self, most)

    def mixup(self, alpha: float = 0.2, *, classes: int) -> "Source":
        """Each sample blended with another, its label with the other's. See chain.py."""
        from meshfit.data.chain import Mixup

        return Mixup(self, alpha, classes)

    def take(self, ids: Any) -> "Source":
        """The samples at ``ids`` (a slice, a list, an array), in that order."""
        from meshfit.data.chain import Part

        return Part(self, np.arange(len(self))[ids] if isinstance(ids, slice) else np.asarray(ids, np.int64))

    def split(self, first: float, seed: int = 0) -> tuple["Source", "Source"]:
        """Two sources without a sample in common: a random share of ``first``, and the rest."""
        from meshfit.data.order import order

        at = round(first * len(self))
        shuffled = order(len(self), seed=seed, epoch=2**32)[np.arange(len(self))]
        return self.take(np.sort(shuffled[:at])), self.take(np.sort(shuffled[at:]))


class Over(Source):
    """A source made of another: all that it does not do itself, the other does."""

    def __init__(self, source: Source):
        self.source = source
        self.waits, self.blocks = source.waits, source.blocks
        self.device_stage, self.global_random = source.device_stage, source.global_random

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return self.finish(self.read(ids, Key()), ids, Key())

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.read(ids, key)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.finish(content, ids, key)

    def name_of(self, i: int) -> str:
        return self.source.name_of(i)

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def left_out(self) -> list[str]:
        return self.source.left_out

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.source.load_state(state)


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

    @property
    def fingerprint(self) -> str:
        kinds = ", ".join(f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in tree.tensors(self.arrays))
        return f"tensors: {kinds}"

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        index = torch.from_numpy(np.ascontiguousarray(ids))

        def rows(t: torch.Tensor) -> torch.Tensor:
            if (signed := SIGNED.get(t.dtype)) is not None:  # torch selects none of these
                return rows(t.view(signed)).view(t.dtype)
            return t.index_select(0, index if t.is_cpu else index.to(t.device))

        return tree.map_tensors(rows, self.arrays)


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
        found = []
        for i in wanted:
            try:
                found.append(self.samples[i])
            except Exception as error:  # the user's own: it keeps its type and its trace
                error.add_note(f"while reading sample {i} of {type(self.samples).__name__}")
                raise
        return default_collate(found)


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


def handed(content: Any) -> Any:
    """What the model gets: words as lists; images of different sizes make no batch."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, tree.Ragged):
            return x
        if x and isinstance(x[0], torch.Tensor):
            shapes = sorted({tuple(one.shape) for one in x})
            raise DataError(
                f"the samples of a batch differ in shape: {shapes[0]} and {shapes[-1]}",
                "bring them to one: .map(meshfit.data.transform.resize((224, 224))), say",
            )
        return list(x)

    return tree.map_leaves(leaf, content)


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
    if isinstance(data, str | Path):
        from meshfit.data.opening import open

        return open(data)
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
