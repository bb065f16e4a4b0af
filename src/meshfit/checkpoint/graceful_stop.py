"""Ctrl-C and SIGTERM while checkpoints are kept: the training ends after a step, saved, not in the middle of one.

The first signal leaves a file in the run's folder, which all ranks look for about twice a second, at the same step;
the second ends it at once. So does the first one while ranks start: there is nothing to save yet. Whoever cannot send a
signal can make the file: ``touch runs/a/stop``.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from meshfit.checkpoint.cadence import Cadence, Due
from meshfit.checkpoint.ranks import Ranks

NAME = "stop"
LOOK = Cadence(seconds=0.5)


class GracefulStop:
    """How a signal is answered."""

    def __init__(self, folder: Path):
        self.file = folder / NAME
        self.begun = False
        """Whether there are steps to end after; until then a signal ends it at once."""
        self.came: list[int] = []

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)
        if len(self.came) > 1:
            _act(number)
        if not self.begun:
            print("\nmeshfit: ends now, it was still starting: nothing was saved", file=sys.stderr, flush=True)
            _act(number)
        self.file.touch()
        print("\nmeshfit: ends after this step, saved; once more ends at once", file=sys.stderr, flush=True)


@contextmanager
def graceful_stop(folder: Path | None, *, first: bool = True) -> Iterator[GracefulStop]:
    """While a training runs in ``folder``; afterwards, if a signal came, it is acted on. None: signals act at once.
    The ``first`` process of a training takes away a file of before."""
    graceful = GracefulStop(folder or Path())
    if folder is not None and first:
        graceful.file.unlink(missing_ok=True)
    if folder is None or threading.current_thread() is not threading.main_thread():
        yield graceful
        return
    before = {number: signal.signal(number, graceful.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield graceful
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if graceful.came:
        _act(graceful.came[0])


def _act(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


class Asked:
    """Whether the training is to end; all ``ranks`` ask after every step."""

    def __init__(self, folder: Path, ranks: Ranks):
        self.file, self.ranks, self.due = folder / NAME, ranks, Due(LOOK, ranks)

    def now(self, step: int) -> bool:
        if not self.due.now(step):
            return False
        self.due.saved(0.0)
        return any(self.ranks.gather(self.file.exists()))

    def answered(self) -> None:
        """It has ended."""
        if self.ranks.rank == 0:
            self.file.unlink(missing_ok=True)
