"""Checkpoints of a training under way, as ``fit`` is asked for them: where it goes on from, and when it saves."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshfit.arguments import is_url
from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.graceful_stop import Asked
from meshfit.checkpoint.load import restore
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.saver import Saver
from meshfit.errors import CheckpointError

if TYPE_CHECKING:
    from meshfit.job import Job
    from meshfit.run import Run

Metrics = dict[str, float] | None
HANDED_OVER_SECONDS = 5.0  # until the folder of one that died is free


@contextmanager
def saved(
    run: "Run", folder: Path | None, before: Callable[[], None] = lambda: None
) -> Iterator[Callable[[Metrics], bool] | None]:
    """Restore ``run`` if the job resumes. Yields what to call after every step, with its evaluation if there was one:
    it saves when that is due and says whether to end there (None: the job saves nothing). A training that comes to its
    end is saved once more. ``before``: called before each save. All ranks do this together."""
    path, damaged = to_resume(run.job, folder), set()
    if path is not None:
        damaged = newer_than(restore(run, path))
        run.coordination.resumed()
    elif run.job.resume:
        run.notes.append(f"resume: there is no checkpoint in {checkpoints_of(run.job, folder)} yet: from the beginning")
    if run.job.checkpoint is None:
        yield None
        return
    assert folder is not None
    saving = _Saving(run, folder, before, damaged if run.job.resume is True else set())
    try:
        saving.begin(patience=0.0)
        yield saving.after
        saving.end()
    finally:
        saving.saver.close()


def to_resume(job: "Job", folder: Path | None) -> Files | Path | str | None:
    """Where the checkpoint is that a training goes on from; None: it starts from the beginning."""
    if job.resume is True:
        found = checkpoints_of(job, folder)
        return found if manifest.folders(found) else None
    return job.resume or None


def checkpoints_of(job: "Job", folder: Path | None) -> Files:
    """Where a training saves: in its bucket, or in its folder."""
    where = job.out if is_url(job.out) else folder
    assert where is not None
    return open_files(where).inside(manifest.INSIDE)


def newer_than(found: manifest.Manifest) -> set[str]:
    """Checkpoints that were passed over for ``found``: they are damaged."""
    return {name for name in manifest.folders(found.files) if manifest.order(name) > manifest.order(found.name)}


class _Saving:
    """The saves of one training. A rank that does not save (a worker of a server) may have to take over."""

    def __init__(self, run: "Run", folder: Path, before: Callable[[], None], damaged: set[str]):
        self.run, self.folder, self.last = run, folder, run.step
        self.measured: Metrics = None  # after the last step
        job = run.job
        self.saver = Saver(
            checkpoints_of(job, folder),
            every=job.checkpoint,
            keep=job.keep,
            keep_best=job.keep_best,
            before=before,
            damaged=damaged,
        )
        self.asked = Asked(folder, Ranks(run.world.rank, run.world.size))
        self.saves = False

    def begin(self, patience: float = HANDED_OVER_SECONDS) -> None:
        """Take the folder, if this rank saves; for ``patience`` seconds another that is gone may still hold it."""
        until = time.monotonic() + patience
        while self.run.coordination.saves and not self.saves:
            try:
                self.saver.begin(self.run)
                self.saves, self.asked = True, Asked(self.folder, self.saver.ranks)
            except CheckpointError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def after(self, measured: Metrics = None) -> bool:
        self.begin()
        self.measured = measured
        if self.saves:
            with self.run.events.span("checkpoint"):
                if self.saver.after(self.run, measured):
                    self.last = self.run.step
                    self.run.digests.take(self.run.step)  # so that it is known whether this one can be trusted
        word = self.asked.now(self.run.step)
        if word is None:
            return False
        self.run.ended_by = word
        if self.saves:
            by = f" by {word}" if word else ""
            self.run.notes.append(f"ended after step {self.run.step}, as asked{by}; resume=True goes on from there")
        return True

    def end(self) -> None:
        self.begin()
        if self.saves:
            if self.run.step > self.last:
                self.saver.save(self.run, self.measured, wait=True)
            self.asked.answered()


def folder_to_resume(out: Path | str) -> Files:
    """A run's own folder, for it to go on in: refused if another run is at it. Its old events are put aside."""
    files = open_files(out)
    inner = files.inside(manifest.INSIDE)
    inner.make()
    lock = inner.lock()
    lock.take()
    try:
        put_events_aside(files)
    finally:
        lock.release()
    return files


def put_events_aside(files: Files, taken: Collection[str] = ()) -> None:
    """Of a run that goes on; under a name that is not ``taken``."""
    there, n = {*files.names(), *taken}, 1
    if "events" in there:
        while f"events-{n}" in there:
            n += 1
        files.move("events", f"events-{n}")
