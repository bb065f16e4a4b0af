"""This rank's share of every global batch, on its device, in time.

The batch is global: ``batch_size`` samples over all devices. It is cut into microbatches,
each of them over the ranks; shares may differ by one sample. Where a share has none, the rank runs the
first sample of the batch with weight zero, so that every rank takes part in the same collectives.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from meshfit.data import tree
from meshfit.data.order import Ids, share
from meshfit.data.source import Source, Stream


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples that go through the model together."""

    content: Any
    samples: int
    """How many count. 0: a stand-in whose loss weighs nothing."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimizer step's samples: which they are on all ranks, and this rank's microbatches."""

    epoch: int
    index: int
    """Position in the epoch."""
    ids: NDArray[np.int64]
    """The samples of all ranks, in order."""
    last: bool
    """Whether the epoch ends with this batch."""
    microbatches: list[Microbatch]

    @property
    def size(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of ``source`` for one of ``ranks`` data-parallel ranks."""

    source: Source | Stream
    batch_size: int
    rank: int
    ranks: int
    device: torch.device
    microbatches: int = 1
    seed: int = 0
    shuffle: bool = True

    @property
    def batches_per_epoch(self) -> int | None:
        """None for a stream, whose end is not known before it comes."""
        return None if isinstance(self.source, Stream) else -(-len(self.source) // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch ``start`` on, each on the device when it is handed over."""
        made = self._stream(epoch) if isinstance(self.source, Stream) else self._indexed(self.source, epoch, start)
        if self.device.type == "cpu":
            return made
        return self._ahead(made)

    def _indexed(self, source: Source, epoch: int, start: int) -> Iterator[Batch]:
        ids_of = Ids(len(source), self.batch_size, seed=self.seed, shuffle=self.shuffle)
        for index in range(start, ids_of.batches):
            ids = ids_of(epoch, index)
            parts = []
            for at in self._shares(len(ids)):
                mine = ids[at]
                parts.append(Microbatch(source.fetch(mine if len(mine) else ids[[0, 0]]), len(mine)))
            yield Batch(epoch, index, ids, index == ids_of.batches - 1, parts)

    def _stream(self, epoch: int) -> Iterator[Batch]:
        assert isinstance(self.source, Stream)
        batches = self.source.batches(self.batch_size)
        seen = 0
        held = next(batches, None)
        for index, following in enumerate(chain(batches, [None])):
            if held is None:
                return
            parts = []
            for at in self._shares(len(held)):
                mine = held[at]
                parts.append(Microbatch(default_collate(mine or [held[0], held[0]]), len(mine)))
            yield Batch(epoch, index, np.arange(seen, seen + len(held)), following is None, parts)
            seen += len(held)
            held = following

    def _shares(self, size: int) -> list[slice]:
        return shares(size, self.rank, self.ranks, self.microbatches)

    def _ahead(self, made: Iterator[Batch]) -> Iterator[Batch]:
        """Read the next batch, and start its copy to the device, while this one is worked on."""

        def read() -> Batch | None:
            batch = next(made, None)
            return None if batch is None else self._map(batch, lambda t: t.pin_memory())

        with ThreadPoolExecutor(1, thread_name_prefix="meshfit-data") as reader:
            coming = [reader.submit(read), reader.submit(read)]
            while (batch := coming.pop(0).result()) is not None:
                coming.append(reader.submit(read))
                yield self._map(batch, lambda t: t.to(self.device, non_blocking=True))

    @staticmethod
    def _map(batch: Batch, fn: Any) -> Batch:
        parts = [Microbatch(tree.map_tensors(fn, part.content), part.samples) for part in batch.microbatches]
        return Batch(batch.epoch, batch.index, batch.ids, batch.last, parts)


def shares(size: int, rank: int, ranks: int, microbatches: int) -> list[slice]:
    """Where in a batch of ``size`` a rank's microbatches lie.

    The batch is cut into microbatches first and each of them over the ranks, so that all ranks' i-th microbatches
    together are the i-th microbatch of one device: BatchNorm sees the same samples together under every plan.
    """
    found = []
    for i in range(min(microbatches, size)):  # a batch of two in three parts is two parts
        whole = share(size, i, min(microbatches, size))
        mine = share(whole.stop - whole.start, rank, ranks)
        found.append(slice(whole.start + mine.start, whole.start + mine.stop))
    return found
