"""A run's folder in a bucket: what is written line by line is written to a folder of this machine, and copied.

metrics, events, logs, the report      copied by a thread, when they have grown by a quarter, or every few minutes
checkpoints, weights.safetensors       not here: ranks write them straight to the bucket

A bucket that does not answer ends no training: it is said once, tried again, and at the end what could not be copied
stays in this machine's folder, which is then named.
"""

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshfit.arguments import is_url
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.graceful_stop import NAME as STOP
from meshfit.checkpoint.resume import folder_to_resume
from meshfit.data.remote import without_secrets
from meshfit.errors import JobError, MeshfitError

EVERY = 5.0  # seconds between two looks at what has changed
GROWN = 1.25
LONGEST = 300.0  # seconds until a file that has changed at all is copied again
PATIENCE = 20.0  # seconds in which a bucket may come back, before it is said
CHUNK = 8 * 2**20
UNFINISHED = (".new", ".part")

Note = Callable[[str, str], None]
"""Called with what it is about, and a text; the first text of each counts."""


class Mirror:
    """Copies the files of ``folder`` to ``url`` until ``finish``. ``only``: which of them, by name."""

    def __init__(self, folder: Path, url: str, note: Note, only: Callable[[str], bool] = lambda name: True):
        self.folder, self.files, self.note, self.only = folder, open_files(url, patience=PATIENCE), note, only
        self._sent: dict[str, tuple[int, int, float]] = {}
        """By name: size and time of change when it was copied, and when that was."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="meshfit-mirror", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(EVERY):
            self._copy(last=False)
            with suppress(OSError):
                if self.files.size(STOP) >= 0:
                    self.files.remove(STOP)
                    (self.folder / STOP).touch()

    def _copy(self, *, last: bool) -> dict[str, OSError]:
        """Copy what has changed; what could not be."""
        failed: dict[str, OSError] = {}
        for name, found in self._changed(last):
            if failed:  # the others wait too
                failed[name] = next(iter(failed.values()))
                continue
            try:
                self.files.write(name, _chunks(self.folder / name, found.st_size))
                self._sent[name] = found.st_size, found.st_mtime_ns, time.monotonic()
            except OSError as error:
                failed[name] = error
        if failed and not last:
            name, error = next(iter(failed.items()))
            said = f"{self.files.where(name)} could not be written: {error.strerror or error}"
            self.note("mirror", f"{said}; metrics, events and logs wait in {self.folder}, the training goes on")
        return failed

    def _changed(self, last: bool) -> Iterator[tuple[str, os.stat_result]]:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if name == STOP or name.endswith(UNFINISHED) or not self.only(name) or not path.is_file():
                continue
            with suppress(OSError):
                found = path.stat()
                size, changed, at = self._sent.get(name, (0, 0, -LONGEST))
                if (size, changed) == (found.st_size, found.st_mtime_ns):
                    continue
                if last or found.st_size > GROWN * size or found.st_size < size or time.monotonic() - at > LONGEST:
                    yield name, found

    def finish(self) -> bool:
        """Copy what is left. Whether all of it is there now."""
        self._over.set()
        self._thread.join()
        failed = self._copy(last=True)
        if failed:
            error = next(iter(failed.values()))
            some = ", ".join(list(failed)[:4]) + (f" and {len(failed) - 4} more" if len(failed) > 4 else "")
            said = f"{some} could not be written to {self.files}; they are in {self.folder}"
            self.note("not copied", f"{said}: {error.strerror or error}")
        return not failed


@contextmanager
def events_copied(out: Any, folder: Path | None, rank: int, size: int) -> Iterator[None]:
    """Around one rank's training, where ranks may be on several hosts: those but the first copy their own events, and
    when all have, the first has them for the report."""
    if size == 1 or folder is None or not is_url(out):
        yield
        return
    own = lambda name: name == f"events/rank{rank}.jsonl" or name.startswith("events/machine-")
    mirror = Mirror(folder, out, lambda about, text: None, own) if rank else None
    try:
        yield
    finally:
        if mirror is not None and mirror.finish():  # on a host of its own, nothing is left
            for path in filter(own, ("events/" + each.name for each in (folder / "events").glob("*"))):
                (folder / path).unlink(missing_ok=True)
            for empty in (folder / "events", folder):
                with suppress(OSError):
                    empty.rmdir()
    dist.barrier()
    if rank == 0:
        files = open_files(out, patience=PATIENCE)
        with suppress(OSError):
            for name in files.names("events"):
                if not (folder / "events" / name).exists():
                    download(files, f"events/{name}", folder)


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """The first ``size`` bytes: more may be written meanwhile."""
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(CHUNK, size))):
            size -= len(chunk)
            yield chunk


def download(files: Files, name: str, folder: Path) -> None:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    size = files.size(name)
    with target.open("wb") as file:
        for start in range(0, size, CHUNK):
            file.write(files.read(name, start, min(size, start + CHUNK)))


def local_folder(token: str) -> Path:
    """Of this machine, for the files of a run in a bucket."""
    folder = Path(tempfile.gettempdir()) / f"meshfit-{token}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def removed_with(owner: Any, folder: Path) -> weakref.finalize:
    """``folder`` goes when ``owner`` does, or this process; ``detach`` keeps it."""
    return weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)


def new_prefix(url: str) -> str:
    """``url``, or ``url-2``, ``url-3`` ... if there is something: nothing is overwritten. Refused if it cannot be."""
    if len([part for part in url.partition("://")[2].partition("?")[0].split("/") if part]) < 2:
        raise JobError(
            f"out={without_secrets(url)!r} is a whole bucket", f'name a folder in it: "{without_secrets(url)}/runs/one"'
        )
    base, mark, query = url.partition("?")
    n, candidate = 2, base.rstrip("/")
    with _writing(url):
        while True:
            above, name = open_files(f"{candidate}{mark}{query}", patience=PATIENCE).above()
            with suppress(FileExistsError):
                if not above.inside(name).names():
                    above.make(name)
                    return f"{candidate}{mark}{query}"
            candidate, n = f"{base.rstrip('/')}-{n}", n + 1


def prefix_to_resume(url: str, folder: Path) -> str:
    """A run's own place in a bucket, for it to go on in; its metrics and logs come to ``folder``, to go on there."""
    with _writing(url):
        files = folder_to_resume(url)
        for name in ("metrics.jsonl", *(f"logs/{each}" for each in files.names("logs"))):
            if files.size(name) >= 0:
                download(files, name, folder)
    return url


@contextmanager
def _writing(url: str) -> Iterator[None]:
    try:
        yield
    except MeshfitError:
        raise
    except OSError as error:
        raise JobError(f"out={without_secrets(url)!r} cannot be written", str(error.strerror or error)) from None
