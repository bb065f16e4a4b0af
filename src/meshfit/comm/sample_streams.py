"""Streams of samples, read by each rank for itself: whether all of them got the same batches, and ended together.

Of data with a length every rank knows the order of all samples, and so what each has: nothing need be said. A stream
has an end that nobody knows before it comes. Where ranks read different ones (files that one does not see, one that
divides itself by rank) the batch would be put together wrongly, or one rank would run dry while others wait for it. So
they compare how many samples a batch has, and 31 bits of its first and last.

    traffic   8 bytes a rank and batch, in host memory, before the batch is used; data with a length: none
    waits     for ranks that take each step together: for all of them, at each batch. With local steps, which ranks take
              by themselves: for what was said as many batches ago as they average after, and before they meet
"""

from collections import deque
from collections.abc import Callable, Iterator

from torch.distributed import ProcessGroup

from meshfit.data.datasets import SampleStream
from meshfit.data.loader import Batch, Loader
from meshfit.errors import DataError
from meshfit.torch_private.groups import gather_number

ENDED = -1


class SampleStreams:
    """Batches of one rank, compared with those of the others of ``group``; up to ``ahead`` of them later."""

    def __init__(self, group: ProcessGroup | None, ahead: int = 0):
        self.group, self.ahead = group, ahead
        self._said = deque[tuple[int, Callable[[], list[int]]]]()

    def in_agreement(self, loader: Loader, batches: Iterator[Batch]) -> Iterator[Batch]:
        """``batches`` of ``loader``; an error on all ranks where those of a stream differ."""
        if self.group is None or not isinstance(loader.source, SampleStream):
            return batches
        return self._compared(batches, self.group)

    def _compared(self, batches: Iterator[Batch], group: ProcessGroup) -> Iterator[Batch]:
        index = 0
        while True:
            batch = next(batches, None)
            said = ENDED if batch is None else _word(batch)
            self._said.append((index, gather_number(group, said)))
            self.settle(0 if batch is None else self.ahead)
            if batch is None:
                return
            yield batch
            index += 1

    def settle(self, ahead: int = 0) -> None:
        """Hear what all have said, but for the last ``ahead`` batches. One that has ended says no more, so the first
        difference is the one to tell of."""
        while len(self._said) > ahead:
            index, heard = self._said.popleft()
            if len(set(said := heard())) > 1:
                raise DataError(
                    f"ranks read different streams: in batch {index} {_told(said)}",
                    "each rank reads all of the stream, and keeps its share: it must be the same in all of them",
                    "leave the dividing by rank to meshfit, and look for files that one host does not see",
                )


def _word(batch: Batch) -> int:
    """Of one batch: after its last a rank may evaluate."""
    return (batch.digest << 32) + 2 * batch.size + batch.last


def _told(said: list[int]) -> str:
    sizes = [n if n == ENDED else n % 2**32 for n in said]
    if len(set(sizes)) == 1:
        return "each has samples of its own"
    words = ["none" if n == ENDED else f"{n // 2} samples{' (its last)' * (n % 2)}" for n in sizes]
    return ", ".join(f"rank {rank} {each}" for rank, each in enumerate(words))
