"""Copies between a device and host memory, on streams of their own beside the device's work."""

import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class CopyEvent:
    """A point in the work of a lane. On CPUs work is done when it is called, and there is nothing to wait for."""

    def __init__(self, event: torch.cuda.Event | None = None):
        self.event = event

    def wait(self) -> None:
        """Let the device's current stream wait; not the host."""
        if self.event is not None:
            self.event.wait()

    def settle(self) -> None:
        """Let the host wait."""
        if self.event is not None:
            self.event.synchronize()


class CopyLane:
    """A stream of copies beside the device's work."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self, after: CopyEvent | None = None) -> Iterator[CopyEvent]:
        """Within it, copies run in this lane, after all that the device was given until now. Yields their end."""
        if self.stream is None:
            yield CopyEvent()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        end = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            if after is not None:
                after.wait()
            yield CopyEvent(end)
            end.record()

    def uses(self, tensor: Tensor) -> None:
        """Once ``tensor`` is freed, keep its memory from others until the copies until now are done."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def host_memory(size: int, *, pinned: bool) -> Tensor:
    """``size`` bytes exactly: torch's own pinned memory comes in powers of two."""
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if pinned:
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), size, 0))
        weakref.finalize(memory, _unpin, memory.data_ptr()).atexit = False
    return memory


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may be under way
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostUnregister(address))
