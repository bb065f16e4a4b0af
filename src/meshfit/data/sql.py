"""Rows of a database by key: ``sql("postgresql://...", "select id, image, label from train", key="id")``.

A cursor cannot be resumed, shuffled or shared; keys can. The ordered list of keys is taken once, when the source is
made; a batch is one query for its keys, whose rows come back in the order asked for. So:

    a row that went, or a key that came, since then     noticed: an error, and another fingerprint on resume
    values that were changed in place                   noticed with check=True, which reads everything once
    a connection that is lost, a server that restarts   the query is sent again, on a new connection: it only reads

``copy=True`` copies the rows into the local cache first, which is faster from the second epoch on.
Passwords are never shown.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import remote, tree
from meshfit.data.blob import Url
from meshfit.data.cache import Cache
from meshfit.data.columns import Columns, ColumnWriter
from meshfit.data.databases import Database, database
from meshfit.data.source import BadSample, Source
from meshfit.data.table import Asked, ColumnSource, names_in
from meshfit.errors import DataError

TOGETHER = 4096  # rows of a copy that are read at once


class Sql(ColumnSource):
    """The rows of ``query``, by ``key``."""

    waits = True

    def __init__(self, base: Database, query: str, key: str, columns: Asked, images: bool, check: bool):
        super().__init__(columns, images)
        self.base, self.query, self.key = base, query.strip().rstrip(";"), key
        self._idle: list[tuple[int, Any]] = []
        """(process, connection) that nobody uses now; each thread takes one, or makes one."""
        names: list[str] = self._connected(lambda connection: base.columns(connection, self.query))
        if key not in names:
            raise DataError(f"the query gives no column {key!r} to be the key", f"it gives {', '.join(names)}")
        self.used = [n for n in names_in(columns, names) if columns is not None or n != key]
        self.names = list(dict.fromkeys([*self.used, key]))
        self.keys = _as_keys(self._connected(lambda connection: base.keys(connection, self.query, key)), key)
        self._content = self._hashed(names) if check else ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}

    def __len__(self) -> int:
        return len(self.keys)

    def _rows(self, keys: list[Any], names: list[str]) -> list[tuple[Any, ...]]:
        return self._connected(lambda connection: self.base.rows(connection, self.query, self.key, keys, names))

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        keys = self.keys[ids].tolist()
        rows = self._rows(keys, self.names)
        if len(rows) != len(keys):
            there = {row[self.names.index(self.key)] for row in rows}
            gone = [key for key in keys if key not in there]
            if not gone:
                raise DataError(f"{self.key} names more than one row", "a key must be unique: it is how rows are found")
            raise DataError(
                f"the row with {self.key}={gone[0]!r} is gone",
                f"{len(self)} keys were taken from {self.base.shown} at the start",
                "copy=True reads a copy that does not change",
            )
        across = dict(zip(self.names, zip(*rows, strict=True), strict=True))
        return {name: self._column(name, across[name], ids) for name in self.used}

    def _column(self, name: str, values: tuple[Any, ...], ids: NDArray[np.int64]) -> Any:
        first = next((value for value in values if value is not None), None)
        if None in values and not isinstance(first, float):
            raise BadSample(f"{self.name_of(int(ids[values.index(None)]))} has no value in column {name!r}")
        if isinstance(first, bytes | memoryview | bytearray | str):
            return tree.Ragged(values)
        if isinstance(first, list | tuple):
            return tree.stack([np.asarray(value) for value in values])
        if isinstance(first, Decimal):
            values = tuple(float(value) for value in values)
        try:
            return torch.from_numpy(np.array(values, np.float64 if isinstance(first, float) else None))
        except TypeError:
            raise DataError(
                f"column {name!r} gives {type(first).__name__}, which is no tensor",
                "cast it in the query: extract(epoch from ...), say",
            ) from None

    def _connected(self, act: Callable[[Any], Any]) -> Any:
        """``act`` with a connection; with a new one where that is lost."""

        def once() -> Any:
            connection = None
            try:
                connection = self._take_idle()
                if connection is None:
                    connection = self.base.connect()
                done = act(connection)
            except BaseException:
                _close(connection)
                raise
            self._idle.append((os.getpid(), connection))
            return done

        def give_up(error: Exception, last: bool) -> DataError | None:
            self._close_idle()  # they are as lost
            said = [self.base.clean(line.strip())[:300] for line in str(error).splitlines() if line.strip()][:3]
            if not self.base.lost(error):
                return DataError(f"{self.base.shown} refuses the query", *said)
            return (
                DataError(f"{self.base.shown} cannot be reached, after {remote.TRIES} tries", *said) if last else None
            )

        return remote.retried(once, give_up)

    def _take_idle(self) -> Any:
        """A connection of this process; None where there is none."""
        with contextlib.suppress(IndexError):
            while True:
                process, connection = self._idle.pop()
                if process == os.getpid():
                    return connection

    def _close_idle(self) -> None:
        while (connection := self._take_idle()) is not None:
            _close(connection)

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self._close_idle()

    def name_of(self, i: int) -> str:
        return f"the row with {self.key}={self.keys.tolist()[i]!r} of {self.base.shown}"

    @property
    def fingerprint(self) -> str:
        named = hashlib.sha256("\n".join(map(str, self.keys.tolist())).encode()).hexdigest()[:16]
        return f"sql {self.query} by {self.key}: {len(self)} {named} {self._content}".rstrip()

    def batches(self) -> Iterator[Any]:
        """All rows in the order of their keys, as Arrow's record batches."""
        import pyarrow as pa

        for start in range(0, len(self), TOGETHER):
            rows = self._rows(self.keys[start : start + TOGETHER].tolist(), self.names)
            columns = dict(zip(self.names, map(list, zip(*rows, strict=True)), strict=True))
            yield pa.record_batch({name: columns[name] for name in self.used})

    def _hashed(self, names: list[str]) -> str:
        found = hashlib.sha256()
        for start in range(0, len(self), 1024):
            rows = self._rows(self.keys[start : start + 1024].tolist(), names)
            found.update(repr([tuple(bytes(v) if isinstance(v, memoryview) else v for v in r) for r in rows]).encode())
        return found.hexdigest()[:16]


class CopiedRows(ColumnSource):
    """Rows of a database out of a copy in the local cache."""

    def __init__(self, source: Sql, cache: Cache):
        super().__init__(source.asked, source.images)
        self.source = source

        def make(folder: Path) -> None:
            writer = ColumnWriter(folder)
            writer.add_file(source.base.shown, source.batches())
            writer.close()
            if writer.rows != len(source):
                raise DataError(f"{source.base.shown} gave {writer.rows} rows for {len(source)} keys", "it has changed")

        self.columns = Columns(cache.folder(f"sql 2 {source.base.shown} {source.fingerprint} {source.names}", make))

    def __len__(self) -> int:
        return self.columns.rows

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        return {name: self.columns.gather(name, ids) for name in self.source.used}

    def name_of(self, i: int) -> str:
        return self.source.name_of(i)

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint


def _close(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.close()


def _as_keys(found: list[Any], key: str) -> NDArray[Any]:
    if not found:
        raise DataError("the query gives no row")
    if any(value is None for value in found):
        raise DataError(f"{key} is null in some rows", f"add: where {key} is not null")
    if len(set(found)) != len(found):
        raise DataError(f"{key} names more than one row", "a key must be unique: it is how rows are found")
    return np.array(found, np.int64) if isinstance(found[0], int) else np.array(found, object)


def sql(
    url: str | Callable[[], Any],
    query: str,
    *,
    key: str,
    columns: Asked = None,
    decode: bool = True,
    check: bool = False,
    copy: bool = False,
    cache: Cache | Url | None = None,
    on_bad: str = "stop",
) -> Source:
    """The rows of ``query``, one a sample, found by ``key``, which must be unique and should have an index.

    ``url`` is postgresql://user:password@host/name, sqlite:///path, duckdb:///path; or a function that returns a DB-API
    connection, an ADBC driver's say. ``columns`` is as in table.py; by default all but the key, as a dict.
    """
    made = Sql(database(url), query, key, columns, decode, check)
    return (CopiedRows(made, Cache.of(cache)) if copy else made).on_bad(on_bad)
