"""When to save: every so many steps, every so many minutes, or so that training waits for it a share of its time.

Ranks must save at the same step, and their clocks differ: the first rank's counts. They talk about it at few steps, 1,
2, 4, 8 ... until it is known how long a step takes, and then at the step that was agreed on the last time.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from meshfit.checkpoint.ranks import Ranks
from meshfit.errors import JobError

UNITS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """One of three; all None: never by itself."""

    steps: int | None = None
    seconds: float | None = None
    share: float | None = None
    """Of the time, that training may wait for saves: 0.03."""

    @classmethod
    def of(cls, asked: Any) -> Self:
        """From 100, "100 steps", "10 minutes", "3%"."""
        if asked is None or isinstance(asked, cls):
            return asked or cls()
        if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
            return cls(steps=asked)
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]+?)s?\s*", str(asked).lower())
        number, unit = (float(found[1]), found[2]) if found else (0.0, "")
        if unit == "%" and 0 < number < 100:
            return cls(share=number / 100)
        if unit == "step" and number >= 1 and number.is_integer():
            return cls(steps=int(number))
        if unit in UNITS and number > 0:
            return cls(seconds=number * UNITS[unit])
        raise JobError(f"checkpoint={asked!r} is not understood", 'write 100, "100 steps", "10 minutes" or "3%"')


class Due:
    """Says after which steps to save; all ranks ask after every step."""

    def __init__(self, cadence: Cadence, ranks: Ranks, clock: Callable[[], float] = time.monotonic):
        self.cadence, self.ranks, self.clock = cadence, ranks, clock
        self._began = self._saved = clock()
        self._first: int | None = None
        self._asked: int | None = None
        self._talk = 0
        self.blocked = 0.0
        """Seconds that training waited for the last save; 0 before the first."""
        self.busy = 0.0
        """Seconds that the last one took in all: there is no use in starting the next before."""

    def now(self, step: int) -> bool:
        cadence = self.cadence
        if cadence.steps is not None:
            before, self._asked = step - 1 if self._asked is None else self._asked, step
            return step // cadence.steps > before // cadence.steps  # a rank that steps apart may not see each step
        if cadence.seconds is None and cadence.share is None:
            return False
        if self._first is None:
            self._first, self._talk = step - 1, step
            self._began = self._began if step == 1 else self.clock()
        if step < self._talk:
            return False
        due, self._talk = self.ranks.gather(self._opinion(step))[0]
        return due

    def saved(self, blocked: float) -> None:
        """Tell that it was saved, and for how many seconds training waited."""
        self.blocked, self._saved = blocked, self.clock()

    def _opinion(self, step: int) -> tuple[bool, int]:
        """Whether to save after ``step``, and at which step to talk again."""
        assert self._first is not None
        taken, now = step - self._first, self.clock()
        each = max(1e-6, (now - self._began) / taken)
        left = self._interval() - (now - self._saved)
        if left < each / 2:
            return True, step + 1
        return False, step + max(1, min(int(left / each), taken))

    def _interval(self) -> float:
        if self.cadence.seconds is not None:
            return self.cadence.seconds
        assert self.cadence.share is not None
        return max(self.blocked / self.cadence.share, self.busy, 1.0)
