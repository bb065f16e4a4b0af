"""Memory in which a worker's payload lies: gradients on their way up, weights on their way down.

Between processes of one host it is shared: the worker makes an anonymous file in memory, keeps its gradients and
parameters in it, and sends the descriptor along with its greeting. Then a push moves nothing, and the server copies
each byte once: gradients out of it, new weights into it. Between hosts each end has a region of its own, and the
connection carries what lies in it.

The file has no name, so nothing is left of it when both have gone, however they went; and it is sealed, so that
neither can take its pages from under the other.
"""

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfit.comm.flat import ALIGN, aligned
from meshfit.launch.channel import memory_file, seal
from meshfit.server.wire import WireError


@dataclass(slots=True)
class SharedMemory:
    """``up`` and ``down`` are tensors of bytes."""

    up: Tensor
    down: Tensor
    fd: int | None = None
    """Of the file, where memory is shared."""

    @classmethod
    def own(cls, up: int, down: int) -> "SharedMemory":
        return cls(torch.zeros(up, dtype=torch.uint8), torch.zeros(down, dtype=torch.uint8))

    @classmethod
    def make(cls, up: int, down: int) -> "SharedMemory":
        """Memory that another process can map: as large as both, and known by its descriptor."""
        fd = memory_file()
        os.ftruncate(fd, _size(up, down))
        seal(fd)
        return cls._mapped(fd, up, down)

    @classmethod
    def map(cls, fd: int, up: int, down: int) -> "SharedMemory":
        """What the other process has made. Refused unless it is as large as agreed, and stays so."""
        if os.fstat(fd).st_size != _size(up, down):
            raise WireError(f"shared memory of {os.fstat(fd).st_size} bytes", f"{_size(up, down)} were agreed")
        if hasattr(os, "memfd_create"):
            import fcntl

            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            except OSError:
                sealed = 0
            if not sealed:
                raise WireError("shared memory that its owner could shrink", "it must be sealed")
        region = cls._mapped(fd, up, down)
        os.close(fd)
        region.fd = None
        return region

    @classmethod
    def _mapped(cls, fd: int, up: int, down: int) -> "SharedMemory":
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # pages are there before they are timed
        whole = torch.frombuffer(mmap.mmap(fd, _size(up, down), flags=flags), dtype=torch.uint8)
        start = aligned(up)
        return cls(whole[:up], whole[start : start + down], fd)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _size(up: int, down: int) -> int:
    return max(aligned(up) + aligned(down), ALIGN)


def view(buffer: Tensor) -> memoryview:
    """The bytes of a tensor of bytes, for a socket."""
    return buffer.numpy().data.cast("B") if buffer.numel() else memoryview(b"")
