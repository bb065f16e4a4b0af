"""What a rank did and when: spans, kept cheaply, written to one file a rank.

Nothing in the training loop knows who reads them. A line is a JSON object:

    {"span": "exchange", "step": 12, "at": 3.4712, "for": 0.0031}

``at`` and ``for`` are seconds, ``at`` since the rank's first event; the first line says when that was.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, TextIO

FLUSH_SECONDS = 1.0


class Events:
    """One rank's events. Without a folder only the totals by span are kept."""

    def __init__(self, folder: Path | None = None, rank: int = 0):
        self.start = self._flushed = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.step = 0
        self._lines: list[str] = []
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank{rank}.jsonl").open("w")
            self._line({"rank": rank, "time": time.time()})

    def span(self, name: str) -> "_Span":
        """Time what happens within."""
        return _Span(self, name)

    def add(self, name: str, began: float, ended: float) -> None:
        self.seconds[name] += ended - began
        if self._file is not None:
            at, took = began - self.start, ended - began
            self._lines.append(f'{{"span": "{name}", "step": {self.step}, "at": {at:.6f}, "for": {took:.6f}}}\n')
            if ended - self._flushed > FLUSH_SECONDS:
                self.flush()

    def _line(self, value: dict[str, Any]) -> None:
        self._lines.append(json.dumps(value) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.writelines(self._lines)
            self._file.flush()
        self._lines.clear()
        self._flushed = time.perf_counter()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


class _Span:
    __slots__ = ("began", "events", "name")

    def __init__(self, events: Events, name: str):
        self.events, self.name = events, name

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.events.add(self.name, self.began, time.perf_counter())
