"""safetensors files, as bytes: an 8-byte length, a JSON header, then the tensors one after another.

Written here and not by the library, so that tensors can be copied from devices straight to their place in the
file, hashed as they are written, and synced; read here so that a rank reads the ranges it needs.
"""

import json
import os
import struct
from math import prod
from typing import Any

import torch

from meshfit.checkpoint.box import whole
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.manifest import Stored, StoredBox
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


def header(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file that holds ``tensors`` in their order, without gaps, and the offset of each. All are
    aligned if wider dtypes come first."""
    described: dict[str, Any] = {"__metadata__": metadata}
    ends, at = {}, 0
    for key, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        name, dims = (NAMES[dtype], shape) if dtype in NAMES else ("U8", (*shape, dtype.itemsize))  # unnamed: bytes
        described[key] = {"dtype": name, "shape": dims, "data_offsets": [at, at + size]}
        ends[key] = at
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text)) % 8)
    begin = struct.pack("<Q", len(text)) + text
    return begin, {key: len(begin) + end for key, end in ends.items()}


def read_header(files: Files, name: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    size, where = files.size(name), os.path.join(str(files), name)
    begin = files.read(name, 0, 8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
    if length > min(LARGEST_HEADER, size - 8):
        raise Damaged(f"{where} is no safetensors file", f"it is {size} bytes long, its header would be {length}")
    try:
        described = json.loads(files.read(name, 8, 8 + length))
        metadata = {str(k): str(v) for k, v in described.pop("__metadata__", {}).items()}
        found = {}
        for key, about in described.items():
            first, last = about["data_offsets"]
            shape = tuple(int(n) for n in about["shape"])
            box = StoredBox(name, 8 + length + int(first), whole(shape))
            found[key] = stored = Stored(DTYPES[about["dtype"]], shape, (box,))
            if not 0 <= first <= last <= size - 8 - length or last - first != stored.nbytes:
                raise ValueError(f"{key} is not within the file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where} is no safetensors file", f"its header is damaged: {error}") from None
    return found, metadata
