"""safetensors files, as bytes: an 8-byte length, a JSON header, then the tensors one after another.

Written here and not by the library, so that tensors can be copied from devices straight to where they will lie in the
file, hashed as they are written, and synced; read here so that a rank reads the ranges it needs.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from meshfit.errors import Damaged

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LARGEST_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def header(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file that holds ``tensors`` in their order, and where each will lie.

    They lie without gaps, so each is aligned if wider dtypes come first.
    """
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    ends, at = {}, 0
    for key, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        name, stored = _as_stored(dtype, shape)
        described[key] = {"dtype": name, "shape": list(stored), "data_offsets": [at, at + size]}
        ends[key] = at
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text)) % 8)
    begin = struct.pack("<Q", len(text)) + text
    return begin, {key: len(begin) + end for key, end in ends.items()}


def _as_stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The name and shape of a tensor in a file; what the format has no name for is bytes."""
    if dtype in NAMES:
        return NAMES[dtype], shape
    return "U8", (*shape, dtype.itemsize)


def parse(begin: bytes, size: int, name: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file of ``size`` bytes, and its metadata. ``begin`` holds its length and header."""
    length = header_length(begin[:8], size, name)
    try:
        described = json.loads(begin[8 : 8 + length])
        metadata = {str(k): str(v) for k, v in described.pop("__metadata__", {}).items()}
        found = {}
        for key, about in described.items():
            first, last = about["data_offsets"]
            entry = Entry(DTYPES[about["dtype"]], tuple(int(n) for n in about["shape"]), 8 + length + int(first))
            if not 0 <= first <= last <= size - 8 - length or last - first != entry.nbytes:
                raise ValueError(f"{key} does not lie within the file")
            found[key] = entry
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{name} is no safetensors file", f"its header is damaged: {error}") from None
    return found, metadata


def header_length(first: bytes, size: int, name: str) -> int:
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
    if length > min(LARGEST_HEADER, size - 8):
        raise Damaged(f"{name} is no safetensors file", f"it is {size} bytes long, its header would be {length}")
    return length
