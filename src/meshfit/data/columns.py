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
        self.bad: list[str] = about.get("bad", [])
        """Rows that were left out, and why."""
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
        kind = self.kinds[name]
        path = self.folder / f"{kind['file']}.{part}"
        if path.name not in self._open:
            dtype, shape = (np.dtype(kind["dtype"]), kind["shape"]) if part == "values" else (np.dtype(np.int64), ())
            flat = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
            self._open[path.name] = np.asarray(flat).reshape(-1 if flat.size else 0, *shape)
        return self._open[path.name]


class ColumnWriter:
    """Writes record batches of Arrow, one after another, as ``Columns``. Columns are matched by their names, whatever
    their order; every file must have the same ones. Types that differ between files become one that holds both
    exactly, or are refused.

    ``skips``: rows without a value are left out and listed in ``bad``, instead of refused.
    """

    def __init__(self, folder: Path, skips: bool = False):
        self.folder, self.rows, self.skips = folder, 0, skips
        self.kinds: dict[str, dict[str, Any]] = {}
        self.parts: list[tuple[str, int]] = []
        self.ends: dict[str, int] = {}
        self.bad: list[str] = []
        self.missing: dict[int, str] = {}
        """Rows of the last file that have no value, and in which column."""

    def add_file(self, name: str, batches: Iterable[Any]) -> None:
        import pyarrow as pa

        self.parts.append((name, self.rows))
        self.missing = {}
        seen = 0
        for batch in batches:
            if self.kinds and set(batch.schema.names) != set(self.kinds):
                raise different(name, batch.schema.names, self.parts[0][0], list(self.kinds))
            if len(set(batch.schema.names)) != len(batch.schema.names):
                twice = next(n for n in batch.schema.names if batch.schema.names.count(n) > 1)
                raise DataError(f"{name} has two columns named {twice!r}", "give each a name of its own")
            if not batch.num_rows:
                continue
            arrays = {}
            for column, array in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    arrays[column] = _held(array)
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                    raise _no_tensor(column, array.type, name, error) from error
            arrays = self._without_missing(arrays, name, seen)
            seen += batch.num_rows
            count = len(next(iter(arrays.values()))) if arrays else batch.num_rows
            for column, array in arrays.items():
                if count:
                    self._add(column, array, name)
            self.rows += count

    def close(self) -> None:
        about = {"rows": self.rows, "columns": self.kinds, "parts": self.parts, "bad": self.bad}
        (self.folder / "about.json").write_text(json.dumps(about))

    def _without_missing(self, arrays: dict[str, Any], file: str, seen: int) -> dict[str, Any]:
        """``arrays``, in which no value is missing but those of floats (NaN)."""
        import pyarrow as pa

        good = np.ones(len(next(iter(arrays.values()), ())), bool)
        for column, array in arrays.items():
            if not array.null_count or pa.types.is_floating(array.type):
                continue
            missing = array.is_null().to_numpy(zero_copy_only=False)
            found = {seen + i: column for i in np.flatnonzero(missing & good).tolist()}
            if not self.skips:
                raise DataError(
                    f"column {column!r} has no value in row {min(found)} of {file}",
                    "fill it, leave the column out with columns=, or store it as a float (a missing one is NaN)",
                )
            self.missing |= found
            self.bad += [f"row {i} of {file} has no {column!r}" for i in found]
            good &= ~missing
        return arrays if good.all() else {column: array.filter(pa.array(good)) for column, array in arrays.items()}

    def _add(self, column: str, array: Any, file: str) -> None:
        import pyarrow as pa

        try:
            kind, values, offsets = _flat(array)
        except (pa.ArrowException, NotImplementedError, TypeError, ValueError) as error:
            raise _no_tensor(column, array.type, file, error) from error
        if kind["dtype"] == "<u8" and values.size and values.max() > np.iinfo(np.int64).max:
            raise DataError(
                f"column {column!r} of {file} holds {values.max()}, above what int64 holds",
                "store it as bytes or words, or leave it out with columns=",
            )
        known = self.kinds.setdefault(column, {**kind, "file": str(len(self.kinds))})
        if known["dtype"] != kind["dtype"]:
            values = self._joined(column, known, kind, values)
        if known | {"dtype": ""} != kind | {"dtype": "", "file": known["file"]} or values is None:
            raise DataError(
                f"column {column!r} of {file} is {_said(kind)}",
                f"in {self.parts[0][0]} it is {_said(known)}",
                "give it one type and length, or leave it out with columns=",
            )
        with self._file(known, "values").open("ab") as out:
            out.write(np.ascontiguousarray(values).data if values.size else b"")
        if offsets is not None:
            end = self.ends.get(column)
            shifted = offsets.astype(np.int64) - int(offsets[0]) + (end or 0)
            with self._file(known, "offsets").open("ab") as out:
                out.write((shifted if end is None else shifted[1:]).tobytes())
            self.ends[column] = int(shifted[-1])

    def _file(self, kind: dict[str, Any], part: str) -> Path:
        return self.folder / f"{kind['file']}.{part}"

    def _joined(
        self, column: str, known: dict[str, Any], kind: dict[str, Any], values: NDArray[Any]
    ) -> NDArray[Any] | None:
        """``values`` in a type that holds them and all before them exactly, to which those before are brought; None
        where there is none."""
        both = np.promote_types(known["dtype"], kind["dtype"])
        file = self._file(known, "values")
        before = np.fromfile(file, known["dtype"])
        old, new = _exactly(before, both), _exactly(values, both)
        if old is None or new is None or {known["is"], kind["is"]} & {"text", "bytes"}:
            return None
        if known["dtype"] != both.str:
            file.write_bytes(old.tobytes())
            known["dtype"] = both.str
        return new


def different(file: str, names: list[str], first: str, wanted: list[str]) -> DataError:
    """``file`` has other columns than ``first``."""
    less = ", ".join(repr(n) for n in wanted if n not in names)
    more = ", ".join(repr(n) for n in names if n not in wanted)
    common = [n for n in wanted if n in names]
    return DataError(
        f"{file} differs in its columns from {first}",
        " and ".join([f"it lacks {less}"] * bool(less) + [f"it adds {more}"] * bool(more)),
        f"read what all files have with columns=, {common} say, or open them apart" if common else "open them apart",
    )


def _exactly(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """``values`` as ``dtype`` where that changes none of them."""
    with np.errstate(invalid="ignore", over="ignore"):
        cast = values.astype(dtype)
        return cast if np.array_equal(cast.astype(values.dtype), values, equal_nan=values.dtype.kind == "f") else None


def _said(kind: dict[str, Any]) -> str:
    length = f" of {' x '.join(map(str, kind['shape']))}" if kind["shape"] else ""
    name = "" if kind["is"] in ("text", "bytes") else f"{np.dtype(kind['dtype']).name} "
    return f"{name}{kind['is']}{length}"


def _no_tensor(column: str, kind: Any, file: str, why: Exception) -> DataError:
    return DataError(
        f"column {column!r} of {file} is {kind}, which is no tensor",
        str(why).split("\n")[0][:200],
        "numbers, lists of numbers, words and bytes are; choose others with columns=",
    )


def _held(array: Any) -> Any:
    """What is stored of a column."""
    import pyarrow as pa

    array = _plain(array)
    if pa.types.is_struct(array.type) and {f.name for f in array.type} == {"bytes", "path"}:
        array = _plain(array.field("bytes"))  # how Hugging Face stores images
    if pa.types.is_nested(array.type) and not _lists_of_numbers(array.type):
        raise TypeError("structs, maps and lists of lists have no one shape")
    return array


def _lists_of_numbers(kind: Any) -> bool:
    import pyarrow as pa

    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return not pa.types.is_nested(kind) or (
        (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and not pa.types.is_nested(kind.value_type)
    )


def _plain(array: Any) -> Any:
    """Without dictionaries, extensions, dates and times: these become microseconds."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("us")).cast(pa.int64())  # since 1970; finer ones that would lose are refused
    if pa.types.is_time(array.type):
        array = array.cast(pa.time64("us")).cast(pa.int64())  # since midnight
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
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        array = array.cast(pa.large_binary())
        offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
        data = array.buffers()[2]
        values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
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
