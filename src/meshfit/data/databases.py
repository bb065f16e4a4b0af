"""What differs between databases: how to connect, how to ask for many keys at once, what a lost connection looks like.

PostgreSQL   psycopg 3, binary, one prepared query with the keys as an array
SQLite       sqlite3, the keys as JSON
others       any DB-API connection (DuckDB, ADBC drivers): the keys in the query's text, put in order here

A key is the values of one column, or of several: tuples then.
"""

import contextlib
import datetime
import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from meshfit.data.extra import needed
from meshfit.data.remote import without_secrets
from meshfit.errors import DataError, did_you_mean

Records = list[tuple[Any, ...]]
JSON_PART = "json_extract(k.value, '$[{}]')"


class Database(ABC):
    """A database: its URL, and how to ask it."""

    shown: str
    """For people: no password."""

    @abstractmethod
    def connect(self) -> Any: ...

    @abstractmethod
    def rows(self, connection: Any, query: str, key: list[str], keys: Records, names: list[str]) -> Records:
        """The columns ``names`` of the rows of ``keys``, in that order, one for each."""

    @abstractmethod
    def lost(self, error: Exception) -> bool:
        """Whether a new connection may help."""

    def columns(self, connection: Any, query: str) -> list[str]:
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(f"select * from ({query}) as q limit 0")
            return [column[0] for column in cursor.description]

    def keys(self, connection: Any, query: str, key: list[str]) -> Records:
        places = ", ".join(str(i + 1) for i in range(len(key)))
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(f"select {listed(key)} from ({query}) as q order by {places}")
            return [tuple(row) for row in cursor.fetchall()]

    def clean(self, text: str) -> str:
        return text


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def listed(names: list[str]) -> str:
    return ", ".join(f"q.{quoted(name)}" for name in names)


def _parts(key: list[str]) -> str:
    return ", ".join(f"key{i}" for i in range(len(key)))


def _equal(key: list[str], part: str) -> str:
    """That a row has the key of which ``part`` is a value, with its number for {}."""
    return " and ".join(f"q.{quoted(name)} = {part.format(i)}" for i, name in enumerate(key))


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


def _kind(value: Any) -> str:
    """PostgreSQL's type for the values of a key."""
    if isinstance(value, datetime.datetime):
        return "timestamp" if value.tzinfo is None else "timestamptz"
    kinds = {bool: "boolean", int: "bigint", str: "text", float: "float8", datetime.date: "date", Decimal: "numeric"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "uuid")


class Postgres(Database):
    """PostgreSQL, and what speaks its protocol."""

    def __init__(self, url: str):
        self.url, self.shown = url, without_secrets(url)
        self._secrets = [part for part in (urlsplit(url).password, urlsplit(url).query) if part]

    def connect(self) -> Any:
        psycopg = needed("psycopg", "sql", "PostgreSQL")
        connection = psycopg.connect(self.url, autocommit=True, connect_timeout=10, client_encoding="utf8")
        connection.read_only = True
        return connection

    def rows(self, connection: Any, query: str, key: list[str], keys: Records, names: list[str]) -> Records:
        arrays = ", ".join(f"%s::{_kind(value)}[]" for value in keys[0])
        text = (
            f"select {listed(names)} from unnest({arrays}) with ordinality as k({_parts(key)}, place) "
            f"join ({query.replace('%', '%%')}) as q on {_equal(key, 'k.key{}')} order by k.place"
        )
        with connection.cursor(binary=True) as cursor:
            return cursor.execute(text, [list(values) for values in zip(*keys, strict=True)], prepare=True).fetchall()

    def lost(self, error: Exception) -> bool:
        psycopg: Any = needed("psycopg", "sql")
        if isinstance(error, psycopg.errors.InvalidPassword | psycopg.errors.InvalidAuthorizationSpecification):
            return False
        if isinstance(error, psycopg.OperationalError) and "authentication failed" in str(error):
            return False
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | OSError)

    def clean(self, text: str) -> str:
        for secret in (*self._secrets, *map(unquote, self._secrets)):
            text = text.replace(secret, "***")
        return text


class Sqlite(Database):
    """A file of SQLite, opened for reading only."""

    def __init__(self, url: str):
        self.path = _path(url, "sqlite")
        self.shown = f"sqlite:///{self.path}"
        self.uri = f"file:{quote(self.path)}?mode=ro"

    def connect(self) -> Any:
        try:
            connection = sqlite3.connect(self.uri, uri=True, check_same_thread=False, timeout=30)
            connection.execute("pragma mmap_size = 1073741824")
        except sqlite3.OperationalError as error:
            raise DataError(f"{self.shown} cannot be opened", str(error), "is the path right?") from None
        return connection

    def rows(self, connection: Any, query: str, key: list[str], keys: Records, names: list[str]) -> Records:
        alone = len(key) == 1
        text = (
            f"select {listed(names)} from json_each(?) as k cross join ({query}) as q "
            f"on {_equal(key, 'k.value' if alone else JSON_PART)} order by k.key"
        )
        return connection.execute(text, (json.dumps([k[0] for k in keys] if alone else keys),)).fetchall()

    def lost(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in ("locked", "busy"))


class Dbapi(Database):
    """Any other: a function that returns a DB-API connection."""

    def __init__(self, connect: Callable[[], Any], shown: str):
        self._connect, self.shown = connect, shown

    def connect(self) -> Any:
        return self._connect()

    def rows(self, connection: Any, query: str, key: list[str], keys: Records, names: list[str]) -> Records:
        literals = ", ".join(f"({', '.join(map(_literal, k))})" for k in dict.fromkeys(keys))
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(f"select {listed(names)} from ({query}) as q where ({listed(key)}) in ({literals})")
            at = [names.index(each) for each in key]
            found = {tuple(row[i] for i in at): row for row in cursor.fetchall()}
        return [found[k] for k in keys if k in found]

    def lost(self, error: Exception) -> bool:
        return type(error).__name__ in ("OperationalError", "InterfaceError", "ConnectionException", "IOException")


def database(url: str | Callable[[], Any]) -> Database:
    """The database at ``url``."""
    if not isinstance(url, str):
        if not callable(url):
            raise DataError("sql's first argument is neither a URL nor a function that connects")
        return Dbapi(url, getattr(url, "__qualname__", "the database"))
    scheme = url.partition(":")[0].partition("+")[0].lower()
    if scheme in ("postgresql", "postgres"):
        return Postgres("postgresql:" + url.partition(":")[2])
    if scheme == "sqlite":
        return Sqlite(url)
    if scheme == "duckdb":
        path = _path(url, "duckdb")

        connect = lambda: needed("duckdb", "sql", "DuckDB").connect(path, read_only=True)
        return Dbapi(connect, f"duckdb:///{path}")
    raise DataError(
        f"{scheme}:// is no database that is known by its URL",
        did_you_mean(scheme, ["postgresql", "sqlite", "duckdb"]),
        "or give a function that returns a DB-API connection: sql(lambda: driver.connect(...), ...)",
    )


def _path(url: str, scheme: str) -> str:
    """sqlite:///relative.db and sqlite:////absolute.db, as SQLAlchemy has it; sqlite:///tmp/x.db where that exists."""
    rest = url.partition(":")[2]
    rest = rest[3:] if rest.startswith("///") else rest.removeprefix("//")
    absolute = Path("/" + rest)
    return str(absolute if not Path(rest).exists() and absolute.exists() else Path(rest).absolute())
