"""What is compressed, unfolded up to a limit, beyond which it is refused while little of it is in memory."""

import bz2
import gzip
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
        import pyarrow as pa

        self.name, self._size, self._kind, self._made = name, len(data), kind, 0
        packed: Any = pa.BufferReader(data)
        self._file = gzip.GzipFile(fileobj=packed) if kind == "gzip" else bz2.BZ2File(packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._file.read(len(buffer))
            if not self._size:
                raise EOFError
        except EOFError:
            raise OSError(f"it is cut short: its {self._size} bytes end within {self._kind} data") from None
        except (OSError, zlib.error) as error:
            raise OSError(f"it cannot be unpacked ({self._kind}): {error}") from None
        self._made += len(found)
        check(self.name, self._size, self._made)
        buffer[: len(found)] = found
        return len(found)


def unfolded(name: str, data: Any, kind: str = "gzip") -> bytes:
    """All of it."""
    found, reader = bytearray(), Unfolding(name, data, kind)
    while piece := reader.read(PIECE):
        found += piece
    return bytes(found)


def npy_header(head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in column order, and type of the .npy file that ``head`` begins with; it then stands at its
    values."""
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(head)


def array(data: bytes) -> np.ndarray:
    """Of an .npy file; ``ValueError`` for one that says that it is larger than the file, before memory is taken."""
    head = io.BytesIO(data)
    shape, _, dtype = npy_header(head)
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
