"""Which checkpoints stay: the newest few, and the one of the best evaluation.

They go only when a newer one is whole, manifests first: killed at any point, a run has what it had before, and the next
save removes what is left over.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshfit.checkpoint import plain
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.manifest import NAME, Manifest, complete, folders
from meshfit.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Keep:
    newest: int = 2
    """Complete checkpoints that stay, beside the best."""

    best: str | None = None
    """The metric by which one more stays: "accuracy" (highest), "-loss" (lowest)."""

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise JobError(
                f"keep={self.newest} checkpoints", "at least 1 has to stay; with 2 there is one to fall back on"
            )

    def value(self, metrics: Mapping[str, Any] | None) -> float | None:
        """Of an evaluation: higher is better. None where it was not measured, or is no number."""
        if self.best is None or not metrics:
            return None
        value = metrics.get(self.best.lstrip("-"))
        if not isinstance(value, int | float) or math.isnan(value):
            return None
        return -value if self.best.startswith("-") else value

    def value_of(self, found: Manifest) -> float | None:
        metrics = plain.decode(found.body["state"].get("metrics"))
        return self.value(metrics if isinstance(metrics, dict) else None)

    def best_of(self, whole: Iterable[Manifest]) -> tuple[str, float] | None:
        """Name and value of the best; of equal ones the oldest, which was there first."""
        valued = [(found.name, value) for found in whole if (value := self.value_of(found)) is not None]
        return max(reversed(valued), key=lambda each: each[1], default=None)

    def gone(self, whole: list[Manifest]) -> list[str]:
        """Of complete checkpoints, newest first, those that go."""
        best = self.best_of(whole)
        return [found.name for found in whole[self.newest :] if best is None or found.name != best[0]]


def prune(files: Files, keep: Keep, *, damaged: Collection[str] = ()) -> list[str]:
    """Remove all that ``keep`` does not, and what unfinished saves left; the names of what went. Those known to be
    ``damaged`` stay, and do not count. For whoever has the lock: no save is under way."""
    whole = [found for found in complete(files) if found.name not in damaged]
    gone = keep.gone(whole)
    for name in gone:
        _remove(files, name)
    return [*gone, *(sweep(files) if whole else ())]


def sweep(files: Files, *, now: str | None = None) -> list[str]:
    """Remove what unfinished saves left, but for ``now``. A checkpoint that is damaged stays as it is."""
    gone = [
        name
        for name in folders(files)
        if name != now and files.size(os.path.join(name, NAME)) < 0 and files.size(name) < 0
    ]
    for name in gone:
        _remove(files, name)
    return gone


def _remove(files: Files, name: str) -> None:
    """The manifest goes first: what is half removed is no checkpoint."""
    files.remove(os.path.join(name, NAME))
    files.sync(name)
    files.remove_folder(name)
    files.sync()
