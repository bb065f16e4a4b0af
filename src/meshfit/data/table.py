"""Rows of columns: Parquet, Arrow, CSV, JSON lines.

``columns=`` says what a sample is:

    None                         every column, as a dict
    "text"                       that column alone
    ("image", "label")           a tuple: the model's input, then the target
    (["a", "b", "c"], "label")   a, b and c side by side as one float32 row, then the target
    {"x": "image", "y": "label"} a dict under other names

Bytes that are images are decoded to uint8 (channels, height, width); words stay words, for ``map`` to tokenise.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.chain import within
from meshfit.data.columns import Columns, ColumnWriter
from meshfit.data.images import decode, looks_like_image
from meshfit.data.source import Source
from meshfit.data.tree import Ragged
from meshfit.errors import DataError, did_you_mean

Asked = Any
"""What ``columns=`` takes: see above."""


def names_in(asked: Asked, known: Sequence[str]) -> list[str]:
    """The columns that ``asked`` needs; an unknown one is refused."""
    if asked is None:
        return list(known)
    if isinstance(asked, str):
        if asked not in known:
            raise DataError(f"there is no column {asked!r}", did_you_mean(asked, list(known)))
        return [asked]
    if isinstance(asked, Mapping | tuple | list):
        inner = asked.values() if isinstance(asked, Mapping) else asked
        return list(dict.fromkeys(name for part in inner for name in names_in(part, known)))
    raise DataError(f"columns={asked!r} is not understood", 'write ("image", "label"), say')


def shaped(asked: Asked, columns: Mapping[str, Any]) -> Any:
    """A batch of the form ``asked`` out of a batch of columns."""
    if asked is None:
        return dict(columns)
    if isinstance(asked, str):
        return columns[asked]
    if isinstance(asked, Mapping):
        return {key: shaped(value, columns) for key, value in asked.items()}
    if isinstance(asked, tuple):
        return tuple(shaped(part, columns) for part in asked)
    side = []
    for name in asked:
        value = columns[name]
        if isinstance(value, Ragged):
            raise DataError(f"column {name!r} is no number, so it cannot stand in a row beside others")
        side.append(value.float().reshape(len(value), -1))
    return torch.cat(side, 1)


class Table(Source):
    """Rows of files that were turned into ``Columns`` in the cache when they were first opened."""

    skips: float = 0.0
    """Largest share of rows that may be left out when the files are converted; 0: none."""

    def __init__(
        self, blobs: list[Blob], kind: str, columns: Asked, cache: Cache, images: bool = True, delimiter: str = ""
    ):
        self.blobs, self.kind, self.asked, self.cache, self.images = blobs, kind, columns, cache, images
        self.delimiter = delimiter
        self._columns: Columns | None = None
        self._pictures: dict[str, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": None}

    @property
    def columns(self) -> Columns:
        if self._columns is None:
            skips = " skipping" if self.skips else ""
            key = f"3 {self.kind}{self.delimiter} {tag_of(self.blobs)} {self._needed}{skips}"
            self._columns = held = Columns(self.cache.folder(key, self._convert))
            names_in(self.asked, held.names)
            within(held.bad, held.rows + len(held.bad), self.skips)
        return self._columns

    def on_bad(self, what: str, most: float = 0.01) -> Source:
        """With "skip", rows that cannot be converted are left out too."""
        if what != "skip":
            return super().on_bad(what, most)
        mine = copy(self)
        mine.skips, mine._columns = most, None
        return Source.on_bad(mine, what, most)

    @property
    def _needed(self) -> list[str] | None:
        """Columns to convert; None: all."""
        if self.asked is None:
            return None
        return sorted(names_in(self.asked, self._names(self.blobs[0])))

    def _names(self, blob: Blob) -> list[str]:
        """The columns of one file."""
        if self.kind == "parquet":
            import pyarrow.parquet as pq

            return understood(blob, lambda: pq.ParquetFile(opened(blob)).schema_arrow.names)
        if self.kind == "json":
            return list(next((row for _, row in _json_rows(blob, [])), {}))
        first = next(iter(self._batches(blob, None, [])), None)
        return [] if first is None else first.schema.names

    def _batches(self, blob: Blob, only: list[str] | None, bad: list[str] | None) -> Iterator[Any]:
        """A file's record batches; rows that cannot be read are an error, or listed in ``bad``."""
        readers = {"parquet": _parquet, "arrow": _arrow, "csv": _csv, "json": _json}
        more = {"csv": (self.delimiter, bad), "json": (bad,)}.get(self.kind, ())
        made = understood(blob, lambda: iter(readers[self.kind](blob, only, *more)))
        while (batch := understood(blob, lambda: next(made, None))) is not None:
            yield batch

    def _convert(self, folder: Path) -> None:
        writer, only = ColumnWriter(folder, skips=self.skips > 0), self._needed
        for blob in self.blobs:
            writer.add_file(blob.name, self._batches(blob, only, writer.bad if self.skips else None))
        writer.close()

    def __len__(self) -> int:
        return self.columns.rows

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        held = self.columns
        return shaped(self.asked, {name: self._gather(name, ids) for name in names_in(self.asked, held.names)})

    def _gather(self, name: str, ids: NDArray[np.int64]) -> Any:
        found = self.columns.gather(name, ids)
        if self.images and isinstance(found, Ragged) and self._is_picture(name):
            return decode(found, lambda i: self.name_of(int(ids[i])))
        return found

    def _is_picture(self, name: str) -> bool:
        """Whether the first values of a column of bytes are images."""
        if name not in self._pictures:
            kind = self.columns.kinds[name]["is"]
            first = self.columns.gather(name, np.arange(min(8, len(self)))) if kind == "bytes" else []
            self._pictures[name] = any(looks_like_image(data) for data in first)
        return self._pictures[name]

    def name_of(self, i: int) -> str:
        return self.columns.name_of(i)

    @property
    def fingerprint(self) -> str:
        return f"{self.kind} {tag_of(self.blobs)} {len(self)}"

    @property
    def left_out(self) -> list[str]:
        return self.columns.bad


def parquet(url: Url | Sequence[Url], *, columns: Asked = None, **options: Any) -> Source:
    """Rows of Parquet files: a file, a folder, a pattern, here or in the cloud."""
    return table(url, "parquet", (".parquet", ".pq"), columns, **options)


def arrow(url: Url | Sequence[Url], *, columns: Asked = None, **options: Any) -> Source:
    """Rows of Arrow files (IPC, Feather, Hugging Face's)."""
    return table(url, "arrow", (".arrow", ".feather", ".ipc"), columns, **options)


def csv(url: Url | Sequence[Url], *, columns: Asked = None, delimiter: str = "", **options: Any) -> Source:
    """Rows of CSV (or TSV) files with a header; ``delimiter`` stands between the columns, by default a comma (a tab in
    .tsv)."""
    return table(url, "csv", (".csv", ".tsv", ".csv.gz", ".tsv.gz"), columns, delimiter=delimiter, **options)


def jsonl(url: Url | Sequence[Url], *, columns: Asked = None, **options: Any) -> Source:
    """Rows of JSON lines: one object a line."""
    return table(url, "json", (".jsonl", ".ndjson", ".jsonl.gz"), columns, **options)


def table(
    url: Url | Sequence[Url],
    kind: str,
    endings: tuple[str, ...],
    columns: Asked,
    *,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    decode: bool = True,
    on_bad: str = "stop",
    delimiter: str = "",
) -> Source:
    held = Cache.of(cache)
    blobs = find(url, endings, storage=storage, cache=held)
    if kind == "parquet":
        from meshfit.data.rowgroups import RowGroups, decoded_bytes

        if decoded_bytes(blobs) > held.most / 2:
            return RowGroups(blobs, columns, images=decode).on_bad(on_bad)
    return Table(blobs, kind, columns, held, decode, delimiter).on_bad(on_bad)


def opened(blob: Blob) -> Any:
    """``blob`` as a file for Arrow."""
    import pyarrow as pa

    if isinstance(blob, LocalFile):
        return pa.memory_map(str(blob.path)) if blob.size else pa.BufferReader(b"")
    return pa.PythonFile(_Reader(blob), mode="r")


class _Reader:
    """What Arrow needs of a file, over the ranges of a blob."""

    closed = False

    def __init__(self, blob: Blob):
        self.blob, self.at = blob, 0

    def read(self, count: int = -1) -> bytes:
        stop = self.blob.size if count is None or count < 0 else min(self.at + count, self.blob.size)
        data = bytes(self.blob.read(self.at, stop)) if stop > self.at else b""
        self.at = stop
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.blob.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None: ...

    def flush(self) -> None: ...


def understood(blob: Blob, act: Any) -> Any:
    import pyarrow as pa

    try:
        return act()
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:  # Arrow's own are OSErrors, too
        raise DataError(f"{blob.name} cannot be read", str(error).split("\n")[0][:300]) from error


def _parquet(blob: Blob, only: list[str] | None) -> Iterable[Any]:
    import pyarrow.parquet as pq

    return pq.ParquetFile(opened(blob)).iter_batches(columns=only)


def _arrow(blob: Blob, only: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa

    file = opened(blob)
    if bytes(blob.read(0, min(6, blob.size))) == b"ARROW1":
        reader = pa.ipc.open_file(file)
        batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(file)
    return (batch.select(only) if only else batch for batch in batches)


def _csv(blob: Blob, only: list[str] | None, delimiter: str, bad: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa
    from pyarrow import csv

    def file() -> Any:
        return pa.CompressedInputStream(opened(blob), "gzip") if blob.name.endswith(".gz") else opened(blob)

    def skipped(row: Any) -> str:
        assert bad is not None
        where = f"row {row.number - 2} of {blob.name}" if row.number else f"a row of {blob.name}"
        bad.append(f"{where} has {row.actual_columns} values for {row.expected_columns} columns: {row.text[:80]!r}")
        return "skip"

    separator = delimiter or ("\t" if ".tsv" in blob.name.lower() else ",")
    if not delimiter:
        _one_column(blob, file(), separator)
    how = csv.ParseOptions(delimiter=separator, invalid_row_handler=None if bad is None else skipped)
    # Types are inferred over the whole file, not its first megabyte: a 1.5 may follow a million whole numbers.
    if blob.size <= 2**31 - 2**20:
        block = max(blob.size * (12 if blob.name.endswith(".gz") else 1), 2**16) + 2**16
        read = csv.ReadOptions(block_size=min(block, 2**31 - 2**20))
    else:
        read = csv.ReadOptions(block_size=2**28)
    convert = csv.ConvertOptions(include_columns=only or [])
    return csv.open_csv(file(), read_options=read, parse_options=how, convert_options=convert)


def _one_column(blob: Blob, file: Any, separator: str) -> None:
    """Refuse a file whose header holds no separator, but what others separate columns with."""
    header = file.read(2**16).partition(b"\n")[0].decode("utf-8", "replace").strip()
    if separator in header:
        return
    other = max(";\t|,", key=header.count)
    if other in header:
        raise DataError(
            f"{blob.name} would be one column, {header[:60]!r}",
            f"its header holds {other!r} and no {separator!r}",
            f"say what separates its columns: delimiter={other!r}",
        )


def _json(blob: Blob, only: list[str] | None, bad: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa

    names, rows = only, []
    first = 0
    for number, row in _json_rows(blob, bad):
        if names is None:
            names, first = list(row), number
        wrong = [name for name in names if name not in row]
        more = [name for name in row if name not in names] if only is None else []
        if wrong or more:
            text = f"line {number} of {blob.name}"
            what = f"lacks {wrong[0]!r}" if wrong else f"has {more[0]!r}"
            if bad is None:
                than = f"which line {first} {'has' if wrong else 'lacks'}" if first else "which columns= names"
                raise DataError(f"{text} {what}, {than}", "give every line the same keys, or name them with columns=")
            bad.append(f"{text} {what}")
            continue
        rows.append(row)
    if not rows:
        return []
    try:
        columns = {name: pa.array([row[name] for row in rows]) for name in names or []}
    except pa.ArrowException:  # which column it is
        for name in names or []:
            try:
                pa.array([row[name] for row in rows])
            except pa.ArrowException as error:
                raise DataError(f"{name!r} of {blob.name} is of several types", str(error)[:200]) from error
        raise
    return pa.table(columns).combine_chunks().to_batches()


def _json_rows(blob: Blob, bad: list[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the lines, and the numbers of these, from 1."""
    import gzip

    text = bytes(blob.read())
    lines = (gzip.decompress(text) if blob.name.endswith(".gz") else text).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of {blob.name}"
        try:
            row = json.loads(line)
        except ValueError as error:
            if bad is None:
                raise DataError(f"{where} is not JSON", str(error)) from error
            bad.append(f"{where} is not JSON")
            continue
        if isinstance(row, dict):
            yield number, row
        elif bad is None:
            raise DataError(f"{where} is no object", '{"text": "...", "label": 3}, say')
        else:
            bad.append(f"{where} is no object")
