"""A table as one flat file a column, mapped into memory: any row in constant time, one gather a batch.

    numbers           values                      (rows, ...) of their dtype
    bytes and words   values, offsets             the i-th is values[offsets[i]:offsets[i+1]]
    lists             values, offsets             likewise; lists of one length are stored as numbers (rows, length)

Parquet, CSV and JSON lines are turned into this once, in the cache: they cannot be read by row. Ranks share the pages.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.tree import Ragged
from meshfit.errors import DataError


class Columns:
    """The columns in ``folder``; opened where they are read."""

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads((folder / "about.json").read_text())
        self.rows: int = about["rows"]
        self.kinds: dict[str, dict[str, Any]] = about["columns"]
        self.parts: list[tuple[str, int]] = [tuple(part) for part in about["parts"]]
        """(file, its first row), in order."""
        self._open: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def names(self) -> list[str]:
        return list(self.kinds)

    def name_of(self, row: int) -> str:
        """File and row, counted from 0 in its file."""
        name, first = next(part for part in reversed(self.parts) if part[1] <= row)
        return f"row {row - first} of {name}"

    def gather(self, name: str, rows: NDArray[np.int64]) -> Any:
        """The values of ``rows``: a tensor, or ``Ragged`` of bytes, words or tensors."""
        kind = self.kinds[name]
        values = self._mapped(name, "values")
        if not kind["ragged"]:
            found = np.take(values, rows, axis=0)
            single = values.ndim == 1 and values.dtype.kind in "iu"  # labels: what torch's losses and embeddings take
            return torch.from_numpy(found.astype(np.int64) if single else found)
        offsets = self._mapped(name, "offsets")
        starts, stops = offsets[rows].tolist(), offsets[rows + 1].tolist()
        cut = [values[start:stop] for start, stop in zip(starts, stops, strict=True)]
        if kind["is"] == "bytes":
            return Ragged(x.data for x in cut)
        if kind["is"] == "text":
            return Ragged(x.tobytes().decode() for x in cut)
        if len({len(x) for x in cut}) == 1:
            return torch.from_numpy(np.stack(cut))
        return Ragged(torch.from_numpy(np.array(x)) for x in cut)

    def _mapped(self, name: str, part: str) -> NDArray[Any]:
        file = f"{self.kinds[name]['file']}.{part}"
        if file not in self._open:
            kind = self.kinds[name]
            dtype = np.dtype(np.int64) if part == "offsets" else np.dtype(kind["dtype"])
            path = self.folder / file
            shape = (-1, *kind["shape"]) if part == "values" else (-1,)
            flat = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
            self._open[file] = np.asarray(flat).reshape(shape if flat.size else (0, *shape[1:]))
        return self._open[file]


class Writer:
    """Writes record batches of Arrow, one after another, as ``Columns``."""

    def __init__(self, folder: Path):
        self.folder, self.rows = folder, 0
        self.kinds: dict[str, dict[str, Any]] = {}
        self.parts: list[tuple[str, int]] = []
        self.ends: dict[str, int] = {}

    def add_file(self, name: str, batches: Iterable[Any]) -> None:
        self.parts.append((name, self.rows))
        for batch in batches:
            for i, column in enumerate(batch.schema.names):
                self._add(column, i, batch.column(i), name)
            if set(batch.schema.names) != set(self.kinds):
                missing = sorted(set(self.kinds) ^ set(batch.schema.names))
                raise DataError(f"{name} differs in its columns from {self.parts[0][0]}", f"by {', '.join(missing)}")
            self.rows += batch.num_rows

    def close(self) -> None:
        about = {"rows": self.rows, "columns": self.kinds, "parts": self.parts}
        (self.folder / "about.json").write_text(json.dumps(about))

    def _add(self, column: str, i: int, array: Any, file: str) -> None:
        import pyarrow as pa

        array = _plain(array)
        if pa.types.is_struct(array.type) and {f.name for f in array.type} == {"bytes", "path"}:
            array = _plain(array.field("bytes"))  # how Hugging Face stores images
        if array.null_count and not pa.types.is_floating(array.type):
            row = array.is_null().to_pylist().index(True)
            first = self.parts[-1][1]
            raise DataError(
                f"column {column!r} has no value in row {self.rows - first + row} of {file}",
                "fill it, leave the column out with columns=, or store it as a float (a missing one is NaN)",
            )
        try:
            kind, values, offsets = _flat(array)
        except (pa.ArrowException, NotImplementedError, TypeError, ValueError) as error:
            raise DataError(
                f"column {column!r} of {file} is {array.type}, which is no tensor",
                "numbers, lists of numbers, words and bytes are; choose others with columns=",
            ) from error
        kind["file"] = str(i)
        known = self.kinds.setdefault(column, kind)
        if known != kind:
            raise DataError(
                f"column {column!r} of {file} is {kind['dtype']} {kind['shape']}",
                f"before, it was {known['dtype']} {known['shape']}",
                "give it one type and length, or leave it out with columns=",
            )
        with (self.folder / f"{i}.values").open("ab") as out:
            out.write(np.ascontiguousarray(values).data if values.size else b"")
        if offsets is not None:
            end = self.ends.get(column)
            shifted = offsets.astype(np.int64) - int(offsets[0]) + (end or 0)
            with (self.folder / f"{i}.offsets").open("ab") as out:
                out.write((shifted if end is None else shifted[1:]).tobytes())
            self.ends[column] = int(shifted[-1])


def _plain(array: Any) -> Any:
    """Without dictionaries, extensions and dates."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_temporal(array.type) and not pa.types.is_duration(array.type):
        array = array.cast(pa.timestamp("us")).cast(pa.int64())
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array


def _flat(array: Any) -> tuple[dict[str, Any], NDArray[Any], NDArray[Any] | None]:
    """What the column is, its values in a row, and where each begins (None: all alike)."""
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        raw = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
        width = kind.byte_width
        raw = raw[array.offset * width : (array.offset + len(array)) * width]
        return _about("numbers", "uint8", (width,)), raw, None
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        array = array.cast(pa.large_binary())
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(array.type):
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
        data = array.buffers()[2]
        values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        if not len(offsets):
            offsets = np.zeros(1, np.int64)
        return _about("text" if text else "bytes", "uint8", (), True), values[offsets[0] : offsets[-1]], offsets
    shape: list[int] = []
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = compute.call_function("list_value_length", [array]).to_numpy(zero_copy_only=False).astype(np.int64)
        inner = _plain(array.flatten())
        if shape or pa.types.is_nested(inner.type) or inner.null_count:
            raise TypeError("lists of lists")
        values = _numbers(inner)
        return _about("lists", values.dtype.str, (), True), values, np.concatenate([[0], np.cumsum(lengths)])
    values = _numbers(array)
    return _about("numbers", values.dtype.str, tuple(shape)), values, None


def _numbers(array: Any) -> NDArray[Any]:
    import pyarrow as pa

    if pa.types.is_boolean(array.type) or pa.types.is_floating(array.type) or pa.types.is_integer(array.type):
        values = array.to_numpy(zero_copy_only=False)
        return values if values.dtype != object else values.astype(np.float64)
    raise TypeError(f"{array.type} is not numbers")


def _about(what: str, dtype: str, shape: tuple[int, ...], ragged: bool = False) -> dict[str, Any]:
    return {"is": what, "dtype": dtype, "shape": list(shape), "ragged": ragged}
