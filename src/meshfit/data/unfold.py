"""What is compressed, unfolded up to a limit, beyond which it is refused while little of it is in memory."""

import bz2
import io
import math
import zipfile
import zlib
from typing import Any

import numpy as np

from meshfit.errors import DataError
from meshfit.launch.limits import UNFOLDED, largest_unfolded
from meshfit.units import size as shown

PIECE = 2**20


def check(name: str, size: int, unfolded: int) -> None:
    """Refuse a file of ``size`` bytes that says that it becomes ``unfolded``."""
    if unfolded > (limit := largest_unfolded(size)):
        raise DataError(
            f"{name} unfolds to more than {shown(limit)}, from {shown(size)}",
            f"where that is meant, raise the limit: {UNFOLDED}=20GB",
        )


class Unfolding(io.RawIOBase):
    """A gzip or bz2 file that is read as what it unfolds to."""

    def __init__(self, name: str, data: Any, kind: str = "gzip"):
        self.name, self._data, self._at, self._kind = name, memoryview(data), 0, kind
        self._open, self._made, self._rest = self._reader(), 0, b""

    def _reader(self) -> Any:
        return zlib.decompressobj(wbits=31) if self._kind == "gzip" else bz2.BZ2Decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        most = len(buffer)
        while True:
            if self._open.eof:  # members may follow each other
                self._rest = self._open.unused_data
                if not self._rest.strip(b"\0") and self._at >= len(self._data):
                    return 0
                self._open = self._reader()
            if not self._rest and self._at < len(self._data):
                self._rest = bytes(self._data[self._at : self._at + PIECE])
                self._at += PIECE
            try:
                found = self._open.decompress(self._rest, most)
            except (zlib.error, EOFError) as error:
                raise OSError(f"it cannot be unpacked ({self._kind}): {error}") from None
            self._rest = getattr(self._open, "unconsumed_tail", b"")
            if found:
                break
            if not self._open.eof and not self._rest and self._at >= len(self._data):
                raise OSError(f"it is cut short: its {len(self._data)} bytes end within {self._kind} data")
        self._made += len(found)
        check(self.name, len(self._data), self._made)
        buffer[: len(found)] = found
        return len(found)


def unfolded(name: str, data: Any, kind: str = "gzip") -> bytes:
    """All of it."""
    found, reader = bytearray(), Unfolding(name, data, kind)
    while piece := reader.read(PIECE):
        found += piece
    return bytes(found)


def array(data: bytes) -> np.ndarray:
    """Of an .npy file; ``ValueError`` for one that says that it is larger than the file, before memory is taken."""
    head = io.BytesIO(data)
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(head)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > len(data) - head.tell():
        raise ValueError(f"{len(data)} bytes, but {shape} {dtype} needs more")
    return np.load(io.BytesIO(data), allow_pickle=False)


def check_zip(name: str, data: bytes) -> None:
    """Refuse a zip whose members say that they are too large together; none becomes more than it says."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            check(name, len(data), sum(member.file_size for member in held.infolist()))
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{name} is no zip file", str(error)) from None
