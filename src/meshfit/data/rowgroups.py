"""Rows of Parquet files that are too large to be turned into columns as a whole: row groups are, as they come.

A row costs its whole row group, so order goes by windows (order.py): the groups are shuffled, then the rows inside each
window of a few groups. Every rank needs all groups of a window. The first on a host that asks for one reads it,
decompresses it and writes it to the cache as ``Columns``; the others wait for it and map the same pages. The cache
keeps as many as it may hold, so that they are often there in the next epoch.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.arrow_arrays import Fill, chosen, held, no_tensor
from meshfit.data.blob import LocalFile, tag_of
from meshfit.data.cache import Cache
from meshfit.data.chain import within_files
from meshfit.data.columns import Columns, ColumnWriter, different
from meshfit.data.order import WINDOW
from meshfit.data.rows import Asked, ColumnSource, known_names, names_in
from meshfit.data.source import BadFile, BadSample
from meshfit.data.tablefiles import TableFile, metadata_of
from meshfit.errors import DataError


class RowGroups(ColumnSource):
    """Rows of Parquet files by row group."""

    def __init__(
        self,
        files: list[TableFile],
        columns: Asked,
        images: bool,
        cache: Cache,
        fill: Fill,
        skips: float = 0.0,
    ):
        super().__init__(columns, images)
        self.files, self.cache, self.fill = files, cache, fill
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
            try:
                mine = held(found).type
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise no_tensor(name, found.type, file.name, error) from error
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
        groups = np.searchsorted(self.firsts, ids, "right") - 1
        parts, places = [], []
        for group in np.unique(groups).tolist():
            at = np.flatnonzero(groups == group)
            try:
                columns = self._group(group)
            except BadFile as error:
                raise BadSample(
                    f"{self.name_of(int(ids[at[0]]))} is in a row group that cannot be read", str(error)
                ) from error
            rows = ids[at] - self.firsts[group]
            for i in columns.missing.keys() & set(rows.tolist()):
                raise BadSample(f"{self.name_of(int(i + self.firsts[group]))} has no value in {columns.missing[i]!r}")
            parts.append({name: columns.gather(name, columns.place[rows]) for name in self.names})
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
        group = int(np.searchsorted(self.firsts, i, "right") - 1)
        file, _ = self.groups[group]
        first = self.firsts[[at for at, _ in self.groups].index(file)]
        return f"row {i - first} of {self.files[file].name}"

    @property
    def left_out(self) -> list[str]:
        return [str(error).replace("\n", ":") for error in self.lost]

    @property
    def fingerprint(self) -> str:
        return f"parquet {tag_of([file.blob for file in self.files])} {len(self)}"


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
