"""What was far away or slow to read, kept on the local disk: bounded, shared by all processes, safe to delete.

A file holds its bytes and their CRC: one that was cut short or spoilt is fetched again. Files come into being by a
rename, so that nobody sees half of one. When there is more than ``most``, the longest unused go.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshfit.arguments import check_local
from meshfit.errors import DataError

_OPEN = 512  # blocks a process keeps mapped


@dataclass
class Cache:
    """A folder of at most ``most`` bytes."""

    path: Path
    most: int = 50 * 2**30
    _maps: OrderedDict[str, NDArray[np.uint8]] = field(default_factory=OrderedDict, repr=False)
    _held: int | None = field(default=None, repr=False)

    @classmethod
    def usual(cls) -> "Cache":
        return cls(Path.home() / ".cache" / "meshfit")

    @classmethod
    def of(cls, asked: "Cache | str | Path | None") -> "Cache":
        if asked is None or isinstance(asked, Cache):
            return asked or cls.usual()
        check_local("cache", asked)
        return cls(Path(asked))

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "most": self.most, "_maps": OrderedDict(), "_held": None}

    def get(self, key: str, size: int, make: Callable[[], bytes]) -> NDArray[np.uint8]:
        """The ``size`` bytes of ``key``; made where they are not here yet."""
        if (found := self._maps.get(key)) is not None:
            return found
        file = self.path / "blocks" / hashlib.sha256(key.encode()).hexdigest()[:40]
        block = _opened(file, size)
        if block is None:
            data = make()
            self._write(file, data)
            block = np.frombuffer(data, np.uint8)
        else:
            with contextlib.suppress(OSError):
                os.utime(file)
            self._maps[key] = block
            while len(self._maps) > _OPEN:
                with contextlib.suppress(KeyError):
                    self._maps.popitem(last=False)
        return block

    def has(self, key: str) -> bool:
        return key in self._maps or (self.path / "blocks" / hashlib.sha256(key.encode()).hexdigest()[:40]).exists()

    def _write(self, file: Path, data: bytes) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.write(zlib.crc32(data).to_bytes(4, "little"))
            os.replace(temporary, file)
        except OSError as error:
            raise DataError(
                f"the cache {self.path} cannot be written: {error.strerror}", "give another: cache=..."
            ) from error
        self._held = (self._size() if self._held is None else self._held + len(data)) if self.most else 0
        if self._held > self.most:
            self._shrink()

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for file in (self.path / "blocks").glob("*"):
            with contextlib.suppress(OSError):
                stat = file.stat()
                found.append((stat.st_mtime, stat.st_size, file))
        return sorted(found)

    def _size(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _shrink(self) -> None:
        files = self._files()
        self._held = sum(size for _, size, _ in files)
        for _, size, file in files:
            if self._held <= 0.9 * self.most:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            self._held -= size

    def folder(self, key: str, make: Callable[[Path], None]) -> Path:
        """A folder that ``make`` fills, once, whoever asks first; the others wait."""
        place = self.path / "tables" / hashlib.sha256(key.encode()).hexdigest()[:40]
        if place.is_dir():
            os.utime(place)
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_suffix(".lock")):
            if not place.is_dir():
                self._room()
                temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
                try:
                    make(temporary)
                    os.replace(temporary, place)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
        return place

    def _room(self) -> None:
        """Remove the longest unused folders above ``most``."""
        folders = [p for p in (self.path / "tables").iterdir() if p.is_dir() and not p.name.startswith(".")]
        sizes = {p: sum(f.stat().st_size for f in p.iterdir()) for p in folders}
        for place in sorted(folders, key=lambda p: p.stat().st_mtime):
            if sum(sizes.values()) <= self.most:
                return
            shutil.rmtree(place, ignore_errors=True)
            del sizes[place]


def _opened(file: Path, size: int) -> NDArray[np.uint8] | None:
    """The block in ``file`` if it is whole and unspoilt."""
    try:
        block = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError):
        return None
    if len(block) != size + 4 or zlib.crc32(block[:-4].data) != int.from_bytes(bytes(block[-4:]), "little"):
        return None
    return block[:-4]


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
