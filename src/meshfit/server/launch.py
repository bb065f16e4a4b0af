"""Model servers beside ranks: started with them, started again when one is killed, ended with them.

They are no ranks: in no process group, on no device of the plan. When one is killed all are started again, since they
must go on from the same step: each from the newest snapshot that all of them have.
"""

import math
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self

from meshfit.errors import Died
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.rank import Work
from meshfit.server.settings import gone_mark

MOST_STARTS = 8  # of a run: what dies more often dies of something that another start does not mend


@dataclass(eq=False, repr=False)
class Servers:
    """``count`` processes, each running ``work(world, channel)``, that meet the ranks in ``folder``."""

    work: Work
    _: KW_ONLY
    count: int
    folder: str
    hang: float = math.inf
    """Seconds after which one that is stopped is ended."""
    log: Path | None = None
    notes: list[str] = field(default_factory=list)
    """What they had to say, and what became of them, in words."""
    starts: int = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        self._ranks.__exit__(kind, *error)

    def _start(self) -> None:
        self.starts += 1
        how: dict[str, Any] = {"role": "server", "meet": self.folder, "joined": False, "log": self.log}
        self._ranks = LocalRanks(self.work, size=self.count, devices=Devices("cpu", None), hang=self.hang, **how)
        self._ranks.__enter__()

    @property
    def fds(self) -> list[int]:
        return self._ranks.fds

    def gone(self, worker: int) -> None:
        """A worker has ended. Servers that are started again would wait for it."""
        with suppress(OSError):
            gone_mark(Path(self.folder), worker).touch()

    def watch(self) -> None:
        """Report those that have stalled; start them again if one hangs."""
        try:
            self._ranks.watch()
        except Died as death:
            self._start_again(death)

    def look(self) -> None:
        """Receive what was sent; start them again if one was killed. Raises what one of them has raised."""
        try:
            for _, words in self._ranks.messages(timeout=0):
                self.notes.append(words)
        except TimeoutError:
            return
        except Died as death:
            self._start_again(death)

    def _start_again(self, death: Died) -> None:
        if self.starts == MOST_STARTS:
            raise death
        self.notes.append(f"{death.headline}, and was started again")
        self._ranks.__exit__()
        self._start()

    def finish(self, within: float) -> None:
        """Wait until all are done, their last worker gone; not longer than ``within`` seconds without a word."""
        with suppress(TimeoutError, Died):
            for _, words in self._ranks.messages(within):
                self.notes.append(words)
