"""Rows of columns: Parquet, Arrow, CSV, JSON lines.

``columns=`` says what a sample is:

    None                         every column, as a dict
    "text"                       that column alone
    ("image", "label")           a tuple: the model's input, then the target
    (["a", "b", "c"], "label")   a, b and c side by side as one float32 row, then the target
    {"x": "image", "y": "label"} a dict under other names

Bytes that are images are decoded to uint8 (channels, height, width); words stay words, for ``map`` to tokenise.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.blob import Blob, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.chain import within
from meshfit.data.columns import Columns, ColumnWriter
from meshfit.data.images import decode, looks_like_image
from meshfit.data.source import BadSample, Source
from meshfit.data.tablefiles import column_names, record_batches
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
        return decode(value, lambda i: self.name_of(int(ids[i]))) if self._pictures[name] else value

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
            return RowGroups(blobs, columns, decode).on_bad(on_bad)
    return Table(blobs, kind, columns, held, decode, delimiter).on_bad(on_bad)
