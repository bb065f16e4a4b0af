"""Scalars in TensorBoard's format, written by hand: importing its own writer takes longer than many a run.

A file is a sequence of records: length, checksum of the length, a protobuf ``Event``, checksum of that. The message
used here has three fields: wall_time (1, double), step (2, varint), summary (5) of values (1) with a tag (1) and a
simple_value (2, float).
"""

import socket
import struct
import time
from pathlib import Path

_TABLE = [0] * 256
for _i in range(256):
    _c = _i
    for _ in range(8):
        _c = (_c >> 1) ^ (0x82F63B78 if _c & 1 else 0)
    _TABLE[_i] = _c


class Scalars:
    """Appends scalars to a new file in ``folder``."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        version = b"brain.Event:2"
        with self.path.open("ab") as file:
            file.write(_record(_double(1, time.time()) + _bytes(3, version)))

    def add(self, rows: list[tuple[int, float, dict[str, float]]]) -> None:
        """Rows of (step, seconds since 1970, values by tag)."""
        with self.path.open("ab") as file:
            for step, at, values in rows:
                summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, v)) for tag, v in values.items())
                file.write(_record(_double(1, at) + b"\x10" + _varint(step) + _bytes(5, summary)))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
