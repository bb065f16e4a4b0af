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
import random
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.blob import Url
from meshfit.data.cache import Cache
from meshfit.data.columns import Columns, ColumnWriter
from meshfit.data.databases import Database, database
from meshfit.data.images import decode, looks_like_image
from meshfit.data.source import BadSample, Source
from meshfit.data.table import Asked, names_in, shaped
from meshfit.errors import DataError

TRIES = 6
PAUSE = 0.2  # seconds before the second try; doubles


class Sql(Source):
    """The rows of ``query``, by ``key``."""

    waits = True

    def __init__(self, base: Database, query: str, key: str, columns: Asked, images: bool, check: bool):
        self.base, self.query, self.key, self.asked, self.images = base, query.strip().rstrip(";"), key, columns, images
        self._fresh()
        self.names: list[str] = self._tried(lambda connection: base.columns(connection, self.query))
        if key not in self.names:
            raise DataError(f"the query gives no column {key!r} to be the key", f"it gives {', '.join(self.names)}")
        self.used = [n for n in names_in(columns, self.names) if columns is not None or n != key]
        self.keys: NDArray[Any] = _as_keys(self._tried(lambda connection: base.keys(connection, self.query, key)), key)
        self._content = ""
        if check:
            self._content = self._hashed()

    def _fresh(self) -> None:
        self._idle: list[tuple[int, Any]] = []
        """(process, connection) that nobody uses now; each thread takes one, or makes one."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_idle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fresh()

    def __len__(self) -> int:
        return len(self.keys)

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        keys = self.keys[ids].tolist()
        rows = self._tried(lambda connection: self.base.rows(connection, self.query, self.key, keys, self.names))
        if len(rows) != len(keys):
            at = self.names.index(self.key)
            there = {row[at] for row in rows}
            gone = [key for key in keys if key not in there]
            if not gone:
                raise DataError(f"{self.key} names more than one row", "a key must be unique: it is how rows are found")
            raise DataError(
                f"the row with {self.key}={gone[0]!r} is gone",
                f"{len(self)} keys were taken from {self.base.shown} at the start",
                "copy=True reads a copy that does not change",
            )
        across = list(zip(*rows, strict=True))
        held = {name: self._column(name, across[self.names.index(name)], ids) for name in self.used}
        return shaped(self.asked, held)

    def _column(self, name: str, values: tuple[Any, ...], ids: NDArray[np.int64]) -> Any:
        first = next((value for value in values if value is not None), None)
        if None in values and not isinstance(first, float):
            raise BadSample(f"{self.name_of(int(ids[values.index(None)]))} has no value in column {name!r}")
        if isinstance(first, bytes | memoryview | bytearray):
            if self.images and looks_like_image(first):
                return decode(values, lambda i: self.name_of(int(ids[i])))
            return tree.Ragged(values)
        if isinstance(first, str):
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

    def _tried(self, act: Callable[[Any], Any]) -> Any:
        """``act`` with a connection; with a new one where that is lost."""
        for attempt in range(1, TRIES + 1):
            connection = None
            try:
                connection = self._connection()
                done = act(connection)
                self._idle.append((os.getpid(), connection))
                return done
            except Exception as error:
                self._close(connection)
                if isinstance(error, DataError):
                    raise
                self._empty()  # those that wait are as lost
                if not self.base.lost(error):
                    raise DataError(f"{self.base.shown} refuses the query", *self._lines(error)) from None
                if attempt == TRIES:
                    text = f"{self.base.shown} cannot be reached, after {TRIES} tries"
                    raise DataError(text, *self._lines(error)) from None
                time.sleep(PAUSE * 2 ** (attempt - 1) * random.Random().uniform(0.5, 1.5))
        raise AssertionError

    def _lines(self, error: Exception) -> list[str]:
        return [self.base.clean(line.strip())[:300] for line in str(error).splitlines() if line.strip()][:3]

    def _connection(self) -> Any:
        with contextlib.suppress(IndexError):
            while True:
                process, connection = self._idle.pop()
                if process == os.getpid():
                    return connection
        return self.base.connect()

    @staticmethod
    def _close(connection: Any) -> None:
        with contextlib.suppress(Exception):
            connection.close()

    def _empty(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                process, connection = self._idle.pop()
                if process == os.getpid():
                    self._close(connection)

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self._empty()

    def name_of(self, i: int) -> str:
        return f"the row with {self.key}={self.keys.tolist()[i]!r} of {self.base.shown}"

    @property
    def fingerprint(self) -> str:
        named = hashlib.sha256("\n".join(map(str, self.keys.tolist())).encode()).hexdigest()[:16]
        return f"sql {self.query} by {self.key}: {len(self)} {named} {self._content}".rstrip()

    def _hashed(self) -> str:
        found = hashlib.sha256()
        for start in range(0, len(self), 1024):
            keys = self.keys[start : start + 1024].tolist()
            rows = self._tried(lambda c, keys=keys: self.base.rows(c, self.query, self.key, keys, self.names))
            found.update(repr([tuple(bytes(v) if isinstance(v, memoryview) else v for v in r) for r in rows]).encode())
        return found.hexdigest()[:16]

    def copied(self, cache: Cache) -> Source:
        """The same rows out of a copy in ``cache``."""

        def make(folder: Path) -> None:
            writer = ColumnWriter(folder)
            batches = self._tried(lambda c: self.base.batches(c, self.query, self.key, self.keys.tolist(), self.names))
            writer.add_file(self.base.shown, batches)
            writer.close()
            if writer.rows != len(self):
                raise DataError(f"{self.base.shown} gave {writer.rows} rows for {len(self)} keys", "it has changed")

        return Copied(self, cache.folder(f"sql 1 {self.base.shown} {self.fingerprint} {self.names}", make))


class Copied(Source):
    """Rows of a database out of their copy."""

    def __init__(self, source: Sql, folder: Path):
        self.source, self.columns = source, Columns(folder)
        self._pictures: dict[str, bool] = {}

    def __len__(self) -> int:
        return self.columns.rows

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        held = {name: self._column(name, ids) for name in self.source.used}
        return shaped(self.source.asked, held)

    def _column(self, name: str, ids: NDArray[np.int64]) -> Any:
        found = self.columns.gather(name, ids)
        if self.source.images and isinstance(found, tree.Ragged) and self.columns.kinds[name]["is"] == "bytes":
            if name not in self._pictures:
                self._pictures[name] = looks_like_image(self.columns.gather(name, np.arange(1))[0])
            if self._pictures[name]:
                return decode(found, lambda i: self.name_of(int(ids[i])))
        return found

    def name_of(self, i: int) -> str:
        return self.source.name_of(i)

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint


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
    return (made.copied(Cache.of(cache)) if copy else made).on_bad(on_bad)
