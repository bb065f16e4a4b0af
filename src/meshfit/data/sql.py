"""Rows of a database by key: ``sql("postgresql://...", "select id, image, label from train", key="id")``.

A cursor cannot be resumed, shuffled or shared; keys can. The ordered list of keys is taken once, when the source is
made; a batch is one query for its keys, whose rows come back in the order asked for. So:

    a row that went, or a key that came, since then     noticed: an error, and another fingerprint on resume
    values that were changed in place                   noticed with check=True, which reads everything once
    a connection that is lost, a server that restarts   the query is sent again, on a new connection: it only reads

Dates and times are microseconds in int64, since 1970 (in UTC, where they have a zone) or since midnight.
``copy=True`` copies the rows into the local cache first, which is faster from the second epoch on.
Passwords are never shown.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import remote, tree
from meshfit.data.arrow_arrays import Fill, root_of
from meshfit.data.blob import Url
from meshfit.data.cache import Cache
from meshfit.data.columns import Columns, ColumnWriter
from meshfit.data.databases import Database, database
from meshfit.data.rows import Asked, ColumnSource, fields_in, names_in
from meshfit.data.source import BadSample, Source
from meshfit.errors import DataError

TOGETHER = 4096  # rows of a copy that are read at once
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Sql(ColumnSource):
    """The rows of ``query``, by ``key``."""

    waits = True

    def __init__(
        self,
        base: Database,
        query: str,
        key: str | Sequence[str],
        columns: Asked,
        images: bool,
        check: bool,
        fill: Fill,
    ):
        super().__init__(columns, images)
        self.base, self.query, self.fill = base, query.strip().rstrip(";"), fill
        self.key = [key] if isinstance(key, str) else list(key)
        self._idle: list[tuple[int, Any]] = []
        """(process, connection) that nobody uses now; each thread takes one, or makes one."""
        names: list[str] = self._connected(lambda connection: base.columns(connection, self.query))
        for each in self.key:
            if each not in names:
                raise DataError(f"the query gives no column {each!r} to be the key", f"it gives {', '.join(names)}")
        used = names_in(columns, names, fields_in(columns, names))
        self.used = [n for n in used if columns is not None or n not in self.key]
        self.names = list(dict.fromkeys([*(root_of(n, names) or n for n in self.used), *self.key]))
        self.keys = _as_keys(self._connected(lambda connection: base.keys(connection, self.query, self.key)), self.key)
        self._content = self._hashed(names) if check else ""
        self._copy: Columns | None = None

    def copied(self, cache: Cache) -> Self:
        """The same, its rows out of a copy in ``cache``."""

        def make(folder: Path) -> None:
            writer = ColumnWriter(folder, wanted=self.used, skips=True)
            writer.add_file(self.base.shown, self.batches())
            writer.close()

        what = f"{self.fingerprint} {self.used} {self.fill.asked}"
        self._copy, self.waits = Columns(cache.folder(f"sql 4 {self.base.shown} {what}", make)), False
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}

    def __len__(self) -> int:
        return len(self.keys)

    def _rows(self, ids: NDArray[np.int64] | slice, names: list[str]) -> list[tuple[Any, ...]]:
        alone = len(self.key) == 1
        keys = [(key,) for key in self.keys[ids].tolist()] if alone else self.keys[ids].tolist()
        rows = self._connected(lambda connection: self.base.rows(connection, self.query, self.key, keys, names))
        if len(rows) == len(keys):
            return rows
        at = [names.index(each) for each in self.key]
        there = {tuple(row[i] for i in at) for row in rows}
        gone = [key for key in keys if key not in there]
        if not gone:
            raise _not_unique(self.key)
        raise DataError(
            f"the row with {self._said(gone[0])} is gone",
            f"{len(self)} keys were taken from {self.base.shown} at the start",
            "copy=True reads a copy that does not change",
        )

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        if self._copy is not None:
            return self._copy.rows_of_file(self.used, ids, self.name_of)
        rows = self._rows(ids, self.names)
        across = dict(zip(self.names, zip(*rows, strict=True), strict=True))
        return {name: self._column(name, self._values(name, across, ids), ids) for name in self.used}

    def _values(self, name: str, across: dict[str, tuple[Any, ...]], ids: NDArray[np.int64]) -> list[Any]:
        """The values of a column, or of a field of the JSON in one; filled where there is something to fill with."""
        root = root_of(name, across)
        assert root is not None
        values = list(across[root])
        if name != root:
            values = [self._field(value, name, root, int(i)) for value, i in zip(values, ids, strict=True)]
        value = self.fill[name]
        return values if value is None else [value if each is None else each for each in values]

    def _field(self, value: Any, name: str, root: str, i: int) -> Any:
        """The field "a.b" of the object in column "a"; None where it has none."""
        if isinstance(value, str | bytes | bytearray | memoryview):
            try:
                value = json.loads(value if isinstance(value, str) else bytes(value))
            except ValueError as error:
                raise BadSample(f"column {root!r} of {self.name_of(i)} is not JSON", str(error)) from None
        for part in name[len(root) + 1 :].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _column(self, name: str, values: list[Any], ids: NDArray[np.int64]) -> Any:
        for value, i in zip(values, ids, strict=True):
            if value is None or (isinstance(value, list | tuple) and None in value):
                raise BadSample(f"{self.name_of(int(i))} has no value in column {name!r}")
        first = values[0]
        if isinstance(first, bytes | memoryview | bytearray | str):
            return tree.Ragged(values)
        try:
            if isinstance(first, dict):
                return tree.stack(values)
            if isinstance(first, list | tuple):
                return tree.stack([np.asarray(value) for value in values])
            if not isinstance(first, int | float):
                values = [_number(value) for value in values]
            return torch.from_numpy(np.array(values))
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"column {name!r} gives {type(first).__name__}, which is no tensor",
                str(error).split("\n")[0][:200],
                "cast it in the query" + (f', or take fields of it: columns="{name}.a"' * isinstance(first, dict)),
            ) from None

    def _connected(self, act: Callable[[Any], Any]) -> Any:
        """``act`` with a connection; with a new one where that is lost."""

        for last in remote.tries():
            connection = None
            try:
                connection = self._take_idle()
                if connection is None:
                    connection = self.base.connect()
                done = act(connection)
            except Exception as error:
                _close(connection)
                if isinstance(error, DataError):
                    raise
                self._close_idle()  # they are as lost
                said = [self.base.clean(line.strip())[:300] for line in str(error).splitlines() if line.strip()][:3]
                if not self.base.lost(error):
                    raise DataError(f"{self.base.shown} refuses the query", *said) from None
                if last:
                    text = f"{self.base.shown} cannot be reached, after {remote.TRIES} tries"
                    raise DataError(text, *said) from None
            else:
                self._idle.append((os.getpid(), connection))
                return done
        raise AssertionError

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
        key = self.keys[i : i + 1].tolist()[0]
        return f"the row with {self._said(key if len(self.key) > 1 else (key,))} of {self.base.shown}"

    def _said(self, key: tuple[Any, ...]) -> str:
        said = [repr(value) if isinstance(value, int | str) else str(value) for value in key]
        return ", ".join(f"{name}={value}" for name, value in zip(self.key, said, strict=True))

    @property
    def fingerprint(self) -> str:
        named = hashlib.sha256("\n".join(map(str, self.keys.tolist())).encode()).hexdigest()[:16]
        return f"sql {self.query} by {', '.join(self.key)}: {len(self)} {named} {self._content}".rstrip()

    def batches(self) -> Iterator[Any]:
        """All rows in the order of their keys, as Arrow's record batches."""
        import pyarrow as pa

        for start in range(0, len(self), TOGETHER):
            ids = np.arange(start, min(start + TOGETHER, len(self)))
            rows = self._rows(ids, self.names)
            across = dict(zip(self.names, zip(*rows, strict=True), strict=True))
            yield pa.record_batch({name: self._values(name, across, ids) for name in self.used})

    def _hashed(self, names: list[str]) -> str:
        found = hashlib.sha256()
        for start in range(0, len(self), 1024):
            rows = self._rows(slice(start, start + 1024), names)
            found.update(repr([tuple(bytes(v) if isinstance(v, memoryview) else v for v in r) for r in rows]).encode())
        return found.hexdigest()[:16]


def _close(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.close()


def _as_keys(found: list[tuple[Any, ...]], key: list[str]) -> NDArray[Any]:
    """Ordered keys: numbers, or whatever they are; tuples where a key is of several columns."""
    if not found:
        raise DataError("the query gives no row")
    for name, values in zip(key, zip(*found, strict=True), strict=True):
        if None in values:
            raise DataError(f"{name} is null in some rows", f"add: where {name} is not null")
    if len(set(found)) != len(found):
        raise _not_unique(key)
    if len(key) == 1 and isinstance(found[0][0], int):
        return np.array(found, np.int64)[:, 0]
    keys = np.empty(len(found), object)
    keys[:] = [row[0] for row in found] if len(key) == 1 else found
    return keys


def _not_unique(key: list[str]) -> DataError:
    name = ", ".join(key)
    return DataError(
        f"{name} names more than one row",
        "a key must be unique: it is how rows are found",
        'it may be of several columns: key=("user", "day"), say',
    )


def _number(value: Any) -> Any:
    """A value as a number: dates and times in microseconds, since 1970 or midnight."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        value = value - (EPOCH if value.tzinfo is not None else EPOCH.replace(tzinfo=None))
    elif isinstance(value, date):
        value = timedelta(days=value.toordinal() - EPOCH.toordinal())
    elif isinstance(value, time):
        value = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
    return value // timedelta(microseconds=1) if isinstance(value, timedelta) else value


def sql(
    url: str | Callable[[], Any],
    query: str,
    *,
    key: str | Sequence[str],
    columns: Asked = None,
    decode: bool = True,
    check: bool = False,
    copy: bool = False,
    cache: Cache | Url | None = None,
    on_bad: str = "stop",
    fill: Any = None,
) -> Source:
    """The rows of ``query``, one a sample, found by ``key``, a column or several, which must be unique and should have
    an index.

    ``url`` is postgresql://user:password@host/name, sqlite:///path, duckdb:///path; or a function that returns a DB-API
    connection, an ADBC driver's say. ``columns`` is as in rows.py; by default all but the key, as a dict;
    "a.b" is the field "b" of the JSON in column "a". ``fill`` is what stands for null: 0, or {"age": 0}.
    """
    made = Sql(database(url), query, key, columns, decode, check, Fill(fill))
    return (made.copied(Cache.of(cache)) if copy else made).on_bad(on_bad)
