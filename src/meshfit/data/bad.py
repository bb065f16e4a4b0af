"""Samples that cannot be read, decoded or transformed.

By default a run stops and names the file or row. ``on_bad="skip"`` goes on: the next good sample by id stands in for a
bad one, so that batches keep their size and no rank need ask another. Which one stands in depends on the data alone:
ranks, workers and a resume change nothing. The bad ones are counted and listed, and above a share of 1 % the run stops.
Rows that cannot be converted to columns (table.py) are left out for good, under the same limit.

An answer that does not come (a server that is gone, a file that shrank) is no bad sample: it is retried, then raised.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data.draw import Key
from meshfit.data.source import Over, Source
from meshfit.errors import DataError


class BadSample(DataError):
    """One sample cannot be used: its name, and why."""


class Skipping(Over):
    """``source`` without its bad samples, of which ``most`` is the largest share allowed."""

    def __init__(self, source: Source, most: float = 0.01):
        super().__init__(source)
        self.most = most
        self.bad: dict[int, str] = {}
        """What was wrong with each bad sample met so far, by id."""

    def read(self, ids: NDArray[np.int64], key: Key) -> Any:
        while True:
            used = self._used(ids)
            try:
                return self.source.read(used, key)
            except Exception as error:
                if not _of_a_sample(error) or not self._find(used, key):
                    raise

    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return self.source.finish(content, self._used(ids), key)

    def _used(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """``ids`` with the next good one in the place of each bad one."""
        if not self.bad:
            return ids
        return np.array([self._stand_in(i) for i in ids.tolist()], np.int64)

    def _stand_in(self, i: int) -> int:
        while i in self.bad:
            i = (i + 1) % len(self)
        return i

    def _find(self, ids: NDArray[np.int64], key: Key) -> int:
        """Try each sample alone; how many more are bad."""
        found = 0
        for i in ids.tolist():
            if i in self.bad:
                continue
            try:
                self.source.read(np.array([i]), key)
            except Exception as error:
                if not _of_a_sample(error):
                    raise
                self._add(i, error)
                found += 1
        return found

    def _add(self, i: int, error: Exception) -> None:
        self.bad[i] = str(error) if isinstance(error, BadSample) else f"{self.name_of(i)}: {error!r}"
        within(list(self.bad.values()), len(self), self.most, error)

    def state(self) -> dict[str, Any]:
        return {**self.source.state(), "bad": dict(self.bad)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.source.load_state(state)
        self.bad.update({int(i): why for i, why in state.get("bad", {}).items()})


def within(bad: list[str], samples: int, most: float, error: Exception | None = None) -> None:
    """Refuse more than a share of ``most`` bad ones of ``samples``."""
    allowed = max(1, int(most * samples))
    if len(bad) > allowed:
        raise DataError(
            f"{len(bad)} of {samples} samples are bad; on_bad='skip' allows {allowed} ({most:.0%})",
            *(text.replace("\n", " ") for text in bad[:5]),
            "mend the data, or allow more: .on_bad('skip', most=0.05)",
        ) from error


def _of_a_sample(error: Exception) -> bool:
    return isinstance(error, BadSample) or not isinstance(
        error, DataError | ConnectionError | TimeoutError | MemoryError
    )
