"""Streams, read by each rank for itself: whether all of them got batches of one size, and ended together.

Of data with a length every rank knows the order of all samples, and so what each has: nothing need be said. A stream
has an end that nobody knows before it comes. Where ranks read different ones (files that one does not see, an ``if`` by
rank) the batch would be put together wrongly, or one rank would run dry while others wait for it.

    traffic   8 bytes a rank and batch, in host memory, before the batch is used; data with a length: none
"""

from collections.abc import Iterator

from torch.distributed import ProcessGroup

from meshfit.data.datasets import SampleStream
from meshfit.data.loader import Batch, Loader
from meshfit.errors import DataError
from meshfit.torch_private.groups import told

ENDED = -1


def in_agreement(loader: Loader, batches: Iterator[Batch], group: ProcessGroup | None) -> Iterator[Batch]:
    """``batches`` of ``loader``; an error on all ranks where those of a stream differ."""
    return batches if group is None or not isinstance(loader.source, SampleStream) else _compared(batches, group)


def _compared(batches: Iterator[Batch], group: ProcessGroup) -> Iterator[Batch]:
    index = 0
    while True:
        batch = next(batches, None)
        said = told(group, ENDED if batch is None else batch.size)
        if len(set(said)) > 1:
            sizes = ", ".join(f"rank {i} {'none' if n == ENDED else f'{n} samples'}" for i, n in enumerate(said))
            raise DataError(
                f"ranks read different streams: in batch {index} {sizes}",
                "each rank reads all of the stream, and keeps its share: it must be the same in all of them",
                "leave the dividing by rank to meshfit, and look for files that one host does not see",
            )
        if batch is None:
            return
        yield batch
        index += 1
