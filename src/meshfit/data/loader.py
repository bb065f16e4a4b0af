"""This rank's share of every global batch, on its device, in time.

The batch is global: ``batch_size`` samples over all devices. It is cut into microbatches,
each of them over the ranks; shares may differ by one sample. Where a share has none, the rank runs the
first sample of the batch with weight zero, so that every rank takes part in the same collectives.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.batching import ListedBatches
from meshfit.data.chain import expect_one_shape
from meshfit.data.collate import TRIED
from meshfit.data.datasets import SampleStream
from meshfit.data.draw import Key
from meshfit.data.order import Ids, share
from meshfit.data.reading import ReaderChoice, check_repeatable, decide, pool_of
from meshfit.data.ring import Ring
from meshfit.data.source import Source, StageTimer, handed, spread, stage
from meshfit.errors import DataError


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
    digest: int = 0
    """Of a stream: 31 bits of what its first and last samples are."""

    @property
    def size(self) -> int:
        return len(self.ids)

    def copied(self) -> "Batch":
        """For a forward more: a model may write to its inputs."""
        parts = [replace(part, content=tree.map_tensors(torch.clone, part.content)) for part in self.microbatches]
        return replace(self, microbatches=parts)


@dataclass(slots=True)
class Position:
    """``now(step)`` is (epoch, batch). A batch counts once its step is taken: one that was dropped comes again."""

    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    step: int = -1
    """Steps that were taken when the last batch was handed out."""
    ahead: tuple[int, ...] = ()
    """Of asynchronous workers: the samples of a batch of their own, then the numbers of such batches after this place
    whose gradients are applied."""

    def now(self, step: int) -> tuple[int, int]:
        return self.after if step > self.step else self.before

    def hand_out(self, batch: Batch, step: int) -> None:
        self.before, self.step = (batch.epoch, batch.index), step
        self.after = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of ``source`` for one of ``ranks`` data-parallel ranks."""

    source: Source | SampleStream
    batch_size: int
    rank: int
    ranks: int
    device: torch.device
    microbatches: int = 1
    seed: int = 0
    shuffle: bool = True

    workers: int | None = None
    """Who reads ahead; 0 reads when asked. By default some on accelerators and for what is far away."""

    kind: str | None = None
    """Whether these are "threads" or "processes"; by default told by a short measurement, see reading.py."""

    clock: StageTimer = field(default_factory=StageTimer)
    """Where the time went; of processes, only the waiting."""

    def __post_init__(self) -> None:
        source, shared = self.source, self.ranks * self.microbatches > 1
        if isinstance(source, SampleStream):
            source.prepare(shared=shared)
            return
        expect_one_shape(source)
        if source.collator is not None:
            some = spread(len(source), TRIED)
            source.collator.prepare(lambda ids: source.read(ids, Key()), some, shared=shared)

    @cached_property
    def order(self) -> Ids | ListedBatches:
        """Which samples each batch holds."""
        source = self.source
        assert isinstance(source, Source)
        how: dict[str, Any] = {"seed": self.seed, "shuffle": self.shuffle, "drop_last": source.drop_last}
        if source.batching is not None:
            return ListedBatches(source.batching, self.batch_size, **how)
        return Ids(len(source), self.batch_size, blocks=source.blocks, **how)

    @property
    def batches_per_epoch(self) -> int | None:
        """None for a stream, whose end is not known before it comes. Of the first epoch, where others have more."""
        return None if isinstance(self.source, SampleStream) else self.order.count(0)

    def batches_until(self, epochs: float) -> float | None:
        """Of so many epochs; None for a stream."""
        if isinstance(self.source, SampleStream):
            return None
        if isinstance(self.order, Ids):
            return epochs * self.order.batches
        whole = int(epochs)
        rest = 0.0 if whole == epochs else (epochs - whole) * self.order.count(whole)
        return sum(map(self.order.count, range(whole))) + rest

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch ``start`` on, each on the device when it is handed over."""
        source, kind, cpu = self.source, self.reading.kind, self.device.type == "cpu"
        if isinstance(source, SampleStream) or kind == "processes":
            if isinstance(source, SampleStream):
                host = islice(self._stream(source, epoch), start, None)
            else:
                host = self._from_ring(source, epoch, start)
            if kind == "threads" or (kind == "processes" and not cpu):  # a thread takes them while the device works
                host = self._ahead(repeat(partial(next, host, None)), 1)
        else:
            reads = (partial(self._read, source, batch) for batch in self._planned(source, epoch, start))
            host = self._ahead(reads, self.reading.workers) if kind == "threads" else (read() for read in reads)
        return self._waited_for(host if cpu else self._moved(host))

    @cached_property
    def _decided(self) -> tuple[ReaderChoice, list[str]]:
        reading = decide(self)
        return reading, [str(reading)] * (reading.kind != "inline") + check_repeatable(self, reading)

    @property
    def reading(self) -> ReaderChoice:
        """Who reads: decided once."""
        return self._decided[0]

    @property
    def skipped(self) -> list[str]:
        """Bad samples that this rank has met and skipped, and why."""
        return list(self.source.skipped)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the data and who reads it."""
        out = self.source.left_out
        many = "1 row or file" if len(out) == 1 else f"{len(out)} rows or files"
        left = f"data: {many} could not be read, and left out: {'; '.join(out[:3])}" if out else ""
        collated = "" if self.source.collator is None else self.source.collator.note
        return [*self._decided[1], *filter(None, [self.source.note, left, collated])]

    @cached_property
    def _ring(self) -> Ring:
        """The processes that read."""
        assert isinstance(self.source, Source)
        reads = self.reads(np.arange(min(self.batch_size, len(self.source))))
        size = sum(t.numel() * t.element_size() + 64 for t in tree.tensors(self.source.read(reads[0], Key())))
        return Ring(self.source, self.reading.workers, (size + size // 8) * len(reads))

    def close(self) -> None:
        """End the processes that read, if there are."""
        if (ring := vars(self).pop("_ring", None)) is not None:
            ring.close()

    def __del__(self) -> None:
        self.close()

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """What resumes at ``batch`` of ``epoch``, on any number of ranks and workers; the same on every rank, but for
        the bad samples it has met."""
        source = self.source
        place = {"seed": self.seed, "shuffle": self.shuffle, "epoch": epoch}
        if isinstance(source, SampleStream):
            return {**place, "consumed": batch * self.batch_size}
        place |= {"consumed": self.order.before(epoch, batch), "batching": self.order.name}
        return {**place, "samples": len(source), "fingerprint": self._fingerprint, "source": source.state()}

    @cached_property
    def _fingerprint(self) -> str:
        """Found once: it may take some seconds."""
        assert isinstance(self.source, Source)
        return self.source.fingerprint

    def resume(self, state: dict[str, Any]) -> tuple[int, int]:
        """(epoch, batch) to go on from; refused where the samples would not be the same."""
        source = self.source
        now = {"seed": self.seed, "shuffle": self.shuffle}
        if not isinstance(source, SampleStream):
            now |= {"samples": len(source), "fingerprint": self._fingerprint, "batching": self.order.name}
        for name, value in now.items():
            if name in state and state[name] != value:
                raise DataError(
                    "the data is not that of the run to be resumed",
                    f"{name} was {state[name]}",
                    f"now it is {value}",
                )
        if isinstance(source, SampleStream):
            ids = Ids(0, self.batch_size, seed=self.seed, shuffle=False)
            return state["epoch"], ids.at(state["epoch"], state["consumed"])
        source.load_state(state.get("source", {}))
        return state["epoch"], self.order.at(state["epoch"], state["consumed"])

    def _planned(self, source: Source, epoch: int, start: int) -> Iterator[Batch]:
        """Which samples each batch holds; nothing is read yet."""
        count = self.order.count(epoch)
        for index in range(start, count):
            yield Batch(epoch, index, self.order(epoch, index), index == count - 1, [])

    def mine(self, ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """What this rank reads of a batch, by microbatches; where it has no share, a stand-in."""
        parts = [ids[at] for at in self._shares(len(ids))]
        return [part if len(part) else ids[[0, 0]] for part in parts]

    def reads(self, ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """What this rank reads of a batch at a time: its microbatches; or all, where it is collated as a whole."""
        return [ids] if self._whole else self.mine(ids)

    @property
    def _whole(self) -> bool:
        collator = self.source.collator
        return collator is not None and collator.whole and self.ranks * self.microbatches > 1

    def _cut(self, content: Any, size: int) -> list[Any]:
        """This rank's microbatches of a whole batch."""
        assert self.source.collator is not None
        rows = [at if at.stop > at.start else [0, 0] for at in self._shares(size)]
        return [self.source.collator.cut(content, at) for at in rows]

    def _read(self, source: Source, batch: Batch) -> Batch:
        with self.clock.reading(), stage("read"):
            contents = [source.read(part, Key(self.seed, batch.epoch)) for part in self.reads(batch.ids)]
            return self._filled(batch, self._pinned(contents))

    def _filled(self, batch: Batch, contents: list[Any]) -> Batch:
        counts = [at.stop - at.start for at in self._shares(len(batch.ids))]
        if self._whole:
            contents = self._cut(contents[0], len(batch.ids))
        elif (collator := self.source.collator) is not None and collator.shared:
            for content, count in zip(contents, counts, strict=True):
                collator.check(content, count or 2)
        filled = replace(batch, microbatches=[Microbatch(*part) for part in zip(contents, counts, strict=True)])
        return self._finished(filled) if self.device.type == "cpu" else filled

    def _finished(self, batch: Batch) -> Batch:
        """``batch`` on the device, with what its source has left to do done there."""
        parts = []
        for ids, part in zip(self.mine(batch.ids), batch.microbatches, strict=True):
            content = tree.to_device(part.content, self.device)
            content = self.source.finish(content, ids, Key(self.seed, batch.epoch))
            name_of = lambda i, ids=ids: self.source.name_of(int(ids[i]))
            parts.append(replace(part, content=handed(content, name_of)))
        return replace(batch, microbatches=parts)

    def _pinned(self, content: Any) -> Any:
        if self.device.type != "cuda":
            return content
        with stage("transfer"):
            return tree.map_tensors(lambda t: t.pin_memory(), content)

    def _from_ring(self, source: Source, epoch: int, start: int) -> Iterator[Batch]:
        """Batches that processes read."""
        asked: deque[Batch] = deque()

        def asks() -> Iterator[Any]:
            for batch in self._planned(source, epoch, start):
                asked.append(batch)
                yield self.reads(batch.ids), Key(self.seed, epoch)

        own = (lambda t: t.pin_memory()) if self.device.type == "cuda" else torch.clone
        for contents in self._ring.batches(asks(), own):
            yield self._filled(asked.popleft(), contents)

    def _stream(self, source: SampleStream, epoch: int) -> Iterator[Batch]:
        batches = source.batches(self.batch_size, Key(self.seed, epoch))
        seen = 0
        held = next(batches, None)
        for index, following in enumerate(chain(batches, [None])):
            if held is None:
                return
            ids = np.arange(seen, seen + len(held))
            batch = Batch(epoch, index, ids, following is None, [], tree.digest([held[0], held[-1]]))
            cuts = [slice(None)] if self._whole else self._shares(len(held))
            samples = [held[at] or [held[0], held[0]] for at in cuts]
            contents = [source.collator(some, ids, Key(self.seed, epoch)) for some in samples]
            yield self._filled(batch, self._pinned(contents))
            seen += len(held)
            held = following

    def _shares(self, size: int) -> list[slice]:
        return shares(size, self.rank, self.ranks, self.microbatches)

    def _ahead(self, reads: Iterator[Callable[[], Batch | None]], workers: int) -> Iterator[Batch]:
        """Batches in order, a few of them read ahead by threads."""
        pool = pool_of(workers)
        try:
            coming = deque(pool.submit(read) for read in islice(reads, workers + 1))
            while coming and (batch := coming.popleft().result()) is not None:
                coming.extend(pool.submit(read) for read in islice(reads, 1))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _moved(self, host: Iterator[Batch]) -> Iterator[Batch]:
        """On the device, copied while the batch before it is worked on; what is left to do is done there."""
        cuda = self.device.type == "cuda"
        side = torch.cuda.Stream(self.device) if cuda else None
        held: tuple[Batch, Any] | None = None
        for batch in chain(host, [None]):
            sent = None
            if batch is not None:
                with torch.cuda.stream(side) if side is not None else nullcontext():
                    moved = self._finished(batch)
                sent = moved, side.record_event() if side is not None else None
            if held is not None:
                yield self._received(*held)
            held = sent

    def _received(self, batch: Batch, event: Any) -> Batch:
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for part in batch.microbatches:
                for tensor in tree.tensors(part.content):
                    tensor.record_stream(current)
        return batch

    def _waited_for(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.clock.waited += time.perf_counter() - start
            if batch is None:
                return
            self.clock.batches += 1
            yield batch


def shares(size: int, rank: int, ranks: int, microbatches: int) -> list[slice]:
    """Where in a batch of ``size`` a rank's microbatches are.

    The batch is cut into microbatches first and each of them over the ranks, so that all ranks' i-th microbatches
    together are the i-th microbatch of one device: BatchNorm sees the same samples together under every plan.
    """
    found = []
    for i in range(min(microbatches, size)):  # a batch of two in three parts is two parts
        whole = share(size, i, min(microbatches, size))
        mine = share(whole.stop - whole.start, rank, ranks)
        found.append(slice(whole.start + mine.start, whole.start + mine.stop))
    return found
