"""Files, here or far away: a size, a tag that changes when the content does, and ranges of bytes.

Every format on disk reads through this, so every format is readable in the cloud too (remote.py).
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data.cache import Cache
from meshfit.errors import DataError

Bytes = bytes | memoryview | NDArray[np.uint8]
Url = str | Path


class Blob(ABC):
    """One file. Small, picklable, opened where it is read."""

    name: str
    """Path or URL, without secrets."""
    size: int
    tag: str

    @abstractmethod
    def ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[Bytes]:
        """The bytes of each range, in order."""

    def read(self, start: int = 0, stop: int | None = None) -> Bytes:
        return self.ranges([start], [self.size if stop is None else stop])[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class LocalFile(Blob):
    """A file on disk, mapped into memory: the ranks of a machine share its pages."""

    def __init__(self, path: Path):
        found = path.stat()
        self.path, self.name, self.size = path, str(path), found.st_size
        self.tag = f"{found.st_size}-{found.st_mtime_ns}"
        self._map: NDArray[np.uint8] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The whole file as an array."""
        if self._map is None:
            found = self.path.stat()
            if f"{found.st_size}-{found.st_mtime_ns}" != self.tag:
                raise DataError(f"{self.name} has changed since it was opened", "open it again, or put it back")
            self._map = np.memmap(self.path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        return self._map

    def ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[Bytes]:
        whole = self.bytes
        return [whole[start:stop] for start, stop in zip(starts, stops, strict=True)]


def find(
    url: Url | Sequence[Url],
    endings: tuple[str, ...] = (),
    *,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | str | Path | None = None,
    folder: bool = False,
) -> list[Blob]:
    """The files of ``url`` (a file, a folder, a pattern, or several of these), by name; of a folder those with
    ``endings``, at any depth. ``folder``: it is one, also where a URL does not end in "/"."""
    if not isinstance(url, str | Path):
        return [blob for one in url for blob in find(one, endings, storage=storage, cache=cache)]
    if is_remote(url):
        from meshfit.data.remote import find_remote

        return find_remote(f"{str(url).rstrip('/')}/" if folder else str(url), endings, storage or {}, Cache.of(cache))
    path = Path(str(url).removeprefix("file://")).expanduser()
    if path.is_file():
        return [LocalFile(path)]
    if path.is_dir():
        under = [Path(at) / name for at, _, names in os.walk(path) for name in names]
        files = [file for file in under if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        files = [file for file in files if not endings or file.name.lower().endswith(endings)]
        if not files:
            raise DataError(f"{path} holds no file ending in {' '.join(endings)}")
    else:
        start = _before_pattern(path)
        files = [f for f in start.rglob("*") if fnmatchcase(str(f), str(path)) and f.is_file()] if start else []
        if not files:
            raise DataError(f"{str(url)!r} is a path, but there is nothing there", _nearby(path))
    return [LocalFile(file) for file in sorted(files)]


def is_remote(url: Url) -> bool:
    return isinstance(url, str) and "://" in url and not url.startswith("file://")


def has_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")


def _before_pattern(path: Path) -> Path | None:
    if not has_pattern(str(path)):
        return None
    start = next(parent for parent in path.parents if not has_pattern(str(parent)))
    return start if start.is_dir() else None


def _nearby(path: Path) -> str:
    parent = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    names = sorted(child.name for child in parent.iterdir())
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{parent} holds {', '.join(names[:6]) or 'nothing'}{more}"


def tag_of(blobs: Sequence[Blob]) -> str:
    """One tag for many files: changes when any of them does. Their folder does not matter, their names do."""
    text = "\n".join(f"{blob.name} {blob.size} {blob.tag}" for blob in blobs)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
