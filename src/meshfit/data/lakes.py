"""Tables that keep their own history: Delta by deltalake, Lance by pylance. Each is read as of one version, taken when
it is opened: what is written later changes nothing.

Delta's log says which Parquet files are the table; these are read like any others. Lance is read by row number.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from meshfit.data.arrow_arrays import Fill
from meshfit.data.blob import Blob, LocalFile, Url, find, is_remote
from meshfit.data.cache import Cache
from meshfit.data.extra import needed
from meshfit.data.remote import without_secrets
from meshfit.data.rows import ArrowRows, Asked
from meshfit.data.source import Source
from meshfit.data.table import of_files
from meshfit.data.tablefiles import TableFile
from meshfit.errors import DataError

UNREAD = {"deletionVectors": "REORG TABLE ... APPLY (PURGE)", "columnMapping": "a copy of the table without it"}
"""What a reader of the files alone would get wrong, and what removes it."""


def delta(
    url: Url,
    *,
    version: int | None = None,
    columns: Asked = None,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    decode: bool = True,
    on_bad: str = "stop",
    fill: Any = None,
) -> Source:
    """The rows of a Delta table, as of ``version`` or the last. Partition columns are columns."""
    import pyarrow as pa

    deltalake, shown = needed("deltalake", "delta", "a Delta table"), without_secrets(str(url))
    where = str(url) if is_remote(url) else str(Path(url).expanduser())
    try:
        found = deltalake.DeltaTable(where, version=version, storage_options=_texts(storage))
        features = found.protocol().reader_features or []
        actions = pa.table(found.get_add_actions(flatten=True)).to_pylist()
        schema = pa.schema(found.schema().to_arrow())
        parts = found.metadata().partition_columns
    except Exception as error:
        raise DataError(f"{shown} cannot be read as a Delta table", str(error).split("\n")[0][:300]) from error
    for feature in UNREAD.keys() & set(map(str, features)):
        raise DataError(f"{shown} uses {feature}, which is not read", f"{UNREAD[feature]} removes it")
    if not actions:
        raise DataError(f"version {found.version()} of {shown} holds no row")
    held = Cache.of(cache)
    types = {name: schema.field(name).type for name in parts}
    files = []
    for action in sorted(actions, key=lambda action: action["path"]):
        blob = _file(where, action["path"], storage, held)
        given = {name: action[f"partition.{name}"] for name in parts}
        files.append(TableFile(blob, "parquet", given=given, given_types=types))
    return of_files(files, columns, cache=held, decode=decode, on_bad=on_bad, fill=fill)


def _file(table: str, path: str, storage: Mapping[str, Any] | None, cache: Cache) -> Blob:
    """A file that the log names, by a path in the table (or an absolute one) whose odd signs are quoted."""
    if is_remote(table):
        return find(path if "://" in path else f"{table.rstrip('/')}/{path}", storage=storage, cache=cache)[0]
    for each in (unquote(path), path):
        file = Path(table) / each.removeprefix("file://")
        if file.exists():
            return LocalFile(file)
    raise DataError(f"{Path(table) / path} is gone, which the log of {table} names", "was the table vacuumed?")


class LanceRows(ArrowRows):
    """Rows of one version of a Lance data set; opened anew in each process."""

    def __init__(self, url: str, version: int | None, columns: Asked, images: bool, fill: Fill, storage: Any):
        self.url, self.storage, self.version = url, storage, version
        self._open: tuple[int, Any] | None = None
        self.version = self.data.version
        self.count = self.data.count_rows()
        super().__init__(without_secrets(str(url)), self.data.schema, columns, images, fill)
        self.waits = is_remote(url)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    @property
    def data(self) -> Any:
        if self._open is None or self._open[0] != os.getpid():
            lance = needed("lance", "lance", "a Lance data set")
            try:
                found = lance.dataset(self.url, version=self.version, storage_options=self.storage)
            except Exception as error:
                why = str(error).split("\n")[0][:300]
                raise DataError(f"{without_secrets(str(self.url))} cannot be read as a Lance data set", why) from error
            self._open = os.getpid(), found
        return self._open[1]

    def __len__(self) -> int:
        return self.count

    def rows(self, ids: list[int]) -> Any:
        return self.data.take(ids, columns=self.names)

    @property
    def fingerprint(self) -> str:
        return f"lance {self.name} version {self.version} {len(self)}"


def lance(
    url: Url,
    *,
    version: int | None = None,
    columns: Asked = None,
    storage: Mapping[str, Any] | None = None,
    decode: bool = True,
    on_bad: str = "stop",
    fill: Any = None,
) -> Source:
    """The rows of a Lance data set, as of ``version`` or the last."""
    where = str(url) if is_remote(url) else str(Path(url).expanduser())
    return LanceRows(where, version, columns, decode, Fill(fill), _texts(storage)).on_bad(on_bad)


def _texts(storage: Mapping[str, Any] | None) -> dict[str, str] | None:
    return {key: str(value) for key, value in storage.items()} if storage else None
