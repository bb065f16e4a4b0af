"""Files of rows as Arrow's record batches: Parquet, Arrow, CSV, JSON lines.

A row that cannot be read is an error, or is listed in ``bad`` and left out where that is given.
"""

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from meshfit.data.blob import Blob, LocalFile
from meshfit.errors import DataError

LARGEST_BLOCK = 2**31 - 2**20


def record_batches(
    blob: Blob, kind: str, only: list[str] | None = None, delimiter: str = "", bad: list[str] | None = None
) -> Iterator[Any]:
    """The batches of a file of ``kind``, of all columns or ``only`` these."""
    with readable(blob):
        if kind == "csv":
            yield from _csv(blob, only, delimiter, bad)
        elif kind == "json":
            yield from _json(blob, only, bad)
        else:
            yield from _parquet(blob, only) if kind == "parquet" else _arrow(blob, only)


def column_names(blob: Blob, kind: str, delimiter: str) -> list[str]:
    """The columns of one file."""
    if kind == "parquet":
        with readable(blob):
            return parquet_file(blob).schema_arrow.names
    if kind == "json":
        return list(next((row for _, row in _json_rows(blob, [])), {}))
    first = next(record_batches(blob, kind, None, delimiter, []), None)
    return [] if first is None else first.schema.names


@contextmanager
def readable(blob: Blob) -> Iterator[None]:
    """Name ``blob`` in what goes wrong with reading it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:  # Arrow's own are OSErrors, too
        raise DataError(f"{blob.name} cannot be read", str(error).split("\n")[0][:300]) from error


def parquet_file(blob: Blob) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(_opened(blob))


def _opened(blob: Blob) -> Any:
    """``blob`` as a file for Arrow."""
    import pyarrow as pa

    if isinstance(blob, LocalFile):
        return pa.memory_map(str(blob.path)) if blob.size else pa.BufferReader(b"")
    return pa.PythonFile(BlobFile(blob), mode="r")


class BlobFile(io.RawIOBase):
    """A blob as a Python file."""

    def __init__(self, blob: Blob):
        self.blob, self.at = blob, 0

    def readinto(self, buffer: Any) -> int:
        stop = min(self.at + len(buffer), self.blob.size)
        data = bytes(self.blob.read(self.at, stop)) if stop > self.at else b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.blob.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _parquet(blob: Blob, only: list[str] | None) -> Iterable[Any]:
    return parquet_file(blob).iter_batches(columns=only)


def _arrow(blob: Blob, only: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa

    file = _opened(blob)
    if bytes(blob.read(0, min(6, blob.size))) == b"ARROW1":
        reader = pa.ipc.open_file(file)
        batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(file)
    return (batch.select(only) if only else batch for batch in batches)


def _csv(blob: Blob, only: list[str] | None, delimiter: str, bad: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa
    from pyarrow import csv

    zipped = blob.name.endswith(".gz")

    def file() -> Any:
        return pa.CompressedInputStream(_opened(blob), "gzip") if zipped else _opened(blob)

    def skipped(row: Any) -> str:
        assert bad is not None
        where = f"row {row.number - 2} of {blob.name}" if row.number else f"a row of {blob.name}"
        bad.append(f"{where} has {row.actual_columns} values for {row.expected_columns} columns: {row.text[:80]!r}")
        return "skip"

    separator = delimiter or ("\t" if ".tsv" in blob.name.lower() else ",")
    if not delimiter:
        _check_header(blob, file(), separator)
    # Types are inferred over the whole file, not its first megabyte: a 1.5 may follow a million whole numbers.
    whole = blob.size * (12 if zipped else 1) + 2**17
    return csv.open_csv(
        file(),
        read_options=csv.ReadOptions(block_size=min(whole, LARGEST_BLOCK) if blob.size <= LARGEST_BLOCK else 2**28),
        parse_options=csv.ParseOptions(delimiter=separator, invalid_row_handler=None if bad is None else skipped),
        convert_options=csv.ConvertOptions(include_columns=only or []),
    )


def _check_header(blob: Blob, file: Any, separator: str) -> None:
    """Refuse a file whose header holds no separator, but what others separate columns with."""
    header = file.read(2**16).partition(b"\n")[0].decode("utf-8", "replace").strip()
    other = max(";\t|,", key=header.count)
    if separator not in header and other in header:
        raise DataError(
            f"{blob.name} would be one column, {header[:60]!r}",
            f"its header holds {other!r} and no {separator!r}",
            f"say what separates its columns: delimiter={other!r}",
        )


def _json(blob: Blob, only: list[str] | None, bad: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa

    names, rows, first = only, [], 0
    for number, row in _json_rows(blob, bad):
        if names is None:
            names, first = list(row), number
        wrong = [name for name in names if name not in row]
        more = [name for name in row if name not in names] if only is None else []
        if not wrong and not more:
            rows.append(row)
            continue
        text = f"line {number} of {blob.name} {f'lacks {wrong[0]!r}' if wrong else f'has {more[0]!r}'}"
        if bad is None:
            than = f"which line {first} {'has' if wrong else 'lacks'}" if first else "which columns= names"
            raise DataError(f"{text}, {than}", "give every line the same keys, or name them with columns=")
        bad.append(text)
    columns = {}
    for name in (names or []) if rows else []:
        try:
            columns[name] = pa.array([row[name] for row in rows])
        except pa.ArrowException as error:
            raise DataError(f"{name!r} of {blob.name} is of several types", str(error)[:200]) from error
    return pa.table(columns).combine_chunks().to_batches() if columns else []


def _json_rows(blob: Blob, bad: list[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the lines, and the numbers of these, from 1."""
    text = bytes(blob.read())
    for number, line in enumerate((gzip.decompress(text) if blob.name.endswith(".gz") else text).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row, wrong, why = json.loads(line), "is no object", '{"text": "...", "label": 3}, say'
        except ValueError as error:
            row, wrong, why = None, "is not JSON", str(error)
        if isinstance(row, dict):
            yield number, row
        elif bad is None:
            raise DataError(f"line {number} of {blob.name} {wrong}", why)
        else:
            bad.append(f"line {number} of {blob.name} {wrong}")
