"""Checkpoints of a training under way, as ``fit`` is asked for them: where it goes on from, and when it saves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import open_files
from meshfit.checkpoint.gently import Asked
from meshfit.checkpoint.load import restore
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.saver import Saver

if TYPE_CHECKING:
    from meshfit.run import Run


@contextmanager
def saved(run: "Run", folder: Path | None) -> Iterator[Callable[[], bool]]:
    """``run`` restored, if it is to be; gives what to call after every step, which says whether to end there. Where the
    training comes to its end, it is saved once more. All ranks do this together."""
    job = run.job
    if job.resume is True:
        assert folder is not None
        if manifest.folders(open_files(folder / manifest.INSIDE)):
            restore(run, folder)
            run.resumed()
        else:
            run.notes.append(f"resume: there is no checkpoint in {folder} yet: from the beginning")
    elif job.resume:
        restore(run, job.resume)
        run.resumed()
    if job.checkpoint is None:
        yield lambda: False
        return
    if not run.saves:
        assert folder is not None
        alone = Asked(folder, Ranks(run.world.rank, run.world.size), first=False)
        yield lambda: alone.now(run.step)
        return
    assert folder is not None
    saver, last = Saver(folder / manifest.INSIDE, every=job.checkpoint), run.step

    def after() -> bool:
        nonlocal last
        with run.events.span("checkpoint"):
            if saver.after(run):
                last = run.step
        if asked.now(run.step):
            run.notes.append(f"ended after step {run.step}, as asked; resume=True goes on from there")
            return True
        return False

    try:
        saver.begin(run)
        asked = Asked(folder, saver.ranks, first=saver.ranks.rank == 0)
        yield after
        if run.step > last:
            saver.save(run, wait=True)
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
