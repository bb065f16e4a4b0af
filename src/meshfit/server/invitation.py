"""What a run answers to workers that ask to join: its plan, and the number of each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfit.server.wire import WireError


@dataclass(frozen=True, kw_only=True)
class Invitation:
    facts: dict[str, Any]
    """What one who joins must know: plain values."""
    differences: Callable[[dict[str, Any]], list[str]]
    """Between this run's job and another: a line each."""
    first: int
    """Number of the first worker that joins."""
    folder: Path
    """Where it is noted how many have: numbers are not given twice, also by a server that was started again."""

    def number(self, job: dict[str, Any]) -> int:
        """Of the next worker; ``WireError`` if its job is another."""
        try:
            found = self.differences(job)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise WireError("what was sent is no description of a job", f"{type(error).__name__}: {error}") from None
        if found:
            raise WireError("this job is not that of the run", *found)
        noted = self.folder / "joined"
        before = int(noted.read_text()) if noted.exists() else 0
        noted.write_text(str(before + 1))
        return self.first + before
