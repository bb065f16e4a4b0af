"""Files at s3://, gs://, az:// and http(s)://, through obstore; at any other scheme through fsspec.

Read in blocks of 4 MiB, many at once, each kept in the local cache under (url, tag, block). What can go wrong:

    500, 503, a reset, a timeout, a body that is too short      tried again, up to 6 times, with growing pauses
    the file's tag is another than when it was opened           an error: samples would be mixed up
    not found, not allowed, another answer of 4xx               an error at once

Errors name the file and never show keys, passwords or the parameters of a URL.
"""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from meshfit.data.blob import Blob, Bytes, has_pattern
from meshfit.data.cache import Cache
from meshfit.data.extra import needed
from meshfit.errors import DataError

BLOCK = 4 * 2**20
TOGETHER = 16  # blocks asked for at once
TRIES = 6
PAUSE = 0.2  # seconds before the second try; doubles, with jitter
TIMEOUT = "30s"
AGAIN = (408, 409, 425, 429)  # answers of 4xx that may be others later
ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint")

_pools: dict[int, ThreadPoolExecutor] = {}
_starting = threading.Lock()


class Gone(Exception):
    """Not there, not allowed, or changed: trying again would not help."""


def retried(act: Callable[[], Any], give_up: Callable[[Exception, bool], DataError | None]) -> Any:
    """``act``, again and again with growing pauses. ``give_up(error, last)``: what to raise instead of another try."""
    for attempt in range(TRIES):
        try:
            return act()
        except DataError:
            raise
        except Exception as error:
            if (final := give_up(error, attempt == TRIES - 1)) is not None:
                raise final from None
            time.sleep(PAUSE * 2**attempt * random.Random().uniform(0.5, 1.5))
    raise AssertionError


class FileStore(Protocol):
    """A way to reach files: may raise anything; ``Gone`` is final."""

    def head(self, path: str) -> tuple[int, str]: ...
    def list(self, prefix: str) -> Iterable[tuple[str, int, str]]: ...
    def get(self, path: str, start: int, stop: int, tag: str) -> bytes: ...


@dataclass
class Place:
    """A bucket, container, host or file system, and how to get at it. Opened in the process that reads."""

    root: str
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _store: FileStore | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "storage": self.storage, "_store": None}

    @property
    def store(self) -> FileStore:
        if self._store is None:
            scheme = self.root.partition("://")[0]
            known = scheme in ("s3", "gs", "az", "http", "https")
            self._store = Obstore(self.root, self.storage) if known else Fsspec(self.root, self.storage)
        return self._store

    @property
    def shown(self) -> str:
        return without_secrets(self.root)

    def tried(self, act: Callable[[FileStore], Any], what: str) -> Any:
        """``act``, again and again while that may help."""
        try:
            store = self.store
        except (TypeError, ValueError) as error:
            raise DataError(*self._clean(f"{self.shown} cannot be opened: {error}"), "see storage=") from None

        def give_up(error: Exception, last: bool) -> DataError | None:
            if isinstance(error, Gone):
                return DataError(*self._clean(f"{what}: {error}"))
            if last:
                first, *rest = self._clean(f"{type(error).__name__}: {error}")
                return DataError(f"{what} cannot be read, after {TRIES} tries", first, *rest[:2])
            return None

        return retried(lambda: act(store), give_up)

    def _clean(self, text: str) -> list[str]:
        """``text`` in lines, without anything secret."""
        secrets = [str(value) for key, value in _flat(self.storage) if _is_secret(key)]
        parts = urlsplit(self.root)
        secrets += [part for part in (parts.password, parts.query) if part]
        for secret in secrets:
            text = text.replace(secret, "***")
        lines = [line.strip()[:300] for line in text.partition("Debug source")[0].splitlines() if line.strip()]
        return lines[:4]


class Remote(Blob):
    """A file far away, read by blocks through the cache."""

    def __init__(self, place: Place, path: str, size: int, tag: str, cache: Cache):
        self.place, self.path, self.size, self.tag, self.cache = place, path, size, tag, cache
        self.name = f"{place.shown.rstrip('/')}/{path}" if path else place.shown

    def ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[Bytes]:
        wanted = sorted({b for a, o in zip(starts, stops, strict=True) for b in range(a // BLOCK, -(-o // BLOCK))})
        if len(wanted) > 1:
            blocks = dict(zip(wanted, _pool().map(self._block, wanted), strict=True))
        else:
            blocks = {b: self._block(b) for b in wanted}
        found: list[Bytes] = []
        for start, stop in zip(starts, stops, strict=True):
            inside = range(start // BLOCK, -(-stop // BLOCK))
            parts = [blocks[b][max(start - b * BLOCK, 0) : stop - b * BLOCK] for b in inside]
            found.append(parts[0] if len(parts) == 1 else b"".join(bytes(part) for part in parts))
        return found

    def _block(self, b: int) -> Any:
        start, stop = b * BLOCK, min((b + 1) * BLOCK, self.size)

        def get(store: FileStore) -> bytes:
            data = store.get(self.path, start, stop, self.tag)
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came instead of {stop - start}")
            return data

        make = lambda: self.place.tried(get, self.name)
        return self.cache.get(f"{self.name} {self.tag} {b}", stop - start, make)


def find_remote(url: str, endings: tuple[str, ...], storage: Mapping[str, Any], cache: Cache) -> list[Blob]:
    """The files of ``url``: one, all below a prefix that ends in "/", or those of a pattern."""
    root, path = _split(url)
    place = Place(root, storage)
    if not has_pattern(path) and not path.endswith("/") and path:
        size, tag = place.tried(lambda t: t.head(path), without_secrets(url))
        return [Remote(place, path, size, tag, cache)]
    prefix = path if path.endswith("/") or not path else path[: min(path.find(s) for s in "*?[" if s in path)]
    prefix = prefix.rpartition("/")[0]
    listed = place.tried(lambda t: list(t.list(prefix)), without_secrets(url))
    found = [entry for entry in listed if fnmatchcase(entry[0], path) or not has_pattern(path)]
    found = [entry for entry in found if not endings or entry[0].lower().endswith(endings)]
    if not found:
        names = ", ".join(name for name, _, _ in listed[:4])
        raise DataError(
            f"nothing lies at {without_secrets(url)}",
            f"below {place.shown}/{prefix} lie {names}" if listed else "nothing lies above it either",
        )
    return [Remote(place, name, size, tag, cache) for name, size, tag in sorted(found)]


class Obstore:
    """Amazon S3 and what speaks like it, Google, Azure, and plain HTTP."""

    def __init__(self, root: str, storage: Mapping[str, Any]):
        self.obs: Any = needed("obstore", "cloud", f"{root.partition('://')[0]}://")
        from obstore.store import from_url

        client = {"timeout": TIMEOUT, "connect_timeout": "10s", **storage.get("client_options", {})}
        config = {key: value for key, value in storage.items() if key != "client_options"}
        if over_http(root, config):
            client.setdefault("allow_http", True)
        if root.startswith("s3://") and "endpoint" in config:
            config.setdefault("region", "us-east-1")
        retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}  # Place.tried does that
        asked: Any = {"client_options": client, "retry_config": retry, **({"config": config} if config else {})}
        self.store: Any = from_url(root, **asked)
        self.whole: tuple[str, str, bytes] = ("", "", b"")

    def head(self, path: str) -> tuple[int, str]:
        found = self._said(lambda: self.obs.head(self.store, path))
        return found["size"], _tag(found)

    def list(self, prefix: str) -> Iterable[tuple[str, int, str]]:
        pages = self._said(lambda: self.obs.list(self.store, prefix or None).collect())
        return [(entry["path"], entry["size"], _tag(entry)) for entry in pages]

    def get(self, path: str, start: int, stop: int, tag: str) -> bytes:
        options: dict[str, Any] = {"range": (start, stop)}
        if tag.startswith("etag "):
            options["if_match"] = tag[5:]
        if (path, tag) == self.whole[:2]:
            return self.whole[2][start:stop]
        try:
            return self._got(path, tag, options)
        except Exception as error:
            if type(error).__name__ != "NotSupportedError":
                raise
        del options["range"]  # a plain web server that knows no ranges: the last such file is kept
        self.whole = (path, tag, self._got(path, tag, options))
        return self.whole[2][start:stop]

    def _got(self, path: str, tag: str, options: dict[str, Any]) -> bytes:
        answer = self._said(lambda: self.obs.get(self.store, path, options=options))
        if _tag(answer.meta) != tag:
            raise Gone("has changed since it was opened; open it again")
        return bytes(self._said(answer.bytes))

    def _said(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except FileNotFoundError:
            raise Gone("is not there") from None
        except Exception as error:
            kind = type(error).__name__
            if kind == "PreconditionError":
                raise Gone("has changed since it was opened; open it again") from None
            status = re.search(r"status code: (4\d\d)( [\w ]+)?", str(error))  # a listing's have no kind of their own
            code = 0 if status is None else int(status[1])
            if kind in ("PermissionDeniedError", "UnauthenticatedError") or code in (401, 403):
                raise Gone(f"may not be read with these credentials ({code or kind})") from None
            if kind == "NotFoundError" or code in (404, 410):
                raise Gone("is not there") from None
            if status is not None and code not in AGAIN:
                raise Gone(f"is refused by the server: {status[0]}") from None
            raise


def over_http(root: str, storage: Mapping[str, Any]) -> bool:
    """Whether the server that ``storage``, or the environment, names is spoken to without encryption."""
    given = [storage[name] for name in ENDPOINTS if name in storage]
    if root.startswith("s3://"):
        given += [os.environ[name.upper()] for name in ENDPOINTS[2:] if name.upper() in os.environ]
    return str((given or [root])[0]).startswith("http://")


class Fsspec:
    """Whatever else fsspec knows: sftp, hdfs, memory, ..."""

    def __init__(self, root: str, storage: Mapping[str, Any]):
        fsspec = needed("fsspec", "cloud", f"{root.partition('://')[0]}://")
        try:
            self.files: Any = fsspec.filesystem(root.partition("://")[0], **storage)
        except (ValueError, ImportError) as error:
            raise DataError(f"{without_secrets(root)} cannot be opened: {error}") from None
        self.root = root.partition("://")[2]

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root else path

    def head(self, path: str) -> tuple[int, str]:
        found = self._said(lambda: self.files.info(self._path(path)))
        return found["size"], self._tag(found)

    @staticmethod
    def _said(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except FileNotFoundError:
            raise Gone("is not there") from None
        except PermissionError as error:
            raise Gone(f"may not be read with these credentials ({error})") from None

    def list(self, prefix: str) -> Iterable[tuple[str, int, str]]:
        found = self._said(lambda: self.files.find(self._path(prefix), detail=True))
        return [(name.split(self.root + "/", 1)[-1].lstrip("/"), e["size"], self._tag(e)) for name, e in found.items()]

    def get(self, path: str, start: int, stop: int, tag: str) -> bytes:
        if self.head(path)[1] != tag:
            raise Gone("has changed since it was opened; open it again")
        return self._said(lambda: self.files.cat_file(self._path(path), start=start, end=stop))

    @staticmethod
    def _tag(info: Mapping[str, Any]) -> str:
        marks = [info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if info.get(key)]
        return f"{info['size']} {marks[0] if marks else ''}"


def _tag(meta: Mapping[str, Any]) -> str:
    """The ETag where there is one; else when it was last modified and how long it is."""
    if meta.get("e_tag"):
        return f"etag {meta['e_tag']}"
    return f"{meta['size']} {meta['last_modified']}"


def _split(url: str) -> tuple[str, str]:
    """("s3://bucket", "path/to/file")."""
    scheme, _, rest = url.partition("://")
    if scheme in ("http", "https"):
        base, _, name = rest.rpartition("/") if "/" in rest else (rest, "", "")
        return f"{scheme}://{base}", name
    if scheme in ("memory",):
        return f"{scheme}://", rest.lstrip("/")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}", unquote(path) if "%" in path else path


def without_secrets(url: str) -> str:
    """``url`` as it may be shown: no password, no parameters."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    user = f"{parts.username}:***@" if parts.password else f"{parts.username}@" if parts.username else ""
    mark = "?***" if parts.query else ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}{mark}"


def _flat(options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for key, value in options.items():
        found += _flat(value) if isinstance(value, Mapping) else [(key, value)]
    return found


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in ("secret", "key", "token", "password", "sas", "credential"))


def _pool() -> ThreadPoolExecutor:
    with _starting:
        if os.getpid() not in _pools:  # a forked process has none of its parent's threads
            _pools[os.getpid()] = ThreadPoolExecutor(TOGETHER, thread_name_prefix="meshfit-remote")
        return _pools[os.getpid()]
