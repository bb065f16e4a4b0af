"""The few things checkpoints ask of a folder: that a file is on disk when it was said to be, and that a name appears
whole or not at all. Everything goes through here, so tests can let any of it fail, and another place can stand in.

A save is, in order: a new folder; each rank's file written and synced, then its acknowledgement (written beside,
synced, renamed, and the folder synced); the manifest likewise, last; and the folder above synced.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshfit.arguments import is_url
from meshfit.checkpoint.lock import Lock
from meshfit.errors import CheckpointError
from meshfit.launch.system import BINARY, read_at, sync_folder
from meshfit.live import LIVE
from meshfit.units import size

PART = ".part"
"""What a file is called until all of it is there."""

WRITE = 8 * 2**20


class Files:
    """A folder on this machine's file systems. Names are relative to it."""

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def about(self, act: str, name: str) -> None:
        """Called before everything that changes the disk."""

    def path(self, name: str) -> Path:
        if name and (os.path.isabs(name) or ".." in Path(name).parts):
            raise CheckpointError(f"{name!r} is no name within {self.root}", "the checkpoint is not to be trusted")
        return self.root / name

    def where(self, name: str) -> Path | str:
        """Of a file, as it may be shown."""
        return self.root / name

    def inside(self, name: str) -> "Files":
        """The folder ``name`` within this one."""
        return Files(self.path(name))

    def above(self) -> "tuple[Files, str]":
        """The folder that this one is in, and its name there."""
        return Files(self.root.parent), self.root.name

    # Writing

    def make(self, name: str = "") -> None:
        """A new folder; an error if there is one. The root itself may exist."""
        self.about("make", name)
        if name:
            os.mkdir(self.path(name))
            self.sync(os.path.dirname(name))
        else:
            self.root.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, chunks: Iterable[Any]) -> int:
        """A new file, on disk when this returns. How long it is."""
        self.about("open", name)
        size = 0
        fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o644)
        try:
            for chunk in chunks:
                left = memoryview(chunk).cast("B")
                while left:
                    self.about("write", name)
                    done = os.write(fd, left[:WRITE])
                    LIVE.tick()
                    left, size = left[done:], size + done
            self.about("fsync", name)
            os.fsync(fd)
        finally:
            os.close(fd)
        return size

    def put(self, name: str, chunks: Iterable[Any]) -> None:
        """A file that appears whole, and is on disk when this returns."""
        part = self.path(name + PART)
        part.unlink(missing_ok=True)
        try:
            self.write(name + PART, chunks)
            self.about("rename", name)
            os.replace(part, self.path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        self.sync(os.path.dirname(name))

    def sync(self, name: str = "") -> None:
        """Have the names in a folder on disk."""
        self.about("fsync folder", name)
        sync_folder(self.path(name))

    def remove(self, name: str) -> None:
        """Also where there is none."""
        self.about("remove", name)
        self.path(name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        self.about("remove", name)
        shutil.rmtree(self.path(name), ignore_errors=True)

    def move(self, name: str, to: str) -> None:
        """Another name for a file, or a folder."""
        self.about("rename", to)
        os.rename(self.path(name), self.path(to))

    def lock(self) -> Lock:
        """What keeps other runs out, once taken."""
        return Lock(self.root)

    def free(self) -> int | None:
        """Bytes that can still be written; None if nobody knows."""
        above = self.root
        while not above.exists() and above != above.parent:
            above = above.parent
        return shutil.disk_usage(above).free

    # Reading

    def names(self, name: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        """-1 if there is no such file."""
        try:
            found = os.stat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return -1
        return found.st_size if os.path.isfile(self.path(name)) else -1

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(self.path(name), "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from byte ``start`` on. How many bytes there were."""
        fd = os.open(self.path(name), os.O_RDONLY | BINARY)
        try:
            return read_at(fd, buffer, start)
        finally:
            os.close(fd)


def refused(error: OSError, files: Files, name: str, needed: int, before: str = "") -> CheckpointError:
    """Why a checkpoint could not be written: path, needed, free; and what became of the one ``before``."""
    facts = [f"{type(error).__name__}: {error.strerror or error}"]
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = files.free()
        except OSError:
            free = None
        facts.append(f"needed: {size(needed)} for this rank's part; free: {'?' if free is None else size(free)}")
    return CheckpointError(f"the checkpoint {os.path.join(str(files), name)} could not be written", *facts, before)


def joined(root: Path | str, name: str) -> Path | str:
    """The file or folder ``name`` in ``root``."""
    if not is_url(root):
        return Path(root) / name
    base, mark, query = str(root).partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def open_files(root: "Files | Path | str", **how: Any) -> Files:
    """The folder at ``root``: a path, or a URL of a bucket; ``how``: see ``Bucket``."""
    if isinstance(root, Files):
        return root
    if is_url(root):
        from meshfit.checkpoint.bucket import Bucket

        return Bucket(str(root), **how)
    return Files(root)
