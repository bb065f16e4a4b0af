"""Parquet too large to be turned into columns: row groups are read as they come, and a few are kept.

A row costs its whole row group, so order goes by windows (order.py): the groups are shuffled, then the rows inside
each window of a few groups, all of which fit in memory.
"""

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.blob import Blob, LocalFile, tag_of
from meshfit.data.columns import Columns, ColumnWriter, different
from meshfit.data.order import WINDOW
from meshfit.data.source import BadSample
from meshfit.data.table import Asked, ColumnSource, names_in
from meshfit.data.tablefiles import parquet_file, readable
from meshfit.errors import DataError


def _metadata(blob: Blob) -> Any:
    with readable(blob):
        return parquet_file(blob).metadata


def decoded_bytes(blobs: Sequence[Blob]) -> int:
    """Bytes of all columns, uncompressed; of many files an estimate from the first."""
    first = _metadata(blobs[0])
    total = sum(first.row_group(i).total_byte_size for i in range(first.num_row_groups))
    return int(total * sum(blob.size for blob in blobs) / max(1, blobs[0].size))


class RowGroups(ColumnSource):
    """Rows of Parquet files, a row group at a time."""

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
