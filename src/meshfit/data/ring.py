"""Processes that read, for transforms that hold Python's lock, over one ring of shared memory.

The ring is made once: a slot a batch in the making, into which a worker writes its tensors; nothing is allocated per
batch, which is what makes other loaders' workers slow. Workers are fresh interpreters, never forks: a fork after a
network library was used can hang. They get the source as ranks get a job: what is large is in memory they share.

A worker that dies or is stuck is named, with the samples it was at. What it raises is raised here.
"""

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.draw import Key
from meshfit.data.source import Source
from meshfit.errors import DataError
from meshfit.launch.system import is_stopped
from meshfit.live import LIVE

AHEAD = 2  # batches a worker has to do, the one in the making included
STUCK = 600.0  # seconds without an answer
LOOK = 0.5  # seconds from look to look
IN_TIME = 0.7  # of the time for which a rank may stand still: then a worker that is stopped is named, and not its rank
Ask = tuple[list[NDArray[np.int64]], Key]
"""The samples of a rank's microbatches."""


class Ring:
    """``workers`` processes and the memory between them and us."""

    def __init__(self, source: Source, workers: int, slot_bytes: int):
        from meshfit.launch.arena import encode
        from meshfit.launch.channel import memory_file

        self.source = source
        self.slots, self.slot_bytes = workers * AHEAD, -(-max(slot_bytes, 4096) // 4096) * 4096
        memory = memory_file()
        os.ftruncate(memory, self.slots * self.slot_bytes)
        self.memory = mmap.mmap(memory, self.slots * self.slot_bytes)
        self.workers: list[tuple[subprocess.Popen, Connection]] = []
        with encode(source, what="data=") as held:
            for _ in range(workers):
                self.workers.append(self._started(held, memory))
        os.close(memory)

    def _started(self, held: Any, memory: int) -> tuple[subprocess.Popen, Connection]:
        mine, theirs = socket.socketpair()
        fds = [theirs.fileno(), memory, *([] if held.arena is None else [held.arena])]
        program = f"from meshfit.data.ring import work; work({fds}, {self.slot_bytes})"
        with _deaf():
            process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=fds, stdin=subprocess.DEVNULL, env=_environment()
            )
        theirs.close()
        link = Connection(mine.detach())
        link.send_bytes(held.inline)
        return process, link

    def batches(self, asks: Iterator[Ask], own: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[Any]]:
        """The contents of each ask's microbatches, in order; ``own`` copies a tensor out of the ring."""
        waiting: deque[tuple[int, int, Ask]] = deque()
        try:
            for number, ask in enumerate(asks):
                worker, slot = number % len(self.workers), number % self.slots
                self._send(worker, (slot, *ask), ask)
                waiting.append((worker, slot, ask))
                if len(waiting) == self.slots:
                    yield self._answer(*waiting.popleft(), own)
            while waiting:
                yield self._answer(*waiting.popleft(), own)
        finally:  # whoever stops in the middle leaves answers on their way
            with contextlib.suppress(Exception):
                while waiting:
                    self._answer(*waiting.popleft(), own)

    def _send(self, worker: int, message: Any, ask: Ask) -> None:
        try:
            self.workers[worker][1].send_bytes(pickle.dumps(message))
        except OSError:
            raise self._dead(worker, ask) from None

    def _answer(self, worker: int, slot: int, ask: Ask, own: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        process, link = self.workers[worker]
        began, outer = time.monotonic(), ""
        while not select.select([link], [], [], LOOK)[0]:
            outer = outer or LIVE.phase(f"data: worker {worker}, process {process.pid}")
            waited = time.monotonic() - began
            if waited > STUCK or (waited > IN_TIME * LIVE.hang and is_stopped(process.pid)):
                how = "is stopped, and" if is_stopped(process.pid) else "lives, and"
                said = f"data worker {worker} (process {process.pid}) {how} has not answered for {waited:.0f} s"
                raise DataError(said, _samples(ask))
        if outer:
            LIVE.phase(outer)
        try:
            kind, what, state = pickle.loads(link.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._dead(worker, ask) from None
        if state:
            self.source.load_state(state)
        if kind == "error":
            raise what
        start = slot * self.slot_bytes
        return [tree.map_leaves(lambda leaf: _out(leaf, self.memory, start, own), content) for content in what]

    def _dead(self, worker: int, ask: Ask) -> DataError:
        process = self.workers[worker][0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        return DataError(
            f"data worker {worker} (process {process.pid}) ended with code {process.returncode}", _samples(ask)
        )

    def close(self) -> None:
        for _, link in self.workers:
            link.close()  # they read an end, and go
        for process, _ in self.workers:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.workers = []
        with contextlib.suppress(BufferError):
            self.memory.close()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """What is started now does not hear signals that a scheduler sends to all processes of a job: its rank answers
    them, and needs data until then. It ends with that rank."""
    names = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in names})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _samples(ask: Ask) -> str:
    ids = [i for part in ask[0] for i in part.tolist()]
    return f"it was at samples {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"


def _environment() -> dict[str, str]:
    """Where this process finds meshfit, its workers do too. One thread each: there are many of them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


class _InRing:
    """A tensor in the ring. No dataclass: those are containers to ``tree``."""

    def __init__(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype):
        self.offset, self.shape, self.dtype = offset, shape, dtype


def _out(leaf: Any, memory: mmap.mmap, start: int, own: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of what is in the ring: its slot is used again."""
    if not isinstance(leaf, _InRing):
        return leaf
    count = int(np.prod(leaf.shape, dtype=np.int64))
    return own(torch.frombuffer(memory, dtype=leaf.dtype, count=count, offset=start + leaf.offset).view(leaf.shape))


def work(fds: list[int], slot_bytes: int) -> None:
    """What a worker does, until whoever started it goes."""
    from meshfit.launch import heap
    from meshfit.launch.arena import decode

    link = Connection(fds[0])
    memory = mmap.mmap(fds[1], 0)
    torch.set_num_threads(1)
    heap.keep()
    source: Source | Exception
    try:
        source = decode(link.recv_bytes(), fds[2] if len(fds) > 2 else None)
    except Exception as error:
        source = DataError("a data worker could not take over the data", repr(error))
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            slot, parts, key = pickle.loads(link.recv_bytes())
            try:
                if isinstance(source, Exception):
                    raise source
                contents = [source.read(ids, key) for ids in parts]
                answer = ("batch", _in(contents, memory, slot * slot_bytes, slot_bytes), source.state())
            except Exception as error:
                answer = ("error", _sendable(error), {})
            link.send_bytes(pickle.dumps(answer))


def _in(contents: list[Any], memory: mmap.mmap, start: int, most: int) -> list[Any]:
    """``contents`` with its tensors in the ring; those for which there is no room travel with the message."""
    used = 0

    def move(leaf: Any) -> Any:
        nonlocal used
        if isinstance(leaf, tree.Ragged):
            return tree.Ragged(bytes(item) if isinstance(item, memoryview) else item for item in leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        size = leaf.numel() * leaf.element_size()
        if used + size > most or not size:
            return leaf
        at, used = used, used + -(-size // 64) * 64
        room = torch.frombuffer(memory, dtype=leaf.dtype, count=leaf.numel(), offset=start + at)
        room.view(leaf.shape).copy_(leaf)
        return _InRing(at, tuple(leaf.shape), leaf.dtype)

    return [tree.map_leaves(move, content) for content in contents]


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DataError(f"a data worker failed: {type(error).__name__}", str(error)[:500])
    return error
