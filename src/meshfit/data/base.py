"""What every source of samples can do, and what a source made of another does."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.draw import Key
from meshfit.errors import DataError


class Source(ABC):
    """Samples by index. A leaf says what it holds (``__len__``, ``fetch``); the methods make new sources of it."""

    waits = False
    """Whether reads wait for somebody else (a network, a server): then they are worth starting early everywhere."""

    blocks: NDArray[np.int64] | None = None
    """Edges of the blocks of samples that are read together, where one costs as much as all: order keeps to a few
    blocks at a time, see order.py."""

    device_stage = False
    """Whether ``finish`` has work to do, on the device."""

    own_code = False
    """Whether reading runs functions of the user's own, which may draw random numbers."""

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

    def few(self, most: int = 16) -> Any:
        """A batch of samples from all over, to try things on."""
        if len(self) == 0:
            raise DataError("data= holds no sample")
        return handed(self.fetch(spread(len(self), most)))

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
        self.device_stage, self.own_code = source.device_stage, source.own_code

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


def spread(count: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of ``count`` samples, from all over."""
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))


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
