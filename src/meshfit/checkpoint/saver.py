"""Saving a run as it goes: training waits for a copy to host memory, the rest happens in a thread.

    saver = Saver("runs/a/checkpoints", every="10 minutes", keep=3)
    saver.begin(run)                     # the lock, and whether there is room: before the first step
    for step in train(run):
        saver.after(run)                 # saves if it is time; raises what went wrong with the save before
    saver.close()                        # waits for the last one

All ranks call these together. A save that is still under way when the next one is due is waited for. What is said to be
saved is on disk: ``newest`` names it once the manifest is synced, and not before.
"""

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshfit.anatomy.probe_optimizer import state_bytes
from meshfit.checkpoint import manifest
from meshfit.checkpoint.cadence import Cadence, Due
from meshfit.checkpoint.files import Files, open_files, refused
from meshfit.checkpoint.keep import Keep, prune, sweep
from meshfit.checkpoint.lock import Lock
from meshfit.checkpoint.pieces import layout_of
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.state import common_facts, items_of, own_facts
from meshfit.checkpoint.write import RankSave, assign, copied, describe
from meshfit.errors import CheckpointError
from meshfit.units import size

if TYPE_CHECKING:
    from meshfit.run import Run


class Saver:
    """Writes checkpoints of one run into one folder."""

    def __init__(
        self,
        folder: Files | Path | str,
        *,
        every: Any = None,
        keep: int = 2,
        keep_best: str | None = None,
        block: int = manifest.BLOCK,
        before: Callable[[], None] = lambda: None,
        damaged: Collection[str] = (),
    ):
        """``every``: see ``Cadence.of``. ``keep``: complete checkpoints that stay, the oldest go. ``keep_best``: a
        metric by which the best one stays, too, and a new best is saved at once. ``before``: called before each
        checkpoint is written, for what must be known once there is one. ``damaged``: checkpoints that could not be
        loaded, although they are complete."""
        self.files, self.cadence = open_files(folder), Cadence.of(every)
        self.keep, self.block = Keep(newest=keep, best=keep_best), block
        self.before, self.damaged = before, damaged
        self.newest: str | None = None
        """The last checkpoint that this run wrote and that is on disk; known to the first rank."""
        self.seconds: dict[str, float] = {}
        """Of the last save: blocked, of that copy; write, complete."""
        self._lock: Lock | None = None
        self._host: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._written, self._ended = Future[None](), threading.Event()
        """Of the save under way: this rank's part, and all that the thread has to do."""
        self._error: BaseException | None = None
        self._failed = True  # saves before this run's may have: what they left is in the way
        self._assigned: tuple[list[bytes], list[list[int]]] | None = None
        self._ranks: Ranks | None = None
        self._due: Due | None = None
        self._best: float | None = None  # of those on disk; the first rank's

    @property
    def ranks(self) -> Ranks:
        """Known from ``begin`` on."""
        assert self._ranks is not None
        return self._ranks

    def begin(self, run: "Run") -> None:
        """Take the folder: refused, on all ranks, if another run has it, or it cannot be written, or is too full."""
        if self._ranks is not None:
            return
        self._ranks = Ranks(run.world.rank, run.world.size)
        probe = ""
        try:
            probe = self._ranks.first(lambda: self._take(run))
            seen = self._ranks.gather(self.files.size(probe) >= 0)
            if not all(seen):
                raise CheckpointError(
                    f"rank {seen.index(False)} does not see what rank 0 writes to {self.files}",
                    "checkpoints need a folder that all machines share, or a bucket",
                )
        except CheckpointError:
            self.close()
            raise
        finally:
            if probe and run.world.rank == 0:
                with contextlib.suppress(OSError):
                    self.files.remove(probe)
        self._due = Due(self.cadence, self._ranks)

    def _take(self, run: "Run") -> str:
        """Take the lock, and write a file to see whether one can be written; its name."""
        probe = f"probe-{uuid.uuid4().hex[:8]}"
        try:
            self.files.make()
            self._lock = self.files.lock()
            self._lock.take()
            best = None if self.keep.best is None else self.keep.best_of(manifest.complete(self.files))
            self._best = None if best is None else best[1]
            needed, free = expected_bytes(run), self.files.free()
            if free is not None and free < 2 * needed:
                raise CheckpointError(
                    f"there is no room for two checkpoints in {self.files}",
                    f"one takes about {size(needed)}, {size(free)} are free",
                    "the older one goes only when the newer one is on disk",
                )
            self.files.write(probe, [b"probe"])
        except OSError as error:
            why = f"{type(error).__name__}: {error.strerror or error}"
            raise CheckpointError(f"checkpoints cannot be written to {self.files}", why) from None
        return probe

    def after(self, run: "Run", metrics: Any = None) -> bool:
        """To be called after every step: whether it was time to save."""
        self.begin(run)
        assert self._due is not None
        self._raise()
        if not self._due.now(run.step) and not self._is_best(metrics):
            return False
        self.save(run, metrics)
        return True

    def _is_best(self, metrics: Any) -> bool:
        """Whether an evaluation is better than those of all checkpoints; ranks ask together, where there is one."""
        if self.keep.best is None or metrics is None:
            return False
        value = self.keep.value(metrics)
        return self.ranks.gather(value is not None and (self._best is None or value > self._best))[0]

    def save(self, run: "Run", metrics: Any = None, *, wait: bool = False) -> str:
        """Save ``run`` as it is now; the name of the folder. ``wait``: until it is on disk, and raise if it is not."""
        began = time.perf_counter()
        self.begin(run)
        assert self._due is not None
        self.wait()
        with run.coordination.whole():
            part = self._part(run, metrics)
        self.before()
        self._written, self._ended = Future[None](), threading.Event()
        if not wait:
            self._thread = threading.Thread(target=self._write, args=(part,), name="meshfit-checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(part)
            self.ranks.gather(None)  # nobody goes on before it is a checkpoint
            self._raise()
        self.seconds["blocked"] = time.perf_counter() - began
        self._due.saved(self.seconds["blocked"])
        return part.folder

    def _part(self, run: "Run", metrics: Any) -> RankSave:
        """What this rank is to write, copied to host memory."""
        rank, items = run.world.rank, items_of(run)
        described, own = describe(items), own_facts(run)
        folder = self.ranks.first(lambda: self._new_folder(run.step))
        digests = [hashlib.sha256(repr(each).encode()).digest() for each in (described, own)]
        every = self.ranks.gather((uuid.uuid4().hex, *digests))
        layouts = [layout for _, layout, _ in every]
        if self._assigned is None or self._assigned[0] != layouts:
            self._assigned = layouts, assign(self.ranks.gather(described))
        first_with_these_facts = [facts for _, _, facts in every].index(digests[1])
        copying = time.perf_counter()
        mine = [items[i] for i in self._assigned[1][rank]]
        begin, host, tensors, self._host = copied(mine, self._host, pinned=run.world.device.type == "cuda")
        part = RankSave(
            files=self.files,
            folder=folder,
            number=every[0][0],
            rank=rank,
            ranks=run.world.size,
            begin=begin,
            host=host,
            tensors=tensors,
            own=own if first_with_these_facts == rank else None,
            common=common_facts(run, metrics) if rank == 0 else None,
            block=self.block,
            kept=self.newest or "",
        )
        self.seconds = {"copy": time.perf_counter() - copying}
        return part

    def _new_folder(self, step: int) -> str:
        try:
            if self._lock is not None:
                self._lock.check()
            name = manifest.folder_name(step, self.files.names())
            self.files.make(name)
            if self._failed:
                sweep(self.files, now=name)
                self._failed = False
        except OSError as error:
            before = manifest.standing(self.files, self.newest or "")
            raise refused(error, self.files, f"step {step}", 0, before) from None
        return name

    def _write(self, part: RankSave) -> None:
        try:
            part.write()
            self._written.set_result(None)
            if part.common is not None:
                found = part.complete()
                self.newest, value = found.name, self.keep.value_of(found)
                if value is not None and (self._best is None or value > self._best):
                    self._best = value
                prune(self.files, self.keep, damaged=self.damaged)
        except BaseException as error:
            self._error, self._failed = error, True
        if not self._written.done():
            self._written.set_result(None)
        self.seconds |= part.seconds
        if self._due is not None:
            self._due.busy = sum(part.seconds.values())
        self._ended.set()

    def _join(self) -> None:
        """In two lines, since whoever watches this rank reads where it stands: it saves, or it waits for others."""
        if self._thread is not None:
            self._written.result()
            self._ended.wait()
            self._thread = None

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until what was saved is on disk; raises if it is not."""
        self._join()
        self._raise()

    def close(self) -> None:
        """Wait for the save under way, and let the folder go."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._ranks is not None:
                with contextlib.suppress(RuntimeError):
                    self._ranks.close()
            self._ranks = self._lock = None


def expected_bytes(run: "Run") -> int:
    """About what a checkpoint of ``run`` takes: its model, and what the optimizer will keep."""
    try:
        kept = state_bytes(run.optimizer)
    except RuntimeError:  # nobody can tell before it steps: as much as most keep
        kept = None
    total = 0
    for p in run.model.parameters():
        shape = layout_of(run.placed, p).shape
        nbytes = prod(shape) * p.dtype.itemsize
        total += nbytes
        if p.requires_grad:
            total += 2 * nbytes if kept is None else sum(kept.of(shape, str(p.dtype).removeprefix("torch.")))
    return total


def save(run: "Run", folder: Files | Path | str, metrics: Any = None, *, keep: int = 2) -> str:
    """Save ``run`` as it is now into a new folder within ``folder``; on disk when this returns. All ranks call it."""
    saver = Saver(folder, keep=keep)
    try:
        return os.path.join(str(saver.files), saver.save(run, metrics, wait=True))
    finally:
        saver.close()
