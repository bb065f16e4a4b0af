"""NumPy's files: .npy, .npz, and raw binary of a known dtype and shape. Mapped, not loaded."""

import io
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree, unfold
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.remote import BLOCK
from meshfit.data.source import Memory, Source
from meshfit.errors import DataError


class Rows:
    """A file of equally long rows, the first at ``offset`` bytes, the next ``stride`` further; opened where read."""

    def __init__(self, blob: Blob, dtype: Any, shape: tuple[int, ...], offset: int = 0, stride: int | None = None):
        self.blob, self.dtype, self.shape, self.offset = blob, np.dtype(dtype), tuple(shape), offset
        self.width = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.stride = self.width if stride is None else stride
        self._view: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_view": None}

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """Where the file is far away and larger than half of its cache: what a block holds."""
        cache = getattr(self.blob, "cache", None)
        if cache is None or self.blob.size < cache.most / 2:
            return None
        each = max(1, BLOCK // self.stride)
        return np.append(np.arange(0, len(self), each), len(self))

    def gather(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(self.blob, LocalFile):
            view = self.view  # np.take would first copy rows that overlap, all of them
            return np.take(view, ids, axis=0) if view.flags.c_contiguous else view[ids]
        starts = (self.offset + ids * self.stride).tolist()
        cut = self.blob.ranges(starts, [start + self.width for start in starts])
        rows = np.empty((len(ids), self.width), np.uint8)
        for row, data in zip(rows, cut, strict=True):
            row[:] = np.frombuffer(data, np.uint8)
        return rows.view(self.dtype).reshape(len(ids), *self.shape[1:])

    @property
    def view(self) -> NDArray[Any]:
        if self._view is None:
            assert isinstance(self.blob, LocalFile)
            whole = np.asarray(self.blob.bytes)
            if self.offset % self.dtype.itemsize or self.stride % self.dtype.itemsize:
                raise DataError(f"the numbers of {self.blob.name} are not at multiples of their size")
            inner = np.empty(self.shape[1:], self.dtype).strides
            flat = whole[self.offset :]
            flat = flat[: len(flat) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
            self._view = np.lib.stride_tricks.as_strided(flat, self.shape, (self.stride, *inner), writeable=False)
        return self._view


class Arrays(Source):
    """Files of rows side by side: one tensor, or a tuple or dict of them."""

    def __init__(self, rows: Mapping[str, Rows] | tuple[Rows, ...] | Rows):
        self.rows, self._all = rows, list(tree.leaves(rows))
        if len({len(r) for r in self._all}) != 1:
            found = ", ".join(f"{r.blob.name} {r.shape}" for r in self._all)
            raise DataError("the arrays differ in length", found, "the first dim is the sample")
        self.waits = any(not isinstance(r.blob, LocalFile) for r in self._all)
        self.blocks = next((r.blocks for r in self._all if r.blocks is not None), None)

    def __len__(self) -> int:
        return len(self._all[0])

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        def gathered(rows: Rows) -> torch.Tensor:
            found = rows.gather(ids)
            return torch.from_numpy(found.astype(found.dtype.newbyteorder("="), copy=False))

        return tree.map_leaves(gathered, self.rows)

    def name_of(self, i: int) -> str:
        return f"row {i} of {self._all[0].blob.name}"

    @property
    def fingerprint(self) -> str:
        return f"arrays {tag_of([r.blob for r in self._all])} {len(self)}"


def arrays(
    *urls: Url | Mapping[str, Url],
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    on_bad: str = "stop",
) -> Source:
    """.npy files side by side: ``arrays("x.npy", "y.npy")`` gives (x, y), a dict of them a dict; an .npz the dict of
    its arrays. Raw binary is read with ``dtype`` and the ``shape`` of one row."""

    def one(url: Url) -> Rows:
        blobs = find(url, storage=storage, cache=cache)
        if len(blobs) != 1:
            raise DataError(f"{url} is {len(blobs)} files", "arrays are one file each")
        return raw(blobs[0], dtype, tuple(shape or ())) if dtype is not None else npy(blobs[0])

    if len(urls) == 1 and isinstance(urls[0], Mapping):
        return Arrays({key: one(url) for key, url in urls[0].items()}).on_bad(on_bad)
    if len(urls) == 1 and str(urls[0]).endswith(".npz"):
        return _npz(find(str(urls[0]), storage=storage, cache=cache)[0])
    made = tuple(one(url) for url in urls if not isinstance(url, Mapping))
    return Arrays(made[0] if len(made) == 1 else made).on_bad(on_bad)


def raw(blob: Blob, dtype: Any, row: tuple[int, ...]) -> Rows:
    """A binary file of rows and nothing else."""
    width = math.prod(row) * np.dtype(dtype).itemsize
    rows, left = divmod(blob.size, width)
    if left:
        raise DataError(
            f"{blob.name} is no whole number of rows of {row} {np.dtype(dtype)}",
            f"{blob.size} bytes = {rows} rows of {width} and {left} more",
        )
    return Rows(blob, dtype, (rows, *row))


def npy(blob: Blob) -> Rows:
    """An .npy file, by its header."""
    head = io.BytesIO(bytes(blob.read(0, min(blob.size, 4096))))
    try:
        shape, fortran, dtype = unfold.npy_header(head)
    except ValueError as error:
        raise DataError(f"{blob.name} is no .npy file", str(error)) from error
    if fortran and len(shape) > 1:
        raise DataError(f"{blob.name} is in column order", "save np.ascontiguousarray(x): rows are read whole")
    if dtype.hasobject:
        raise DataError(f"{blob.name} holds Python objects, not numbers", "save arrays of numbers")
    if not shape:
        raise DataError(f"{blob.name} holds one number, not samples")
    if min(shape) < 0:
        raise DataError(f"{blob.name} is no .npy file", f"its shape is {shape}")
    if head.tell() + math.prod(shape) * dtype.itemsize > blob.size:
        raise DataError(f"{blob.name} is cut short", f"{blob.size} bytes, but {shape} {dtype} needs more")
    return Rows(blob, dtype, shape, head.tell())


def _npz(blob: Blob) -> Source:
    data = bytes(blob.read())
    unfold.check_zip(blob.name, data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            found = {name.removesuffix(".npy"): unfold.array(held.read(name)) for name in held.namelist()}
        return Memory(found, blob.name)
    except (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{blob.name} cannot be read", str(error) or type(error).__name__) from None
