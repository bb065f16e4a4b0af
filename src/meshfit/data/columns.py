"""A table as one flat file a column, mapped into memory: any row in constant time, one gather a batch.

    numbers           values                      (rows, ...) of their dtype
    bytes and words   values, offsets             the i-th is values[offsets[i]:offsets[i+1]]
    lists             values, offsets             likewise; lists of one length are stored as numbers (rows, length)

Parquet, CSV and JSON lines are turned into this once, in the cache: they cannot be read by row. Ranks share the pages.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.arrow_arrays import Fill, chosen, flat, held, missing_rows, named
from meshfit.data.source import BadFile, BadSample
from meshfit.data.tree import Ragged
from meshfit.errors import DataError

NO_FILL = Fill()
PARTS = ("values", "offsets")


class Columns:
    """The columns in ``folder``; opened where they are read."""

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads((folder / "about.json").read_text())
        self.rows: int = about["rows"]
        self.kinds: dict[str, dict[str, Any]] = about["columns"]
        self.parts: list[tuple[str, int, list[int]]] = [tuple(part) for part in about["parts"]]
        """(file, its first row here, those of its rows that were left out), in order."""
        self.bad: list[str] = about.get("bad", [])
        """Rows that were left out, and why."""
        self.missing: dict[int, str] = dict(about.get("missing", []))
        """Rows of the last file that have no value, and in which column."""
        self._open: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @cached_property
    def _place(self) -> NDArray[np.int64]:
        """Of one file: where each of its rows stands among those without a missing value."""
        good = np.ones(self.rows + len(self.missing), bool)
        good[list(self.missing)] = False
        return np.cumsum(good) - 1

    def rows_of_file(self, names: list[str], rows: NDArray[np.int64], name_of: Callable[[int], str]) -> dict[str, Any]:
        """Columns of one file by its own row numbers. A row without a value is bad; it is called ``name_of(row)``."""
        for i in self.missing.keys() & set(rows.tolist()):
            raise BadSample(f"{name_of(i)} has no value in column {self.missing[i]!r}")
        return {name: self.gather(name, self._place[rows]) for name in names}

    @property
    def names(self) -> list[str]:
        return list(self.kinds)

    def name_of(self, row: int) -> str:
        """File and row, counted from 0 in its file."""
        name, first, left_out = next(part for part in reversed(self.parts) if part[1] <= row)
        row -= first
        for other in left_out:
            row += other <= row
        return f"row {row} of {name}"

    def open(self) -> "Columns":
        """Map all of it now: whoever removes the folder later does no harm."""
        for name, kind in self.kinds.items():
            for part in ("values", "offsets") if kind["ragged"] else ("values",):
                self._mapped(name, part)
        return self

    def gather(self, name: str, rows: NDArray[np.int64]) -> Any:
        """The values of ``rows``: a tensor, or ``Ragged`` of bytes, words or tensors."""
        kind = self.kinds[name]
        offsets = self._mapped(name, "offsets") if kind["ragged"] else None
        return gathered(kind, self._mapped(name, "values"), offsets, rows)

    def _mapped(self, name: str, part: str) -> NDArray[Any]:
        kind = self.kinds[name]
        path = self.folder / f"{kind['file']}.{part}"
        if path.name not in self._open:
            dtype, shape = (np.dtype(kind["dtype"]), kind["shape"]) if part == "values" else (np.dtype(np.int64), ())
            flat = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
            self._open[path.name] = np.asarray(flat).reshape(-1 if flat.size else 0, *shape)
        return self._open[path.name]


def gathered(
    kind: dict[str, Any], values: NDArray[Any], offsets: NDArray[np.int64] | None, rows: NDArray[np.int64]
) -> Any:
    """Some rows of a column: a tensor, or ``Ragged`` of bytes, words or tensors."""
    if offsets is None:
        found = np.take(values, rows, axis=0)
        single = values.ndim == 1 and values.dtype.kind in "iu"  # labels: what torch's losses and embeddings take
        return torch.from_numpy(found.astype(np.int64) if single else found)
    starts, stops = offsets[rows].tolist(), offsets[rows + 1].tolist()
    cut = [values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    if kind["is"] == "bytes":
        return Ragged(x.data for x in cut)
    if kind["is"] == "text":
        return Ragged(x.tobytes().decode() for x in cut)
    if len({len(x) for x in cut}) == 1:
        return torch.from_numpy(np.stack(cut))
    return Ragged(torch.from_numpy(np.array(x)) for x in cut)


class ColumnWriter:
    """Writes record batches of Arrow, one after another, as ``Columns``: all of their columns, or ``wanted`` ("a.b" is
    a field of a struct). Columns are matched by their names, whatever their order. What a file lacks is missing in
    each of its rows. Types that differ between files become one that holds both exactly, or are refused.

    ``fill`` says what stands for missing values. Rows that still have one are refused, or, with ``skips``, left out and
    listed in ``bad``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wanted: list[str] | None = None,
        types: Mapping[str, Any] | None = None,
        fill: Fill = NO_FILL,
        skips: bool = False,
    ):
        self.folder, self.rows, self.wanted, self.fill, self.skips = folder, 0, wanted, fill, skips
        self.types = types or {}
        """Those that are known beforehand, of Arrow."""
        self.kinds: dict[str, dict[str, Any]] = {}
        self.parts: list[tuple[str, int, list[int]]] = []
        self.ends: dict[str, int] = {}
        self.first: dict[str, str] = {}
        """The file in which a column was first met."""
        self.bad: list[str] = []
        self.missing: dict[int, str] = {}
        """Rows of the last file that have no value, and in which column."""

    def add_file(self, name: str, batches: Iterable[Any]) -> None:
        self.parts.append((name, self.rows, []))
        self.missing = {}
        seen = 0
        for batch in batches:
            names = batch.schema.names
            if len(set(names)) != len(names):
                twice = next(n for n in names if names.count(n) > 1)
                raise DataError(f"{name} has two columns named {twice!r}", "give each a name of its own")
            if not batch.num_rows:
                continue
            arrays = self._without_missing(self._filled(batch, name), name, seen)
            seen += batch.num_rows
            count = len(next(iter(arrays.values()))) if arrays else batch.num_rows
            for column, array in arrays.items():
                if count:
                    self._add(column, array, name)
            self.rows += count
        self.parts[-1][2].extend(sorted(self.missing))

    def try_file(self, name: str, batches: Iterable[Any]) -> BadFile | None:
        """The same; what was wrong with a file that cannot be read to its end, of which nothing stays."""
        before = copy(self.kinds), copy(self.first), copy(self.ends), len(self.bad), self.rows
        counts = {
            column: self._file(kind, "values").stat().st_size // _width(kind) for column, kind in before[0].items()
        }
        try:
            self.add_file(name, batches)
        except BadFile as error:
            self.kinds, self.first, self.ends, kept, self.rows = before
            self.parts.pop()
            self.missing = {}
            del self.bad[kept:]
            for column, kind in self.kinds.items():  # whose type may be wider now
                os.truncate(self._file(kind, "values"), counts[column] * _width(kind))
                if kind["ragged"]:
                    os.truncate(self._file(kind, "offsets"), 8 * (self.rows + 1))
            for left in set(self.folder.iterdir()) - {self._file(k, p) for k in self.kinds.values() for p in PARTS}:
                left.unlink()
            return error
        return None

    def close(self) -> None:
        about = {"rows": self.rows, "columns": self.kinds, "parts": self.parts, "bad": self.bad}
        about["missing"] = list(self.missing.items())
        (self.folder / "about.json").write_text(json.dumps(about))

    def _filled(self, batch: Any, file: str) -> dict[str, Any]:
        """The columns of a batch, and what stands for those that it lacks."""
        import pyarrow as pa

        names = batch.schema.names if self.wanted is None else self.wanted
        there = {name: array for name in names if (array := chosen(batch, name)) is not None}
        asked = list(self.kinds) if self.wanted is None else self.wanted
        lacking = [name for name in asked if name not in there]
        new = [name for name in there if name not in self.kinds] if self.rows else []
        if not all(map(self.fill.covers, lacking + new)):
            raise different(file, list(there), self.parts[0][0] if len(self.parts) > 1 else "the others", asked)
        arrays = {}
        for column in [*there, *lacking]:
            array = there[column] if column in there else pa.nulls(batch.num_rows)
            with named(column, array.type, file):
                array = held(array)
                array = array.cast(self.types[column]) if column in self.types else array
            arrays[column] = self.fill(array, column, file)
            if column in new:
                self._add(column, self.fill(pa.nulls(self.rows, arrays[column].type), column, file), file)
        return arrays

    def _without_missing(self, arrays: dict[str, Any], file: str, seen: int) -> dict[str, Any]:
        """``arrays`` without the rows in which a value is missing."""
        import pyarrow as pa

        good = np.ones(len(next(iter(arrays.values()), ())), bool)
        for column, array in arrays.items():
            missing = missing_rows(array)
            if missing is None:
                continue
            found = {seen + i: column for i in np.flatnonzero(missing & good).tolist()}
            if found and not self.skips:
                raise DataError(
                    f"column {column!r} has no value in row {min(found)} of {file}",
                    f'fill={{{column!r}: ...}} gives it one, on_bad="skip" leaves such rows out, columns= the column',
                )
            self.missing |= found
            self.bad += [f"row {i} of {file} has no {column!r}" for i in found]
            good &= ~missing
        return arrays if good.all() else {column: array.filter(pa.array(good)) for column, array in arrays.items()}

    def _add(self, column: str, array: Any, file: str) -> None:
        with named(column, array.type, file):
            kind, values, offsets = flat(array)
        if kind["dtype"] == "<u8" and values.size and values.max() > np.iinfo(np.int64).max:
            raise DataError(
                f"column {column!r} of {file} holds {values.max()}, above what int64 holds",
                "store it as bytes or words, or leave it out with columns=",
            )
        known = self.kinds.setdefault(column, {**kind, "file": str(len(self.kinds))})
        first = self.first.setdefault(column, file)
        if known["dtype"] != kind["dtype"]:
            values = self._joined(column, known, kind, values)
        if known | {"dtype": ""} != kind | {"dtype": "", "file": known["file"]} or values is None:
            raise DataError(
                f"column {column!r} of {file} is {_said(kind)}",
                f"in {first} it is {_said(known)}",
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


def _width(kind: dict[str, Any]) -> int:
    return np.dtype(kind["dtype"]).itemsize


def different(file: str, names: list[str], first: str, wanted: list[str]) -> DataError:
    """``file`` has other columns than ``first``."""
    less = ", ".join(repr(n) for n in wanted if n not in names)
    more = ", ".join(repr(n) for n in names if n not in wanted)
    common = [n for n in wanted if n in names]
    return DataError(
        f"{file} differs in its columns from {first}",
        " and ".join([f"it lacks {less}"] * bool(less) + [f"it adds {more}"] * bool(more)),
        f"read what all files have with columns=, {common} say, or open them apart" if common else "open them apart",
        f"or say what stands for what is missing: fill={{{(less or more).partition(',')[0]}: ...}}",
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
