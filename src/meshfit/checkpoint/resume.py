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
    job = run.job
    if job.resume is True:
        assert folder is not None
        if manifest.folders(open_files(folder / manifest.INSIDE)):
            restore(run, folder)
            run.coordination.resumed()
        else:
            run.notes.append(f"resume: there is no checkpoint in {folder} yet: from the beginning")
    elif job.resume:
        restore(run, job.resume)
        run.coordination.resumed()
    if job.checkpoint is None:
        yield None
        return
    assert folder is not None
    saver, last = Saver(folder / manifest.INSIDE, every=job.checkpoint), run.step
    asked = Asked(folder, Ranks(run.world.rank, run.world.size))
    saving = False

    def begin(*, first: bool) -> None:
        """Be one that saves: from the beginning, or from when the one that did is gone."""
        nonlocal asked, saving
        until = time.monotonic() + (0.0 if first else HANDED_OVER_SECONDS)
        while not saving:
            try:
                saver.begin(run)
                saving = True
            except CheckpointError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        asked = Asked(folder, saver.ranks)

    def after() -> bool:
        nonlocal last
        if run.coordination.saves and not saving:
            begin(first=False)
        if not saving:
            return asked.now(run.step)
        with run.events.span("checkpoint"):
            if saver.after(run):
                last = run.step
        if asked.now(run.step):
            run.notes.append(f"ended after step {run.step}, as asked; resume=True goes on from there")
            return True
        return False

    try:
        if run.coordination.saves:
            begin(first=True)
        yield after
        if run.coordination.saves and not saving:
            begin(first=False)
        if saving and run.step > last:
            saver.save(run, wait=True)
        if saving:
            asked.answered()
    finally:
        saver.close()
        run.notes.extend(saver.notes)


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
