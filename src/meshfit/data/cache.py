"""What was far away or slow to read, kept on the local disk: bounded, shared by all processes, safe to delete.

A file holds its bytes and their CRC: one that was cut short or spoilt is fetched again. Files come into being by a
rename, so that nobody sees half of one. When there is more than ``most``, the longest unused go.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.arguments import check_local
from meshfit.errors import DataError
from meshfit.launch.system import lock_file

ABANDONED = 3600.0  # seconds after which a file that is being written is taken for a dead writer's
_OPEN = 512  # blocks a process keeps mapped


class Cache:
    """A folder of at most ``most`` bytes."""

    def __init__(self, path: Path, most: int = 50 * 2**30):
        self.path, self.most = path, most
        self._maps: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._held: int | None = None
        self._written = 0  # bytes since the folder was last looked at: others write to it too
        self._counting = threading.Lock()

    def __reduce__(self) -> Any:
        return Cache, (self.path, self.most)

    @classmethod
    def usual(cls) -> "Cache":
        return cls(Path.home() / ".cache" / "meshfit")

    @classmethod
    def of(cls, asked: "Cache | str | Path | None") -> "Cache":
        if asked is None or isinstance(asked, Cache):
            return asked or cls.usual()
        check_local("cache", asked)
        return cls(Path(asked))

    def _path(self, kind: str, key: str) -> Path:
        return self.path / kind / hashlib.sha256(key.encode()).hexdigest()[:40]

    def get(self, key: str, size: int, make: Callable[[], bytes]) -> NDArray[np.uint8]:
        """The ``size`` bytes of ``key``; made where they are not here yet."""
        if (found := self._maps.get(key)) is not None:
            return found
        file = self._path("blocks", key)
        block = _opened(file, size)
        if block is None:
            data = make()
            self._write(file, data)
            return np.frombuffer(data, np.uint8)
        with contextlib.suppress(OSError):
            os.utime(file)
        self._maps[key] = block
        while len(self._maps) > _OPEN:
            with contextlib.suppress(KeyError):
                self._maps.popitem(last=False)
        return block

    def _write(self, file: Path, data: bytes) -> None:
        for last in (False, True):
            try:
                _put(file, data)
                break
            except OSError as error:
                if last or not isinstance(error, FileNotFoundError):  # else somebody emptied the cache: that is allowed
                    raise DataError(
                        f"the cache {self.path} cannot be written: {error.strerror}", "give another: cache=..."
                    ) from error
        with self._counting:
            self._written += len(data) + 4
            if self._held is None or self._held + self._written > self.most or self._written > self.most / 16:
                self._held, self._written = self._evict("blocks", 0.9), 0

    def _evict(self, kind: str, share: float = 1.0, keep: int = 0) -> int:
        """If there is more than ``most``, remove what was not used for longest until a ``share`` of that is left, or
        ``keep`` of them. The bytes that stay. What others are writing is not touched, but for what a dead one left."""
        found, old = [], time.time() - ABANDONED
        for place in (self.path / kind).glob("*"):
            with contextlib.suppress(OSError):  # another removes it just now
                used = place.stat().st_mtime
                files = list(place.iterdir()) if place.is_dir() else [place]
                if place.suffix != ".lock" and (not place.name.startswith(".") or (used < old and place.is_file())):
                    found.append((used, sum(file.stat().st_size for file in files), place))
        held = sum(size for _, size, _ in found)
        limit = self.most if held <= self.most else share * self.most
        for _, size, place in sorted(found)[: max(0, len(found) - keep)]:
            if held <= limit:
                break
            with contextlib.suppress(OSError):
                shutil.rmtree(place) if place.is_dir() else place.unlink()
                place.with_suffix(".lock").unlink(missing_ok=True)
            held -= size
        return held

    def folder(self, key: str, make: Callable[[Path], None], *, kind: str = "tables", keep: int = 0) -> Path:
        """A folder that ``make`` fills, once, whoever asks first; the others wait. At least ``keep`` of its ``kind``
        stay, whatever their size."""
        place = self._path(kind, key)
        with contextlib.suppress(FileNotFoundError):
            os.utime(place)
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_suffix(".lock").open("w") as lock:
            lock_file(lock.fileno(), threads=True)
            if not place.is_dir():
                self._evict(kind, keep=keep)
                temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
                try:
                    make(temporary)
                    os.replace(temporary, place)
                except BaseException as error:
                    shutil.rmtree(temporary, ignore_errors=True)
                    if not isinstance(error, OSError) or not place.is_dir():  # else another's, whose lock was removed
                        raise
        return place


def _put(file: Path, data: bytes) -> None:
    """Write a block under a name of its own, then give it its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.write(zlib.crc32(data).to_bytes(4, "little"))
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _opened(file: Path, size: int) -> NDArray[np.uint8] | None:
    """The block in ``file`` if it is whole and unspoilt."""
    try:
        block = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError):
        return None
    if len(block) != size + 4 or zlib.crc32(block[:-4].data) != int.from_bytes(bytes(block[-4:]), "little"):
        return None
    return block[:-4]
