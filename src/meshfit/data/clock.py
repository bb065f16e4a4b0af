"""Where the time of a batch goes: read, decode, transform, transfer; and how long whoever trains waited for it.

Stages nest (reading Parquet decodes images): a second counts for the innermost stage it was spent in.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STAGES = ("read", "decode", "transform", "transfer")
_here = threading.local()


@dataclass
class Clock:
    """Seconds by stage, summed over threads, and the seconds waited."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    waited: float = 0.0
    batches: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Stages that this thread enters count here."""
        _here.clock, _here.inner = self, 0.0
        try:
            yield
        finally:
            _here.clock = None

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] += seconds

    @property
    def slowest(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count what happens inside as ``name``."""
    clock: Clock | None = getattr(_here, "clock", None)
    if clock is None:
        yield
        return
    outer, _here.inner = _here.inner, 0.0
    start = time.perf_counter()
    try:
        yield
    finally:
        whole = time.perf_counter() - start
        clock.add(name, whole - _here.inner)
        _here.inner = outer + whole
