"""Checkpoints of a training under way, as ``fit`` is asked for them: where it goes on from, and when it saves."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import open_files
from meshfit.checkpoint.graceful_stop import Asked
from meshfit.checkpoint.load import restore
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.saver import Saver
from meshfit.errors import CheckpointError

if TYPE_CHECKING:
    from meshfit.run import Run

HANDED_OVER_SECONDS = 5.0  # until the folder of one that died is free


@contextmanager
def saved(run: "Run", folder: Path | None) -> Iterator[Callable[[], bool] | None]:
    """Restore ``run`` if the job resumes. Yields what to call after every step, which saves when it is due and says
    whether to end there (None: the job saves nothing). A training that comes to its end is saved once more. All ranks
    do this together."""
    path = folder if run.job.resume is True else run.job.resume
    if run.job.resume is True and folder is not None and not manifest.folders(open_files(folder / manifest.INSIDE)):
        run.notes.append(f"resume: there is no checkpoint in {folder} yet: from the beginning")
    elif path:
        restore(run, path)
        run.coordination.resumed()
    if run.job.checkpoint is None:
        yield None
        return
    assert folder is not None
    saving = _Saving(run, folder)
    try:
        saving.begin(patience=0.0)
        yield saving.after
        saving.end()
    finally:
        saving.saver.close()
        run.notes.extend(saving.saver.notes)


class _Saving:
    """The saves of one training. A rank that does not save (a worker of a server) may have to take over."""

    def __init__(self, run: "Run", folder: Path):
        self.run, self.folder, self.last = run, folder, run.step
        self.saver = Saver(folder / manifest.INSIDE, every=run.job.checkpoint)
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

    def after(self) -> bool:
        self.begin()
        if self.saves:
            with self.run.events.span("checkpoint"):
                if self.saver.after(self.run):
                    self.last = self.run.step
        if not self.asked.now(self.run.step):
            return False
        if self.saves:
            self.run.notes.append(f"ended after step {self.run.step}, as asked; resume=True goes on from there")
        return True

    def end(self) -> None:
        self.begin()
        if self.saves:
            if self.run.step > self.last:
                self.saver.save(self.run, wait=True)
            self.asked.answered()


def folder_to_resume(out: Path | str) -> Path:
    """A run's own folder, for it to go on in: refused if another run is at it. Its old events are put aside."""
    folder = Path(out)
    files = open_files(folder / manifest.INSIDE)
    files.make()
    lock = files.lock()
    lock.take()
    try:
        events, n = folder / "events", 1
        if events.exists():
            while (aside := folder / f"events-{n}").exists():
                n += 1
            events.rename(aside)
    finally:
        lock.release()
    return folder
