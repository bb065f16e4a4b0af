"""Rows of columns: Parquet, Arrow, CSV, JSON lines.

``columns=`` says what a sample is:

    None                         every column, as a dict
    "text"                       that column alone
    ("image", "label")           a tuple: the model's input, then the target
    (["a", "b", "c"], "label")   a, b and c side by side as one float32 row, then the target
    {"x": "image", "y": "label"} a dict under other names

Bytes that are images are decoded to uint8 (channels, height, width); words stay words, for ``map`` to tokenise.
"""

import tempfile
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.chain import within
from meshfit.data.columns import Columns, ColumnWriter, different
from meshfit.data.images import decode, looks_like_image
from meshfit.data.order import WINDOW
from meshfit.data.source import BadSample, Source
from meshfit.data.tablefiles import column_names, parquet_file, readable, record_batches
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


class ColumnSource(Source):
    """A source of rows: ``raw`` gives columns, ``fetch`` their images decoded, in the form that was ``asked``."""

    def __init__(self, asked: Asked, images: bool):
        self.asked, self.images = asked, images
        self._pictures: dict[str, bool] = {}

    @abstractmethod
    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        """The columns of some rows: tensors, or ``Ragged`` of words, bytes or tensors."""

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return shaped(self.asked, {name: self._decoded(name, value, ids) for name, value in self.raw(ids).items()})

    def _decoded(self, name: str, value: Any, ids: NDArray[np.int64]) -> Any:
        if not self.images or not isinstance(value, Ragged) or not isinstance(value[0], bytes | memoryview | bytearray):
            return value
        if name not in self._pictures:
            self._pictures[name] = any(map(looks_like_image, self._first(name)))
        if self._pictures[name] or any(map(looks_like_image, value[:8])):
            return decode(value, lambda i: self.name_of(int(ids[i])))
        return value

    def _first(self, name: str) -> list[Any]:
        """The first values of a column."""
        found = []
        for i in range(min(8, len(self))):
            with suppress(BadSample):
                found.append(self.raw(np.array([i]))[name][0])
        return found


class Table(ColumnSource):
    """Rows of files that were turned into ``Columns`` in the cache when they were first opened."""

    skips: float = 0.0
    """Largest share of rows that may be left out when the files are converted; 0: none."""

    def __init__(self, blobs: list[Blob], kind: str, columns: Asked, cache: Cache, images: bool, delimiter: str):
        super().__init__(columns, images)
        self.blobs, self.kind, self.cache, self.delimiter = blobs, kind, cache, delimiter
        self._columns: Columns | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": None}

    @property
    def columns(self) -> Columns:
        if self._columns is None:
            needed = None
            if self.asked is not None:
                needed = sorted(names_in(self.asked, column_names(self.blobs[0], self.kind, self.delimiter)))

            def convert(folder: Path) -> None:
                writer = ColumnWriter(folder, skips=self.skips > 0)
                for blob in self.blobs:
                    bad = writer.bad if self.skips else None
                    writer.add_file(blob.name, record_batches(blob, self.kind, needed, self.delimiter, bad))
                writer.close()

            skips = " skipping" if self.skips else ""
            key = f"3 {self.kind}{self.delimiter} {tag_of(self.blobs)} {needed}{skips}"
            self._columns = held = Columns(self.cache.folder(key, convert))
            names_in(self.asked, held.names)
            within(held.bad, held.rows + len(held.bad), self.skips)
        return self._columns

    def on_bad(self, what: str, most: float = 0.01) -> Source:
        """With "skip", rows that cannot be converted are left out too."""
        if what != "skip":
            return super().on_bad(what, most)
        mine = copy(self)
        mine.skips = most
        return Source.on_bad(mine, what, most)

    def __len__(self) -> int:
        return self.columns.rows

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        return {name: self.columns.gather(name, ids) for name in names_in(self.asked, self.columns.names)}

    def name_of(self, i: int) -> str:
        return self.columns.name_of(i)

    @property
    def fingerprint(self) -> str:
        return f"{self.kind} {tag_of(self.blobs)} {len(self)}"

    @property
    def left_out(self) -> list[str]:
        return self.columns.bad


def _metadata(blob: Blob) -> Any:
    with readable(blob):
        return parquet_file(blob).metadata


class RowGroups(ColumnSource):
    """Rows of Parquet files that are too large to be turned into columns: row groups are read as they come, and a few
    are kept. A row costs its whole row group, so order goes by windows (order.py): the groups are shuffled, then the
    rows inside each window of a few groups, all of which fit in memory."""

    def __init__(self, blobs: list[Blob], columns: Asked, images: bool):
        super().__init__(columns, images)
        self.blobs = blobs
        self.groups: list[tuple[int, int]] = []
        """(file, number of the row group in it)."""
        first: Any = None
        firsts = [0]
        for at, blob in enumerate(blobs):
            metadata = _metadata(blob)
            schema = metadata.schema.to_arrow_schema()
            if at == 0:
                first, self.names = schema, names_in(columns, schema.names)
            else:
                self._check(blob, schema, first)
            for i in range(metadata.num_row_groups):
                self.groups.append((at, i))
                firsts.append(firsts[-1] + metadata.row_group(i).num_rows)
        self.blocks = self.firsts = np.array(firsts)
        self.waits = not isinstance(blobs[0], LocalFile)
        self._fresh()

    def _check(self, blob: Blob, schema: Any, first: Any) -> None:
        """Refuse a file whose columns are not those of the first; the order does not matter."""
        has = [name for name in schema.names if self.asked is None or name in self.names]
        if set(has) != set(self.names):
            raise different(blob.name, has, self.blobs[0].name, self.names)
        for name in self.names:
            mine, wanted = schema.field(name).type, first.field(name).type
            if mine != wanted:
                raise DataError(
                    f"column {name!r} of {blob.name} is {mine}",
                    f"in {self.blobs[0].name} it is {wanted}",
                    "give it one type, or leave it out with columns=",
                )

    def _fresh(self) -> None:
        self._held: OrderedDict[int, RowGroup] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_held", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fresh()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        groups = np.searchsorted(self.firsts, ids, "right") - 1
        parts, places = [], []
        for group in np.unique(groups).tolist():
            at = np.flatnonzero(groups == group)
            held = self._group(group)
            rows = ids[at] - self.firsts[group]
            for i in held.missing.keys() & set(rows.tolist()):
                raise BadSample(f"{self.name_of(int(i + self.firsts[group]))} has no value in {held.missing[i]!r}")
            parts.append(tree.take(held.columns, held.place[rows]))
            places.append(at)
        return tree.take(tree.concatenate(parts), np.argsort(np.concatenate(places)))

    def _group(self, group: int) -> "RowGroup":
        with self._lock:
            if group in self._held:
                self._held.move_to_end(group)
                return self._held[group]
            file, i = self.groups[group]
            with readable(self.blobs[file]):
                read = parquet_file(self.blobs[file]).read_row_group(i, columns=self.names)
            self._held[group] = found = _in_memory(read, self.blobs[file].name, self.names)
            while len(self._held) > WINDOW + 1:
                self._held.popitem(last=False)
            return found

    def name_of(self, i: int) -> str:
        group = int(np.searchsorted(self.firsts, i, "right") - 1)
        file, _ = self.groups[group]
        first = self.firsts[[at for at, _ in self.groups].index(file)]
        return f"row {i - first} of {self.blobs[file].name}"

    @property
    def fingerprint(self) -> str:
        return f"parquet {tag_of(self.blobs)} {len(self)}"


@dataclass(frozen=True)
class RowGroup:
    """The rows of a row group: columns of those without a missing value, where each row stands in them, and what is
    missing of the others."""

    columns: dict[str, Any]
    place: NDArray[np.int64]
    missing: dict[int, str]


def _in_memory(table: Any, name: str, wanted: list[str]) -> RowGroup:
    """An Arrow table as a batch of columns."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        writer = ColumnWriter(Path(folder), skips=True)
        writer.add_file(name, table.combine_chunks().to_batches())
        writer.close()
        columns = Columns(Path(folder))
        good = np.ones(table.num_rows, bool)
        good[list(writer.missing)] = False
        held = {column: columns.gather(column, np.arange(columns.rows)) for column in wanted} if columns.rows else {}
        return RowGroup(held, np.cumsum(good) - 1, writer.missing)


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
        first = _metadata(blobs[0])
        size = sum(first.row_group(i).total_byte_size for i in range(first.num_row_groups))  # uncompressed
        if size * sum(blob.size for blob in blobs) / max(1, blobs[0].size) > held.most / 2:
            return RowGroups(blobs, columns, decode).on_bad(on_bad)
    return Table(blobs, kind, columns, held, decode, delimiter).on_bad(on_bad)
