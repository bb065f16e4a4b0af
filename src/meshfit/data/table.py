"""Rows of files: Parquet, Arrow, CSV, JSON lines. What a sample is, ``columns=`` says (rows.py).

Folders like year=2024/ below the path are columns too. What a file lacks is missing in all of its rows; ``fill=`` says
what stands for missing values.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.arrow_arrays import Fill, chosen, held, named
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.chain import SKIPPED, within
from meshfit.data.columns import Columns, ColumnWriter, different
from meshfit.data.order import WINDOW, by_part, part_of
from meshfit.data.rows import Asked, ColumnSource, known_names, names_in
from meshfit.data.source import BadFile, BadSample, Source
from meshfit.data.tablefiles import TableFile, metadata_of, with_partitions
from meshfit.errors import DataError


class FileTable(ColumnSource):
    """Rows of files, kept as ``Columns`` in the cache."""

    def __init__(self, files: list[TableFile], columns: Asked, cache: Cache, images: bool, fill: Fill):
        super().__init__(columns, images)
        self.files, self.cache, self.fill = files, cache, fill

    @property
    def fingerprint(self) -> str:
        return f"{self.files[0].kind} {tag_of([file.blob for file in self.files])} {len(self)}"


class Table(FileTable):
    """Rows of files that are turned into ``Columns`` when they are first opened."""

    skips: float = 0.0
    """Largest share of rows that may be left out when the files are converted; 0: none."""

    _columns: Columns | None = None

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
    def left_out(self) -> list[str]:
        return self.columns.bad


class RowGroups(FileTable):
    """Rows of Parquet files that are too large to be turned into columns as a whole: row groups are, as they come.

    A row costs its whole row group, so order goes by windows (order.py): the groups are shuffled, then the rows inside
    each window of a few groups. Every rank needs all groups of a window. The first on a host that asks for one reads
    it, decompresses it and writes it to the cache as ``Columns``; the others wait for it and map the same pages. The
    cache keeps as many as it may hold, so that they are often there in the next epoch."""

    def __init__(self, files: list[TableFile], columns: Asked, cache: Cache, images: bool, fill: Fill, skips: float):
        super().__init__(files, columns, cache, images, fill)
        self.lost: list[BadFile] = []
        """Files that cannot be read and were left out: at most a share of ``skips``."""
        self.groups: list[tuple[int, int]] = []
        """(file, number of the row group in it)."""
        known = known_names(files, columns)
        if columns is None and fill.asked is not None:
            known = list(dict.fromkeys(name for file in files for name in file.names()[0])), []
        self.names = names_in(columns, *known)
        self.types: dict[str, Any] = {}
        """Of Arrow, such that they hold what all files have."""
        firsts = [0]
        for at, file in enumerate(files):
            try:
                metadata = metadata_of(file)
            except BadFile as error:
                self.lost.append(error)
                within_files(self.lost, len(files), skips)
                continue
            self._add_types(file, metadata.schema.to_arrow_schema())
            for i in range(metadata.num_row_groups):
                self.groups.append((at, i))
                firsts.append(firsts[-1] + metadata.row_group(i).num_rows)
        self.blocks = self.firsts = np.array(firsts)
        self.waits = not isinstance(files[0].blob, LocalFile)
        self.decompressed = 0
        """Bytes of the files that this process has decompressed."""
        self._fresh()

    def _add_types(self, file: TableFile, schema: Any) -> None:
        """Widen the types to hold what ``file`` has; refuse it where none does, or where its columns are others."""
        import pyarrow as pa

        empty = pa.RecordBatch.from_pylist([], schema=schema)
        for name in [name for name in file.given if name not in schema.names]:
            empty = empty.append_column(name, pa.array([], file.given_types.get(name)))
        there = [name for name in self.names if chosen(empty, name) is not None]
        lacking = [name for name in self.names if name not in there and not self.fill.covers(name)]
        more = [name for name in empty.schema.names if self.asked is None and name not in self.names]
        if lacking or more:
            raise different(file.name, there + more, self.files[0].name, self.names)
        for name in there:
            found = chosen(empty, name)
            with named(name, found.type, file.name):
                mine = held(found).type
            before = self.types.get(name, mine)
            self.types[name] = common = _common(before, mine)
            if common is None:
                raise DataError(
                    f"column {name!r} of {file.name} is {mine}",
                    f"in {self.files[0].name} it is {before}",
                    "give it one type, or leave it out with columns=",
                )

    def _fresh(self) -> None:
        self._held: OrderedDict[int, Columns] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_held", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fresh()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        parts, places = [], []
        for group, at, rows in by_part(self.firsts, ids):
            try:
                columns = self._group(group)
            except BadFile as error:
                raise BadSample(
                    f"{self.name_of(int(ids[at[0]]))} is in a row group that cannot be read", str(error)
                ) from error
            name_of = lambda row, first=self.firsts[group]: self.name_of(int(first + row))
            parts.append(columns.rows_of_file(self.names, rows, name_of))
            places.append(at)
        order = np.argsort(np.concatenate(places))
        return {name: tree.take(_joined([part[name] for part in parts]), order) for name in self.names}

    def _group(self, group: int) -> Columns:
        with self._lock:
            if group not in self._held:
                self._held[group] = self._opened(group)
            self._held.move_to_end(group)
            while len(self._held) > WINDOW + 1:
                self._held.popitem(last=False)
            return self._held[group]

    def _opened(self, group: int) -> Columns:
        at, i = self.groups[group]
        file = self.files[at]
        how = f"{self.names} {self.types} {dict(file.given)} {self.fill.asked}"
        key = f"group 2 {i} of {tag_of([file.blob])} {how}"
        for last in (False, False, True):
            folder = self.cache.folder(key, lambda place: self._write(file, i, place), kind="groups", keep=2 * WINDOW)
            try:
                return Columns(folder).open()
            except FileNotFoundError:  # somebody needed the room at this very moment
                if last:
                    raise
        raise AssertionError

    def _write(self, file: TableFile, i: int, place: Path) -> None:
        """Row group ``i`` of ``file`` as columns in ``place``."""
        metadata = metadata_of(file).row_group(i)
        writer = ColumnWriter(place, wanted=self.names, types=self.types, fill=self.fill, skips=True)
        writer.add_file(file.name, file.batches(self.names, self.fill, group=i))
        writer.close()
        wanted = tuple(f"{name}." for name in self.names)
        chunks = [metadata.column(k) for k in range(metadata.num_columns)]
        self.decompressed += sum(
            chunk.total_compressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(wanted)
        )

    def name_of(self, i: int) -> str:
        file, _ = self.groups[part_of(self.firsts, i)[0]]
        first = self.firsts[[at for at, _ in self.groups].index(file)]
        return f"row {i - first} of {self.files[file].name}"

    @property
    def left_out(self) -> list[str]:
        return [str(error).replace("\n", ":") for error in self.lost]


def _common(one: Any, other: Any) -> Any:
    """A type of Arrow that holds what both do; None where there is none. Values are checked when they are read."""
    import pyarrow as pa

    words = [pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in (one, other)]
    if words[0] != words[1] and not (pa.types.is_null(one) or pa.types.is_null(other)):
        return None
    try:
        return pa.unify_schemas([pa.schema([("x", one)]), pa.schema([("x", other)])], promote_options="permissive")[
            0
        ].type
    except pa.ArrowException:
        return None


def _joined(parts: list[Any]) -> Any:
    """The values of several groups, one after another."""
    if any(isinstance(part, tree.Ragged) or part.shape[1:] != parts[0].shape[1:] for part in parts):
        return tree.Ragged(item for part in parts for item in part)
    return torch.cat(parts)


def within_files(lost: list[BadFile], files: int, most: float) -> None:
    """Refuse a file that cannot be read; where bad ones are skipped, more than one and than a share of ``most``."""
    if not most or len(lost) == files or len(lost) > max(1, int(most * files)):
        raise lost[-1]


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
            return RowGroups(files, columns, cache, decode, Fill(fill), skips).on_bad(on_bad)
    return Table(files, columns, cache, decode, Fill(fill)).on_bad(on_bad)


def _first_metadata(files: list[TableFile], skips: float) -> tuple[Any, Blob]:
    """Of the first file, or, where bad ones are skipped, the first that can be read."""
    for file in files[:-1] if skips else ():
        with suppress(BadFile):
            return metadata_of(file), file.blob
    last = files[-1] if skips else files[0]
    return metadata_of(last), last.blob
