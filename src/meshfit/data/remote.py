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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from meshfit.data.blob import Blob, Bytes, Url, has_pattern, is_remote
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


class Gone(Exception):
    """Not there, not allowed, or changed: trying again would not help."""


def tries() -> Iterator[bool]:
    """Whether this is the last try, with growing pauses between them."""
    for attempt in range(TRIES - 1):
        yield False
        time.sleep(PAUSE * 2**attempt * random.Random().uniform(0.5, 1.5))
    yield True


class FileStore(ABC):
    """A bucket, container, host or file system. Picklable: ``client`` is made in the process that reads.

    ``head``, ``list`` and ``get`` may raise anything; ``Gone`` is final.
    """

    def __init__(self, root: str, storage: Mapping[str, Any]):
        self.root, self.storage = root, storage
        self.shown = without_secrets(root)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "client"}

    @cached_property
    @abstractmethod
    def client(self) -> Any: ...

    @abstractmethod
    def head(self, path: str) -> tuple[int, str]:
        """Size and tag."""

    @abstractmethod
    def list(self, prefix: str) -> Iterable[tuple[str, int, str]]:
        """Path, size and tag of all below ``prefix``."""

    @abstractmethod
    def get(self, path: str, start: int, stop: int, tag: str) -> bytes: ...

    def retried(self, act: Callable[[], Any], what: str) -> Any:
        """``act``, again and again while that may help; ``what`` it is about."""
        try:
            self.client  # noqa: B018
        except (TypeError, ValueError) as error:
            raise DataError(*self._clean(f"{self.shown} cannot be opened: {error}"), "see storage=") from None

        for last in tries():
            try:
                return act()
            except DataError:
                raise
            except Gone as error:
                raise DataError(*self._clean(f"{what}: {error}")) from None
            except Exception as error:
                if last:
                    first, *rest = self._clean(f"{type(error).__name__}: {error}")
                    raise DataError(f"{what} cannot be read, after {TRIES} tries", first, *rest[:2]) from None
        raise AssertionError

    def _clean(self, text: str) -> "list[str]":
        """``text`` in lines, without anything secret."""
        text = without_secrets_of(text, self.root, self.storage)
        lines = [line.strip()[:300] for line in text.partition("Debug source")[0].splitlines() if line.strip()]
        return lines[:4]


class Remote(Blob):
    """A file far away, read by blocks through the cache."""

    def __init__(self, store: FileStore, path: str, size: int, tag: str, cache: Cache):
        self.store, self.path, self.size, self.tag, self.cache = store, path, size, tag, cache
        self.name = f"{store.shown}{'' if store.shown.endswith('/') else '/'}{path}" if path else store.shown

    def ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[Bytes]:
        wanted = sorted({b for a, o in zip(starts, stops, strict=True) for b in range(a // BLOCK, -(-o // BLOCK))})
        if len(wanted) > 1:
            blocks = dict(zip(wanted, _pool(os.getpid()).map(self._block, wanted), strict=True))
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

        def get() -> bytes:
            data = self.store.get(self.path, start, stop, self.tag)
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came instead of {stop - start}")
            return data

        make = lambda: self.store.retried(get, self.name)
        return self.cache.get(f"{self.name} {self.tag} {b}", stop - start, make)


def find_remote(url: str, endings: tuple[str, ...], storage: Mapping[str, Any], cache: Cache) -> list[Blob]:
    """The files of ``url``: one, all below a prefix that ends in "/", or those of a pattern."""
    root, path = _split(url)
    known = root.partition("://")[0] in ("s3", "gs", "az", "http", "https")
    store = Obstore(root, storage) if known else Fsspec(root, storage)
    if not has_pattern(path) and not path.endswith("/") and path:
        size, tag = store.retried(lambda: store.head(path), without_secrets(url))
        return [Remote(store, path, size, tag, cache)]
    prefix = path if path.endswith("/") or not path else path[: min(path.find(s) for s in "*?[" if s in path)]
    prefix = prefix.rpartition("/")[0]
    listed = list(store.retried(lambda: store.list(prefix), without_secrets(url)))
    found = [entry for entry in listed if fnmatchcase(entry[0], path) or not has_pattern(path)]
    found = [entry for entry in found if not endings or entry[0].lower().endswith(endings)]
    if not found:
        names = ", ".join(name for name, _, _ in listed[:4])
        raise DataError(
            f"there is nothing at {without_secrets(url)}",
            f"below {store.shown}/{prefix} are {names}" if listed else "there is nothing above it either",
        )
    return [Remote(store, name, size, tag, cache) for name, size, tag in sorted(found)]


class Obstore(FileStore):
    """Amazon S3 and what speaks like it, Google, Azure, and plain HTTP."""

    whole: tuple[str, str, bytes] = ("", "", b"")
    """Path, tag and content of the last file of a server that knows no ranges."""

    @cached_property
    def client(self) -> Any:
        needed("obstore", "cloud", f"{self.root.partition('://')[0]}://")
        from obstore.store import from_url

        client = {"timeout": TIMEOUT, "connect_timeout": "10s", **self.storage.get("client_options", {})}
        config = {key: value for key, value in self.storage.items() if key != "client_options"}
        if over_http(self.root, config):
            client.setdefault("allow_http", True)
        if self.root.startswith("s3://") and "endpoint" in config:
            config.setdefault("region", "us-east-1")
        retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}  # ``retried`` does that
        asked: Any = {"client_options": client, "retry_config": retry, **({"config": config} if config else {})}
        return from_url(self.root, **asked)

    def head(self, path: str) -> tuple[int, str]:
        found = self._said(lambda: self.client.head(path))
        return found["size"], _tag(found)

    def list(self, prefix: str) -> Iterable[tuple[str, int, str]]:
        pages = self._said(lambda: self.client.list(prefix or None).collect())
        return [(entry["path"], entry["size"], _tag(entry)) for entry in pages]

    def get(self, path: str, start: int, stop: int, tag: str) -> bytes:
        if (path, tag) == self.whole[:2]:
            return self.whole[2][start:stop]
        options: dict[str, Any] = {"if_match": tag[5:]} if tag.startswith("etag ") else {}
        try:
            return self._got(path, tag, {**options, "range": (start, stop)})
        except Exception as error:
            if type(error).__name__ != "NotSupportedError":
                raise
        self.whole = (path, tag, self._got(path, tag, options))  # a plain web server that knows no ranges
        return self.whole[2][start:stop]

    def _got(self, path: str, tag: str, options: dict[str, Any]) -> bytes:
        answer = self._said(lambda: self.client.get(path, options=options))
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


class Fsspec(FileStore):
    """Whatever else fsspec knows: sftp, hdfs, memory, ..."""

    @cached_property
    def client(self) -> Any:
        scheme = self.root.partition("://")[0]
        fsspec = needed("fsspec", "cloud", f"{scheme}://")
        try:
            return fsspec.filesystem(scheme, **self.storage)
        except (ValueError, ImportError) as error:
            raise DataError(f"{self.shown} cannot be opened: {error}") from None

    def _path(self, path: str) -> str:
        inside = self.root.partition("://")[2]
        return f"{inside}/{path}" if inside else path

    def head(self, path: str) -> tuple[int, str]:
        found = self._said(lambda: self.client.info(self._path(path)))
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
        found = self._said(lambda: self.client.find(self._path(prefix), detail=True))
        inside = self.root.partition("://")[2] + "/"
        return [(name.split(inside, 1)[-1].lstrip("/"), e["size"], self._tag(e)) for name, e in found.items()]

    def get(self, path: str, start: int, stop: int, tag: str) -> bytes:
        if self.head(path)[1] != tag:
            raise Gone("has changed since it was opened; open it again")
        return self._said(lambda: self.client.cat_file(self._path(path), start=start, end=stop))

    @staticmethod
    def _tag(info: Mapping[str, Any]) -> str:
        marks = [info[key] for key in ("ETag", "etag", "blob_id", "mtime", "LastModified", "created") if info.get(key)]
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
    """``url`` as it may be shown: no password, no parameters. A path as it is."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    user = f"{parts.username}:***@" if parts.password else f"{parts.username}@" if parts.username else ""
    mark = "?***" if parts.query else ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}{mark}"


def without_secrets_of(text: str, url: str, storage: Mapping[str, Any]) -> str:
    """``text`` without the secrets that a URL or its options hold."""
    parts = urlsplit(url)
    for secret in (*_secrets(storage), parts.password, parts.query):
        text = text.replace(secret, "***") if secret else text
    return text


def folders_of(url: Url) -> list[str]:
    """A URL or path part by part, as the names of its files begin: up to its first pattern."""
    text = without_secrets(url).split("?***")[0] if isinstance(url, str) and is_remote(url) else ""
    parts = (text or str(Path(str(url).removeprefix("file://")).expanduser())).rstrip("/").split("/")
    return parts[: next((i for i, part in enumerate(parts) if has_pattern(part)), len(parts))]


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif any(word in key.lower() for word in ("secret", "key", "token", "password", "sas", "credential")):
            yield str(value)


@lru_cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Of one process: a forked one has none of its parent's threads."""
    return ThreadPoolExecutor(TOGETHER, thread_name_prefix="meshfit-remote")
