"""Ctrl-C and SIGTERM while checkpoints are kept: the training ends after a step, saved, not in the middle of one.

The first signal leaves a file in the run's folder, which all ranks look for about twice a second, at the same step;
the second ends it at once. Whoever cannot send a signal can make the file: ``touch runs/a/stop``.
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


@contextmanager
def ends_gently(folder: Path | None) -> Iterator[None]:
    """While a training runs in ``folder``; afterwards, if a signal came, it is acted on. None: signals act at once."""
    if folder is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            _act(number)
        (folder / NAME).touch()
        print("\nmeshfit: ends after this step, saved; once more ends at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        _act(came[0])


def _act(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


class Asked:
    """Whether the training is to end; all ``ranks`` ask after every step. The ``first`` takes away a file of
    before."""

    def __init__(self, folder: Path, ranks: Ranks, *, first: bool):
        self.file, self.ranks, self.first, self.due = folder / NAME, ranks, first, Due(LOOK, ranks)
        if first:
            self.file.unlink(missing_ok=True)

    def now(self, step: int) -> bool:
        if not self.due.now(step):
            return False
        self.due.saved(0.0)
        return any(self.ranks.gather(self.file.exists()))

    def answered(self) -> None:
        """It has ended."""
        if self.ranks.rank == 0:
            self.file.unlink(missing_ok=True)
