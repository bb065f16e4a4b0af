"""Moments in a GPU's stream, read as seconds on a rank's clock after the device has passed them: nobody waits."""

import time

import torch

ANCHOR_SECONDS = 10.0  # elapsed_time() is a float of 32 bits: beyond some seconds it is coarse
SAME_SECONDS = 25e-6  # marks closer than this are one
POOL = 64  # CUDA events made at the start


class GpuMark:
    """A moment in a GPU's stream. Its CUDA event is reused after the mark is gone."""

    __slots__ = ("at", "clock", "event")

    def __init__(self, clock: "GpuClock", event: torch.cuda.Event):
        self.clock, self.event = clock, event
        self.at: float | None = None

    def __del__(self) -> None:
        self.clock.free.append(self.event)


class GpuClock:
    """Marks moments in a GPU's stream, and reads them as seconds on the rank's clock."""

    def __init__(self, device: torch.device, start: float):
        self.stream = torch.cuda.current_stream(device)  # asking each time would cost as much as a mark
        self.free = [torch.cuda.Event(enable_timing=True) for _ in range(POOL)]
        for event in self.free:
            event.record(self.stream)  # CUDA creates an event when it is first recorded
        self._last, self._made = None, 0.0
        self._anchor = self.now()
        self._anchor.event.synchronize()
        self._anchor.at = self._zero = time.perf_counter() - start  # of the anchor, on the rank's clock

    def now(self) -> GpuMark:
        made = time.perf_counter()
        if self._last is not None and made - self._made < SAME_SECONDS:
            return self._last
        mark = GpuMark(self, self.free.pop() if self.free else torch.cuda.Event(enable_timing=True))
        mark.event.record(self.stream)
        self._last, self._made = mark, time.perf_counter()
        return mark

    def passed(self, mark: GpuMark) -> bool:
        """Whether the device has passed it."""
        return mark.at is not None or mark.event.query()

    def _at(self, mark: GpuMark) -> float:
        if mark.at is None:
            try:
                passed = self._anchor.event.elapsed_time(mark.event) / 1e3
            except RuntimeError:  # not passed yet
                mark.event.synchronize()
                passed = self._anchor.event.elapsed_time(mark.event) / 1e3
            mark.at = self._zero + passed
            if passed > ANCHOR_SECONDS:
                self._anchor, self._zero = mark, mark.at
        return mark.at

    def read(self, began: GpuMark, ended: GpuMark) -> tuple[float, float]:
        """Start and length in seconds; waits for marks that have not passed."""
        at = self._at(began)
        return at, self._at(ended) - at
