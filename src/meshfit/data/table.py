"""Rows of files: Parquet, Arrow, CSV, JSON lines. What a sample is, ``columns=`` says (rows.py).

Folders like year=2024/ below the path are columns too. What a file lacks is missing in all of its rows; ``fill=`` says
what stands for missing values.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data.arrow_arrays import Fill
from meshfit.data.blob import Blob, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.chain import SKIPPED, within, within_files
from meshfit.data.columns import Columns, ColumnWriter
from meshfit.data.partitions import with_partitions
from meshfit.data.rowgroups import RowGroups
from meshfit.data.rows import Asked, ColumnSource, known_names, names_in
from meshfit.data.source import BadFile, Source
from meshfit.data.tablefiles import TableFile, metadata_of


class Table(ColumnSource):
    """Rows of files that were turned into ``Columns`` in the cache when they were first opened."""

    skips: float = 0.0
    """Largest share of rows that may be left out when the files are converted; 0: none."""

    def __init__(self, files: list[TableFile], columns: Asked, cache: Cache, images: bool, fill: Fill):
        super().__init__(columns, images)
        self.files, self.cache, self.fill = files, cache, fill
        self._columns: Columns | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": None}

    @property
    def columns(self) -> Columns:
        if self._columns is None:
            wanted = None if self.asked is None else sorted(names_in(self.asked, *known_names(self.files, self.asked)))

            def convert(folder: Path) -> None:
                writer = ColumnWriter(folder, wanted=wanted, fill=self.fill, skips=self.skips > 0)
                lost: list[BadFile] = []
                for file in self.files:
                    batches = file.batches(wanted, self.fill, writer.bad if self.skips else None)
                    if (error := writer.try_file(file.name, batches)) is not None:
                        lost.append(error)
                        within_files(lost, len(self.files), self.skips)
                writer.bad += [str(error).replace("\n", ":") for error in lost]
                writer.close()

            skips = " skipping" if self.skips else ""
            given = [dict(file.given) for file in self.files if file.given]
            how = f"{self.files[0].kind}{self.files[0].delimiter} {given} {self.fill.asked}"
            key = f"5 {how} {tag_of([file.blob for file in self.files])} {wanted}{skips}"
            self._columns = held = Columns(self.cache.folder(key, convert))
            names_in(self.asked, held.names)
            within(held.bad, held.rows + len(held.bad), self.skips)
        return self._columns

    def without_unconverted(self, most: float) -> Source:
        mine = copy(self)
        mine.skips = most
        return mine

    def __len__(self) -> int:
        return self.columns.rows

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        return {name: self.columns.gather(name, ids) for name in names_in(self.asked, self.columns.names)}

    def name_of(self, i: int) -> str:
        return self.columns.name_of(i)

    @property
    def fingerprint(self) -> str:
        return f"{self.files[0].kind} {tag_of([file.blob for file in self.files])} {len(self)}"

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
    fill: Any = None,
) -> Source:
    held = Cache.of(cache)
    blobs = find(url, endings, storage=storage, cache=held)
    files = with_partitions([TableFile(blob, kind, delimiter) for blob in blobs], url)
    return of_files(files, columns, cache=held, decode=decode, on_bad=on_bad, fill=fill)


def of_files(
    files: list[TableFile],
    columns: Asked,
    *,
    cache: Cache,
    decode: bool = True,
    on_bad: str = "stop",
    fill: Any = None,
) -> Source:
    """Files of one table: turned into columns once, or read by row groups where that would not fit in the cache."""
    skips = SKIPPED if on_bad == "skip" else 0.0
    if files[0].kind == "parquet":
        first, blob = _first_metadata(files, skips)
        size = sum(first.row_group(i).total_byte_size for i in range(first.num_row_groups))  # uncompressed
        if size * sum(file.blob.size for file in files) / max(1, blob.size) > cache.most / 2:
            return RowGroups(files, columns, decode, cache, Fill(fill), skips).on_bad(on_bad)
    return Table(files, columns, cache, decode, Fill(fill)).on_bad(on_bad)


def _first_metadata(files: list[TableFile], skips: float) -> tuple[Any, Blob]:
    """Of the first file, or, where bad ones are skipped, the first that can be read."""
    for file in files[:-1] if skips else ():
        with suppress(BadFile):
            return metadata_of(file), file.blob
    last = files[-1] if skips else files[0]
    return metadata_of(last), last.blob
