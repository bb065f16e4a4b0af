"""Who reads the batches: whoever trains, threads, or processes. Decided by what it is and a short measurement.

Threads cost nothing and share all memory, and most work on whole batches lets go of Python's lock, as do files,
networks and image decoders. A transform of one sample at a time does not: two threads are no faster than one, and
processes are worth their start. What draws from the process's own generators may not run beside the training, whose
dropout draws from them too: that is read by processes, or by whoever trains.
"""

import contextlib
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from meshfit.data import tree
from meshfit.data.datasets import SampleStream
from meshfit.data.draw import Key
from meshfit.data.seeding import in_reading_thread
from meshfit.data.source import Source, spread
from meshfit.errors import DataError, JobError
from meshfit.launch.system import cores as cores_here
from meshfit.launch.system import starts_processes

if TYPE_CHECKING:
    from meshfit.data.loader import Loader

QUICK = 0.001  # seconds for a batch under which one thread is enough
STEP = 0.005  # seconds: who reads should be able to keep up with steps this short; more would only be in the way
FEW = 8  # samples that are read twice, before the training
LOOKING = 1.0  # seconds after which no more are
WORTH = 1.3  # what two threads must gain over one


@dataclass(frozen=True, slots=True)
class Readers:
    """Who is asked to read; None: by a short measurement."""

    workers: int | None = None
    kind: str | None = None

    @classmethod
    def of(cls, asked: int | str | None) -> "Readers":
        """From 4, 0, "threads", "processes", "4 processes"."""
        if asked is None or (isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0):
            return cls(asked)
        number, _, kind = str(asked).strip().rpartition(" ")
        if kind in ("threads", "processes") and (not number or (number.isdecimal() and int(number))):
            return cls(int(number) if number else None, kind)
        raise JobError(f"workers={asked!r} is not understood", 'write 4, "processes", "4 threads"; 0: read when needed')


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """``workers`` of a ``kind``, and why."""

    kind: str
    """ "inline", "threads" or "processes"."""
    workers: int
    why: str

    def __str__(self) -> str:
        kind = {"threads": "thread", "processes": "process"}.get(self.kind) if self.workers == 1 else self.kind
        who = "where it is trained" if self.kind == "inline" else f"by {self.workers} {kind}"
        return f"data: read {who} ({self.why})"


def decide(loader: "Loader") -> ReaderChoice:
    """Who reads for ``loader``."""
    source, asked, kind = loader.source, loader.workers, loader.kind
    if kind not in (None, "threads", "processes"):
        raise DataError(f"data is to be read by {kind!r}", 'there are "threads" and "processes"')
    far = loader.device.type != "cpu"
    if isinstance(source, SampleStream):
        ahead = far if asked is None else asked > 0
        if ahead and source.draws:
            return ReaderChoice("inline", 0, "a stream that draws random numbers")
        return ReaderChoice("threads", 1, "a stream has one reader") if ahead else ReaderChoice("inline", 0, "a stream")
    if asked == 0 or (asked is None and not far and not source.waits and kind is None):
        return ReaderChoice("inline", 0, "as asked" if asked == 0 else "the processor would only share itself")
    cores = max(1, cores_here() // loader.ranks)
    if kind == "threads" and source.global_random:
        raise DataError(
            "threads cannot read this data: it draws from random generators that they would share",
            'have it read by workers="processes", or write its random part as .map(fn, each=True) with'
            " fn(sample, generator)",
        )
    if kind == "processes" and not starts_processes():
        raise DataError(f'workers="processes": {sys.platform} starts none with open files', 'workers="threads" works')
    if kind is not None:
        return ReaderChoice(kind, asked or cores, "as asked")
    if source.waits and not source.global_random:
        return ReaderChoice("threads", asked or 4, "it waits for others")
    alone, together = _measured(loader)
    workers = asked or min(cores, 8, math.ceil(alone / STEP))
    processes = starts_processes()
    if source.global_random:
        why = "it draws from random generators that threads would share"
        inline = alone < QUICK or not processes
        return ReaderChoice("inline", 0, why) if inline else ReaderChoice("processes", workers, why)
    if alone < QUICK:
        return ReaderChoice("threads", workers, f"a batch takes {alone * 1e3:.1f} ms")
    gain = 2 * alone / together
    why = f"a batch takes {alone * 1e3:.0f} ms, two threads are {gain:.1f} times one"
    one_keeps_up = workers == 1 and asked is None  # nothing to share the lock with but the training
    apart = gain < WORTH and cores > 1 and not one_keeps_up and processes
    return ReaderChoice("processes" if apart else "threads", workers, why)


def check_repeatable(loader: "Loader", reading: ReaderChoice) -> list[str]:
    """Read some samples twice. Values that differ come from a generator that could not be found and seeded: refused
    where several read, who would see different data; else a note."""
    source = loader.source
    many = loader.ranks > 1 or reading.kind != "inline" or (dist.is_initialized() and dist.get_world_size() > 1)
    if isinstance(source, SampleStream):
        if not many:
            return []  # a stream is started twice only where it must be the same
        first, second = [next(source.batches(FEW, Key(loader.seed)), []) for _ in range(2)]
        which = None if tree.same(first, second) else "the beginning of the stream"
    else:
        which = _changing(source, Key(loader.seed)) if source.own_code else None
    if which is None:
        return []
    what = f"{which} of data= or valid= is another each time it is read, with all generators seeded alike"
    remedy = (
        "draw from Python's random, NumPy's or torch's global generators, or from a generator that the data set holds"
        " (self.rng): they are seeded for each sample; not from one made anew for each sample"
    )
    if many:
        raise DataError(what, "ranks and workers would see different data", remedy)
    return [f"{what}: neither a second run nor a resumed one sees the same data; {remedy}"]


def _changing(source: Source, key: Key) -> str | None:
    """The first of some samples that changes; None where none does."""
    ids, start = spread(len(source), FEW), time.perf_counter()
    try:
        for i in ids:
            if not tree.same(*(source.read(np.array([i]), key) for _ in range(2))):
                return source.name_of(int(i))
            if time.perf_counter() - start > LOOKING:
                break
    except Exception:  # a bad sample, or a function that takes no batch of one: training will tell
        with contextlib.suppress(Exception):
            return None if tree.same(*(source.read(ids, key) for _ in range(2))) else "some sample"
    return None


def _measured(loader: "Loader") -> tuple[float, float]:
    """Seconds for a batch, and for two at once in two threads."""
    source = loader.source
    assert not isinstance(source, SampleStream)
    ids = loader.reads(np.arange(min(loader.batch_size, len(source))))

    def read() -> float:
        start = time.perf_counter()
        for part in ids:
            source.read(part, Key())
        return time.perf_counter() - start

    read()
    alone = min(read(), read())
    if alone < QUICK or source.global_random:
        return alone, 2 * alone
    with pool_of(2) as pool:
        alone = min(pool.submit(read).result() for _ in range(3))
        together = min(max(pool.map(lambda _: read(), range(2))) for _ in range(3))
    return alone, together


def pool_of(workers: int) -> ThreadPoolExecutor:
    """Threads to read with. Each runs torch's operations by itself: side by side they would otherwise all start as
    many threads as there are cores."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="meshfit-data", initializer=in_reading_thread)
    threads = torch.get_num_threads()
    if threads > 1:
        together = Barrier(workers)

        def alone(_: int) -> None:
            together.wait()
            torch.get_num_threads()  # takes on the default, once, which later would undo what follows
            torch.set_num_threads(1)  # of this thread, and the default of threads to come

        list(pool.map(alone, range(workers)))
        torch.set_num_threads(threads)
    return pool
