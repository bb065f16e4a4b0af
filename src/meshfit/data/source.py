"""What a source of samples is: anything with a length that is read by a batch of indices.

``Memory`` holds tensors, ``DerivedSource`` is a source made of another (chain.py). Data sets and streams of the user's
own are in datasets.py, files and databases in a file each. ``stage`` measures where the time of a batch goes.
"""

import hashlib
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from meshfit.data import tree
from meshfit.data.draw import Key
from meshfit.data.order import order
from meshfit.errors import DataError

if TYPE_CHECKING:
    from meshfit.data.batching import Batching
    from meshfit.data.collate import Collator

STAGES = ("read", "decode", "transform", "transfer")
HASHED = 4 * 2**30  # bytes of a tensor whose values a fingerprint holds: some seconds
HASHED_TOGETHER = 4 * 2**20
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_here = threading.local()


class BadSample(DataError):
    """One sample cannot be used: its name, and why."""


class DifferentShapes(DataError):
    """Samples that are to be one batch differ in shape: ``shapes``, one a sample."""

    def __init__(
        self, what: str, shapes: list[tuple[int, ...]], remedy: str, name_of: Callable[[int], str] | None = None
    ):
        self.given = what, shapes, remedy
        usual = max(shapes, key=shapes.count)
        other = next(i for i, shape in enumerate(shapes) if shape != usual)
        which = "" if name_of is None else f"the latter is {name_of(other)}"
        super().__init__(f"{what}: {usual} and {shapes[other]}", which, remedy)

    def named(self, name_of: Callable[[int], str]) -> "DifferentShapes":
        return DifferentShapes(*self.given, name_of)

    def __reduce__(self) -> Any:
        return DataError, (str(self),)


class BadFile(DataError):
    """A whole file cannot be read: cut short, or damaged."""


class Source(Dataset, ABC):
    """Samples by index. A leaf says what it holds (``__len__``, ``fetch``); the methods make new sources of it.

    It is a torch ``Dataset``: ``source[0]``, ``source[10:20]``, ``random_split`` and a ``DataLoader`` work. What is
    random in a sample is drawn there as in epoch 0 of a training with seed 0.
    """

    waits = False
    """Whether reads wait for somebody else (a network, a server): then they are worth starting early everywhere."""

    blocks: NDArray[np.int64] | None = None
    """Edges of the blocks of samples that are read together, where one costs as much as all: order keeps to a few
    blocks at a time, see order.py."""

    device_stage = False
    """Whether ``finish`` has work to do, on the device."""

    own_code = False
    """Whether reading runs functions of the user's own, which may draw random numbers."""

    collator: "Collator | None" = None
    """What makes a batch of samples, where they are read one by one."""

    batching: "Batching | None" = None
    """Which samples make a batch; None: the next ones, in order."""

    drop_last = False
    """Whether a short last batch of an epoch is left out."""

    note = ""
    """What the user should know of how it was opened."""

    @property
    def global_random(self) -> bool:
        """Whether reading draws from random generators that threads would share: then one at a time may read."""
        return False

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

    def samples(self, ids: NDArray[np.int64], key: Key) -> list[Any]:
        """The same as a list of samples, for who makes batches of another kind."""
        content = self.finish(self.read(ids, key), ids, key)
        return [tree.sample(content, i) for i in range(len(ids))]

    def __getitem__(self, index: Any) -> Any:
        """One sample; of a slice, a list or an array of ids or of booleans, these samples as a source."""
        if not isinstance(index, int | np.integer):
            return self.take(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.samples(np.array([int(index) % len(self)]), Key())[0]

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """What a torch ``DataLoader`` asks for: the samples of a batch in one read."""
        return self.samples(np.asarray(ids, np.int64), Key())

    def few(self, most: int = 16) -> Any:
        """A batch of samples from all over, to try things on."""
        from meshfit.data.chain import expect_one_shape

        if len(self) == 0:
            raise DataError("data= holds no sample")
        expect_one_shape(self)
        ids = spread(len(self), most)
        return handed(self.fetch(ids), lambda i: self.name_of(int(ids[i])))

    def name_of(self, i: int) -> str:
        """Where sample ``i`` is, for people: a file, a row, a key."""
        return f"sample {i}"

    @property
    def fingerprint(self) -> str:
        """Changes when the samples behind the indices do; a checkpoint keeps it."""
        return f"{type(self).__name__} of {len(self)}"

    @property
    def left_out(self) -> list[str]:
        """Rows of a table that could not be converted and were left out, with on_bad="skip", and why."""
        return []

    @property
    def skipped(self) -> list[str]:
        """Bad samples that were met and skipped so far, with on_bad="skip", and why."""
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
        """ "stop" at a sample that cannot be read, or "skip" it, up to a share of ``most``. See chain.py."""
        from meshfit.data.chain import Skipping

        if what not in ("stop", "skip"):
            raise DataError(f"on_bad={what!r} is not understood", 'write "stop" or "skip"')
        return self if what == "stop" else Skipping(self.without_unconverted(most), most)

    def without_unconverted(self, most: float) -> "Source":
        """The same without rows that cannot be converted to a table's columns, up to a share of ``most``."""
        return self

    def mixup(self, alpha: float = 0.2, *, classes: int) -> "Source":
        """Each sample blended with another, its label with the other's. See chain.py."""
        from meshfit.data.chain import Mixup

        return Mixup(self, alpha, classes)

    def take(self, ids: Any) -> "Source":
        """The samples at ``ids`` (a slice, a list, an array; or a mask of booleans), in that order."""
        from meshfit.data.chain import Subset

        if isinstance(ids, slice):
            return Subset(self, np.arange(len(self))[ids])
        found = np.asarray(ids)
        if found.dtype.kind not in "biu" and found.size:
            raise DataError(f"take is given {found.dtype} of shape {found.shape}", "numbers of samples, or booleans")
        if found.dtype == bool and found.shape != (len(self),):
            raise DataError(f"a mask of shape {found.shape} for {len(self)} samples", "give one boolean a sample")
        return Subset(self, np.flatnonzero(found) if found.dtype == bool else found.astype(np.int64))

    def split(self, first: float, seed: int = 0) -> tuple["Source", "Source"]:
        """Two sources without a sample in common: a random share of ``first``, and the rest."""
        if not isinstance(first, int | float) or not 0 <= first <= 1:
            raise DataError(f"split({first!r}) is not a share of the samples", "0.9 for nine of ten, say")
        shuffled = order(len(self), seed=seed, epoch=2**32)[np.arange(len(self))]
        one, rest = np.split(shuffled, [round(first * len(self))])
        return self.take(np.sort(one)), self.take(np.sort(rest))


class DerivedSource(Source):
    """A source made of another: all that it does not do itself, the other does."""

    def __init__(self, source: Source):
        self.source = source
        self.waits, self.blocks = source.waits, source.blocks
        self.device_stage, self.own_code, self.collator = source.device_stage, source.own_code, source.collator
        self.batching, self.drop_last, self.note = source.batching, source.drop_last, source.note

    @property
    def global_random(self) -> bool:
        return self.source.global_random

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return self.finish(self.read(ids, Key()), ids, Key())

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.read(ids, key)

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.finish(content, ids, key)

    def without_unconverted(self, most: float) -> Source:
        mine = copy(self)
        mine.source = self.source.without_unconverted(most)
        return mine

    def name_of(self, i: int) -> str:
        return self.source.name_of(i)

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def left_out(self) -> list[str]:
        return self.source.left_out

    @property
    def skipped(self) -> list[str]:
        return self.source.skipped

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.source.load_state(state)


class Memory(Source):
    """Tensors in memory, nested in tuples and dicts; all of one length."""

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
        return f"tensors: {kinds}, values {hashed(tree.tensors(self.arrays))}"

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        index = torch.from_numpy(np.ascontiguousarray(ids))

        def rows(t: torch.Tensor) -> torch.Tensor:
            if (signed := SIGNED.get(t.dtype)) is not None:  # torch selects none of these
                return rows(t.view(signed)).view(t.dtype)
            return t.index_select(0, index if t.is_cpu else index.to(t.device))

        return tree.map_tensors(rows, self.arrays)


def spread(count: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of ``count`` samples, from all over."""
    most = min(count, most)  # not np.unique: it imports numpy.ma, a quarter of what a rank's start takes
    return np.arange(most, dtype=np.int64) * (count - 1) // max(1, most - 1)


def handed(content: Any, name_of: Callable[[int], str] = "sample {}".format) -> Any:
    """What the model gets: words as lists; images of different sizes make no batch. The i-th sample is called
    ``name_of(i)``."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, tree.Ragged):
            return x
        if x and isinstance(x[0], torch.Tensor):
            remedy = "bring them to one: .map(meshfit.data.transform.resize((224, 224))), say; or .on_bad('skip')"
            shapes = [tuple(one.shape) for one in x]
            raise DifferentShapes("the samples of a batch differ in shape", shapes, remedy, name_of)
        return list(x)

    return tree.map_leaves(leaf, content)


def hashed(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of their values. Of a tensor of more than ``HASHED`` bytes, that many of them are taken, from all over."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.to_dense() if tensor.layout is not torch.strided else tensor if tensor.dim() else tensor[None]
        width = max(1, flat[:1].numel() * flat.element_size())
        rows = max(1, HASHED_TOGETHER // width)
        blocks = -(-len(flat) // rows)
        for block in spread(blocks, max(1, HASHED // (rows * width))).tolist() if blocks else []:
            part = flat[block * rows : (block + 1) * rows].detach().cpu().contiguous()
            found.update(part.flatten().view(torch.uint8).numpy().data if part.numel() else b"")
    return found.hexdigest()


def _as_tensors(arrays: Any) -> Any:
    """``arrays`` with NumPy arrays and lists of numbers as tensors."""
    if isinstance(arrays, np.ndarray):
        if arrays.dtype.kind in "OSU":
            raise DataError(f"an array of {arrays.dtype} holds no numbers")
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


@dataclass
class StageTimer:
    """Seconds by stage, summed over threads, and the seconds waited."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    waited: float = 0.0
    batches: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Stages that this thread enters count here."""
        _here.clock, _here.inner = self, 0.0
        try:
            yield
        finally:
            _here.clock = None

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] += seconds


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count what happens inside as ``name``."""
    clock: StageTimer | None = getattr(_here, "clock", None)
    if clock is None:
        yield
        return
    outer, _here.inner = _here.inner, 0.0
    start = time.perf_counter()
    try:
        yield
    finally:
        whole = time.perf_counter() - start
        clock.add(name, whole - _here.inner)
        _here.inner = outer + whole
