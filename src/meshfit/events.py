"""What a rank did and when: spans and numbers, kept cheaply, written to one file a rank.

Nothing in the training loop knows who reads them. A line is a JSON object:

    {"span": "exchange", "step": 12, "at": 3.4712, "for": 0.0031}
    {"step": 12, "at": 3.4750, "loss": 0.4123, "samples": 3072}

``at`` and ``for`` are seconds, ``at`` since the rank's first event; the first line says when that was.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what happens within."""
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[name] += ended - began
            if self._file is not None:
                at, took = began - self.start, ended - began
                self._lines.append(f'{{"span": "{name}", "step": {self.step}, "at": {at:.6f}, "for": {took:.6f}}}\n')

    def numbers(self, **values: Any) -> None:
        if self._file is not None:
            self._line({"step": self.step, "at": round(time.perf_counter() - self.start, 6), **values})
            if time.perf_counter() - self._flushed > FLUSH_SECONDS:
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
