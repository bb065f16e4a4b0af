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
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from meshfit.data import tree
from meshfit.data.datasets import SampleStream
from meshfit.data.draw import Key
from meshfit.data.order import Ids, share
from meshfit.data.reading import ReaderChoice, check_repeatable, decide, pool_of
from meshfit.data.ring import Ring
from meshfit.data.source import Source, StageTimer, handed, stage
from meshfit.errors import DataError

Job = tuple[Key, int, NDArray[np.int64], bool]


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


@dataclass(slots=True)
class Position:
    """``now(step)`` is (epoch, batch). A batch counts once its step is taken: one that was dropped comes again."""

    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    step: int = -1
    """Steps that were taken when the last batch was handed out."""

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

    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batches_per_epoch(self) -> int | None:
        """None for a stream, whose end is not known before it comes."""
        return None if isinstance(self.source, SampleStream) else -(-len(self.source) // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch ``start`` on, each on the device when it is handed over."""
        how = self.reading
        if isinstance(self.source, SampleStream):
            batches = islice(self._stream(epoch), start, None)
            made: Iterator[Callable[[], Batch | None]] = repeat(lambda: self._pinned(next(batches, None)))
        elif how.kind == "processes":
            ready = self._from_ring(self.source, epoch, start)
            made = repeat(lambda: next(ready, None))
        else:
            made = (partial(self._made, self.source, *job) for job in self._jobs(self.source, epoch, start))
        if how.kind == "threads":
            host = self._threads(made, how.workers)
        elif how.kind == "processes" and self.device.type != "cpu":
            host = self._threads(made, 1)  # takes batches out of the ring while the device works
        else:
            host = _each(made)
        return self._waited_for(host if self.device.type == "cpu" else self._moved(host))

    @property
    def reading(self) -> ReaderChoice:
        """Who reads: decided once."""
        if "reading" not in self._kept:
            self._kept["reading"] = reading = decide(self)
            self._kept["notes"] = [str(reading)] * (reading.kind != "inline") + check_repeatable(self, reading)
        return self._kept["reading"]

    @property
    def notes(self) -> list[str]:
        """What the user should know of the data and who reads it."""
        assert self.reading
        out = [] if isinstance(self.source, SampleStream) else self.source.left_out
        left = f"data: {len(out)} rows could not be converted and were left out: {out[0]}, ..." if out else ""
        return [*self._kept["notes"], *filter(None, [left])]

    def close(self) -> None:
        """End the processes that read, if there are."""
        if (ring := getattr(self, "_kept", {}).pop("ring", None)) is not None:
            ring.close()

    def __del__(self) -> None:
        self.close()

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """What resumes at ``batch`` of ``epoch``, on any number of ranks and workers; the same on every rank, but for
        the bad samples it has met."""
        source = self.source
        place = {"seed": self.seed, "shuffle": self.shuffle, "epoch": epoch, "consumed": batch * self.batch_size}
        if isinstance(source, SampleStream):
            return place
        return {**place, "samples": len(source), "fingerprint": self._fingerprint, "source": source.state()}

    @property
    def _fingerprint(self) -> str:
        """Found once: it may take some seconds."""
        assert not isinstance(self.source, SampleStream)
        if "fingerprint" not in self._kept:
            self._kept["fingerprint"] = self.source.fingerprint
        return self._kept["fingerprint"]

    def resume(self, state: dict[str, Any]) -> tuple[int, int]:
        """(epoch, batch) to go on from; refused where the samples would not be the same."""
        source = self.source
        now = {"seed": self.seed, "shuffle": self.shuffle}
        if not isinstance(source, SampleStream):
            now |= {"samples": len(source), "fingerprint": self._fingerprint}
        for name, value in now.items():
            if name in state and state[name] != value:
                raise DataError(
                    "the data is not that of the run to be resumed",
                    f"{name} was {state[name]}",
                    f"now it is {value}",
                )
        batch, left = divmod(state["consumed"], self.batch_size)
        if left:
            raise DataError(
                f"the run stopped after {state['consumed']} samples of an epoch",
                f"that is no whole number of batches of {self.batch_size}",
                "resume with the batch_size it had",
            )
        if not isinstance(source, SampleStream):
            source.load_state(state.get("source", {}))
        return state["epoch"], batch

    def _jobs(self, source: Source, epoch: int, start: int) -> Iterator[Job]:
        """Key, position, samples of all ranks, and whether it is the last, of every batch."""
        ids_of = Ids(len(source), self.batch_size, seed=self.seed, shuffle=self.shuffle, blocks=source.blocks)
        for index in range(start, ids_of.batches):
            yield Key(self.seed, epoch), index, ids_of(epoch, index), index == ids_of.batches - 1

    def mine(self, ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """What this rank reads of a batch, by microbatches; where it has no share, a stand-in."""
        parts = [ids[at] for at in self._shares(len(ids))]
        return [part if len(part) else ids[[0, 0]] for part in parts]

    def _made(self, source: Source, key: Key, index: int, ids: NDArray[np.int64], last: bool) -> Batch:
        with self.clock.reading(), stage("read"):
            contents = [source.read(part, key) for part in self.mine(ids)]
            if self.device.type == "cuda":
                with stage("transfer"):
                    contents = tree.map_tensors(lambda t: t.pin_memory(), contents)
            return self._batch(source, contents, key, index, ids, last)

    def _batch(
        self, source: Source, contents: list[Any], key: Key, index: int, ids: NDArray[np.int64], last: bool
    ) -> Batch:
        if self.device.type == "cpu":
            both = zip(contents, self.mine(ids), strict=True)
            contents = [handed(source.finish(content, part, key)) for content, part in both]
        counts = [at.stop - at.start for at in self._shares(len(ids))]
        return Batch(key.epoch, index, ids, last, [Microbatch(*part) for part in zip(contents, counts, strict=True)])

    def _from_ring(self, source: Source, epoch: int, start: int) -> Iterator[Batch]:
        """Batches that processes read."""
        if "ring" not in self._kept:
            first = source.read(self.mine(np.arange(min(self.batch_size, len(source))))[0], Key())
            size = sum(t.numel() * t.element_size() + 64 for t in tree.tensors(first))
            self._kept["ring"] = Ring(source, self.reading.workers, (size + size // 8) * self.microbatches)
        jobs: deque[Job] = deque()

        def asks() -> Iterator[Any]:
            for job in self._jobs(source, epoch, start):
                jobs.append(job)
                yield self.mine(job[2]), job[0]

        own = (lambda t: t.pin_memory()) if self.device.type == "cuda" else torch.clone
        for contents in self._kept["ring"].batches(asks(), own):
            yield self._batch(source, contents, *jobs.popleft())

    def _stream(self, epoch: int) -> Iterator[Batch]:
        assert isinstance(self.source, SampleStream)
        batches = self.source.batches(self.batch_size, Key(self.seed, epoch))
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

    def _pinned(self, batch: Batch | None) -> Batch | None:
        if batch is None or self.device.type != "cuda":
            return batch
        pin = lambda content: tree.map_tensors(lambda t: t.pin_memory(), content)
        return replace(batch, microbatches=[replace(part, content=pin(part.content)) for part in batch.microbatches])

    def _shares(self, size: int) -> list[slice]:
        return shares(size, self.rank, self.ranks, self.microbatches)

    def _threads(self, made: Iterator[Callable[[], Batch | None]], workers: int) -> Iterator[Batch]:
        """Batches in order, a few of them in the making."""
        pool = pool_of(workers)
        try:
            coming = deque(pool.submit(make) for make in islice(made, workers + 1))
            while coming and (batch := coming.popleft().result()) is not None:
                coming.extend(pool.submit(make) for make in islice(made, 1))
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
                    moved = self._sent(batch)
                sent = moved, side.record_event() if side is not None else None
            if held is not None:
                yield self._received(*held)
            held = sent

    def _sent(self, batch: Batch) -> Batch:
        parts = []
        for ids, part in zip(self.mine(batch.ids), batch.microbatches, strict=True):
            content = tree.to_device(part.content, self.device)
            if not isinstance(self.source, SampleStream):
                content = self.source.finish(content, ids, Key(self.seed, batch.epoch))
            parts.append(replace(part, content=handed(content)))
        return replace(batch, microbatches=parts)

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


def _each(made: Iterator[Callable[[], Batch | None]]) -> Iterator[Batch]:
    for make in made:
        if (batch := make()) is None:
            return
        yield batch


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
