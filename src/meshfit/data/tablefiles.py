"""Files of rows as Arrow's record batches: Parquet, Arrow, CSV, JSON lines."""

import csv as python_csv
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from meshfit.data.arrow_arrays import Fill, fields_of, root_of
from meshfit.data.blob import Blob, LocalFile, Url
from meshfit.data.remote import folders_of
from meshfit.data.source import BadFile
from meshfit.data.unfold import Unfolding, unfolded
from meshfit.errors import DataError

LARGEST_BLOCK = 2**31 - 2**20
NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class TableFile:
    """One file of rows."""

    blob: Blob
    kind: str
    """ "parquet", "arrow", "csv" or "json"."""
    delimiter: str = ""
    """Of CSV."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the file itself does not hold, and their one value: see with_partitions."""
    given_types: Mapping[str, Any] = field(default_factory=dict)
    """Arrow's types of these."""

    @property
    def name(self) -> str:
        return self.blob.name

    def names(self) -> tuple[list[str], list[str]]:
        """Its columns, and the fields of those that are structs."""
        with readable(self.blob):
            if self.kind == "parquet":
                schema = parquet_file(self.blob).schema_arrow
            elif self.kind == "arrow":
                schema = _arrow_reader(self.blob).schema
            elif self.kind == "csv":
                names = _csv_names(self.blob, self.delimiter)
                return [*names, *self._added(names)], []
            else:
                rows = [row for _, row in _json_rows(self.blob, [])]
                keys = list(dict.fromkeys(key for row in rows for key in row))
                return [*keys, *self._added(keys)], list(dict.fromkeys(name for row in rows for name in _fields(row)))
        return [*schema.names, *self._added(schema.names)], fields_of(schema)

    def batches(
        self, only: list[str] | None, fill: Fill, bad: list[str] | None = None, group: int | None = None
    ) -> Iterator[Any]:
        """Its rows as record batches: of all columns, or those that ``only`` needs; of one row ``group``. A row that
        cannot be read is an error, or is listed in ``bad`` and left out where that is given."""
        import pyarrow as pa

        with readable(self.blob):
            if self.kind == "csv":
                found = _csv(self.blob, only, self.delimiter, bad)
            elif self.kind == "json":
                found = _json(self.blob, only and [n for n in only if n not in self.given], fill, bad)
            else:
                found = _arrow(self.blob, only) if self.kind == "arrow" else _parquet(self.blob, only, group)
            for batch in found:
                for name in self._added(batch.schema.names):
                    if only is None or name in only:
                        value = pa.scalar(self.given[name], self.given_types.get(name))
                        batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
                yield batch

    def _added(self, own: list[str]) -> list[str]:
        return [name for name in self.given if name not in own]


@contextmanager
def readable(blob: Blob) -> Iterator[None]:
    """Name ``blob`` in what goes wrong with reading it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise BadFile(f"{blob.name} cannot be read", str(error).split("\n")[0][:300]) from error


def parquet_file(blob: Blob) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(_opened(blob))


def metadata_of(file: TableFile) -> Any:
    with readable(file.blob):
        return parquet_file(file.blob).metadata


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


def _parquet(blob: Blob, only: list[str] | None, group: int | None) -> Iterable[Any]:
    file = parquet_file(blob)
    groups = range(file.num_row_groups) if group is None else [group]
    if only is None:
        return file.iter_batches(row_groups=groups)
    names = [name for name in only if root_of(name, file.schema_arrow.names)]
    if not names:
        return _without_columns(sum(file.metadata.row_group(i).num_rows for i in groups))
    return file.iter_batches(columns=names, row_groups=groups)


def _without_columns(rows: int) -> Iterable[Any]:
    """Of a file that has none of the columns: its rows alone."""
    import pyarrow as pa

    return [pa.record_batch([pa.nulls(rows)], names=[""])]


def _arrow_reader(blob: Blob) -> Any:
    import pyarrow as pa

    streamed = bytes(blob.read(0, min(6, blob.size))) != b"ARROW1"
    return pa.ipc.open_stream(_opened(blob)) if streamed else pa.ipc.open_file(_opened(blob))


def _arrow(blob: Blob, only: list[str] | None) -> Iterable[Any]:
    reader = _arrow_reader(blob)
    random_access = hasattr(reader, "get_batch")
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if random_access else reader
    roots = _roots(only, reader.schema.names)
    return (batch.select(roots) if roots else batch for batch in batches)


def _roots(only: list[str] | None, known: list[str]) -> list[str]:
    """The columns of ``known`` that ``only`` needs."""
    return list(dict.fromkeys(root for name in only or [] if (root := root_of(name, known)) is not None))


def _csv(blob: Blob, only: list[str] | None, delimiter: str, bad: list[str] | None) -> Iterable[Any]:
    from pyarrow import csv

    def skipped(row: Any) -> str:
        assert bad is not None
        where = f"row {row.number - 2} of {blob.name}" if row.number else f"a row of {blob.name}"
        bad.append(f"{where} has {row.actual_columns} values for {row.expected_columns} columns: {row.text[:80]!r}")
        return "skip"

    # Types are inferred over the whole file, not its first megabyte: a 1.5 may follow a million whole numbers.
    whole = blob.size * (12 if blob.name.endswith(".gz") else 1) + 2**17
    names = _csv_names(blob, delimiter)
    return csv.open_csv(
        _unzipped(blob),
        read_options=csv.ReadOptions(block_size=whole if whole <= LARGEST_BLOCK else 2**28),
        parse_options=csv.ParseOptions(
            delimiter=_separator(blob, delimiter), invalid_row_handler=None if bad is None else skipped
        ),
        convert_options=csv.ConvertOptions(include_columns=_roots(only, names)),
    )


def _unzipped(blob: Blob) -> Any:
    import pyarrow as pa

    if not blob.name.endswith(".gz"):
        return _opened(blob)
    return pa.PythonFile(io.BufferedReader(Unfolding(blob.name, blob.read()), 2**20), mode="r")


def _separator(blob: Blob, delimiter: str) -> str:
    return delimiter or ("\t" if ".tsv" in blob.name.lower() else ",")


def _csv_names(blob: Blob, delimiter: str) -> list[str]:
    """The columns of the header. One that holds no separator, but what others separate columns with, is refused."""
    header = _unzipped(blob).read(2**20).partition(b"\n")[0].decode("utf-8-sig", "replace").strip()
    separator, other = _separator(blob, delimiter), max(";\t|,", key=header.count)
    if not delimiter and separator not in header and other in header:
        raise DataError(
            f"{blob.name} would be one column, {header[:60]!r}",
            f"its header holds {other!r} and no {separator!r}",
            f"say what separates its columns: delimiter={other!r}",
        )
    try:
        return next(iter(python_csv.reader([header], delimiter=separator)), [])
    except python_csv.Error as error:
        raise BadFile(f"{blob.name} cannot be read", f"its header: {error}") from None


def _json(blob: Blob, only: list[str] | None, fill: Fill, bad: list[str] | None) -> Iterable[Any]:
    import pyarrow as pa

    parsed = list(_json_rows(blob, bad))
    keys = dict.fromkeys(key for _, row in parsed for key in row)
    asked = list(dict.fromkeys(root_of(name, keys) or name for name in only)) if only is not None else None
    names = asked if asked is not None else [name for name in keys if (parsed and name in parsed[0][1])]
    names += [name for name in keys if asked is None and name not in names and fill.covers(name)]
    rows, first = [], parsed[0][0] if parsed and asked is None else 0
    for number, row in parsed:
        wrong = [name for name in names if name not in row and not fill.covers(name)]
        more = [name for name in row if name not in names] if asked is None else []
        if not wrong and not more:
            rows.append(row)
            continue
        text = f"line {number} of {blob.name} {f'lacks {wrong[0]!r}' if wrong else f'has {more[0]!r}'}"
        if bad is None:
            than = f"which line {first} {'has' if wrong else 'lacks'}" if first else "which columns= names"
            raise DataError(
                f"{text}, {than}",
                "give every line the same keys, or name them with columns=",
                f"or say what stands for what is missing: fill={{{(wrong or more)[0]!r}: ...}}",
            )
        bad.append(text)
    columns = {}
    for name in names if rows else []:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except pa.ArrowException as error:
            raise DataError(f"{name!r} of {blob.name} is of several types", str(error)[:200]) from error
    return pa.table(columns).combine_chunks().to_batches() if columns else []


def _fields(row: dict[str, Any]) -> Iterator[str]:
    """The fields of the objects in a line: "a.b"."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in [*value, *_fields(value)])


def _json_rows(blob: Blob, bad: list[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the lines, and the numbers of these, from 1."""
    text = bytes(blob.read())
    for number, line in enumerate((unfolded(blob.name, text) if blob.name.endswith(".gz") else text).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row, wrong, why = json.loads(line), "is no object", '{"text": "...", "label": 3}, say'
        except (ValueError, RecursionError) as error:
            row, wrong, why = None, "is not JSON", str(error)
        if isinstance(row, dict):
            yield number, row
        elif bad is None:
            raise DataError(f"line {number} of {blob.name} {wrong}", why)
        else:
            bad.append(f"line {number} of {blob.name} {wrong}")


# Columns that folders give: year=2024/month=01/part-0.parquet, as Hive and Spark write


def with_partitions(files: list[TableFile], url: Url | Sequence[Url]) -> list[TableFile]:
    """``files`` with the columns that folders below ``url`` give. Whole numbers are int64, all else words."""
    import pyarrow as pa

    urls = [url] if isinstance(url, str | Path) else list(url)
    names = {file.name for file in files}
    given = [folders_of(each) for each in urls]
    base = _common([parts[:-1] if "/".join(parts) in names else parts for parts in given])
    found: list[dict[str, Any]] = []
    for file in files:
        folders = file.name.split("?")[0].split("/")[:-1]
        pairs = [each.partition("=") for each in folders[len(_common([base, folders])) :] if "=" in each]
        found.append({key: None if value == NULL else unquote(value) for key, _, value in pairs if key})
    types: dict[str, Any] = {}
    for key in {key for each in found for key in each}:
        values = [value for each in found if (value := each.get(key)) is not None]
        types[key] = pa.string()
        if all(re.fullmatch(r"-?\d{1,18}", value) for value in values):
            types[key] = pa.int64()
            found = [each | {key: int(each[key])} if each.get(key) is not None else each for each in found]
    return [replace(file, given=each, given_types=types) for file, each in zip(files, found, strict=True)]


def _common(rows: list[list[str]]) -> list[str]:
    """What all begin with."""
    return [each for each, *_ in takewhile(lambda parts: len(set(parts)) == 1, zip(*rows, strict=False))]
