"""Checkpoints of a training under way, as ``fit`` is asked for them: where it goes on from, and when it saves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import open_files
from meshfit.checkpoint.load import restore
from meshfit.checkpoint.saver import Saver

if TYPE_CHECKING:
    from meshfit.run import Run


@contextmanager
def saved(run: "Run", folder: Path | None) -> Iterator[Callable[[], None]]:
    """``run`` restored, if it is to be; gives what to call after every step. Where the training comes to its end, it is
    saved once more. All ranks do this together."""
    job = run.job
    if job.resume is True:
        assert folder is not None
        if manifest.folders(open_files(folder / manifest.INSIDE)):
            restore(run, folder)
        else:
            run.notes.append(f"resume: there is no checkpoint in {folder} yet: from the beginning")
    elif job.resume:
        restore(run, job.resume)
    if job.checkpoint is None:
        yield lambda: None
        return
    assert folder is not None
    saver, last = Saver(folder / manifest.INSIDE, every=job.checkpoint), run.step

    def after() -> None:
        nonlocal last
        with run.events.span("checkpoint"):
            if saver.after(run):
                last = run.step

    try:
        saver.begin(run)
        yield after
        if run.step > last:
            saver.save(run, wait=True)
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
