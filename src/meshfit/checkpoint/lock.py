"""One run writes to a folder at a time. The lock is the operating system's: it goes when its process does, however
that ends. The file only says who it is."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from meshfit.errors import CheckpointError

NAME = "lock"
LINGER = 5.0  # seconds: ranks notice that their caller was killed a moment after that, and end; then it is free
_held: dict[str, int] = {}  # by this process, which the system would let in again; and where to read who it is: a
# process that opens a file it has locked, and closes it, has lost the lock
_guard = threading.Lock()


def _locked(fd: int) -> bool:
    until = time.monotonic() + LINGER
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)


class Lock:
    """Held from ``take`` to ``release``, or the end of the process."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._fd = -1

    def take(self) -> None:
        key = os.path.realpath(self.path)
        with _guard:
            if key in _held:
                raise self._refused(_held[key])
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints cannot be written to {self.path.parent}", f"{type(error).__name__}: {error.strerror}"
                ) from None
            if not _locked(fd):
                refused = self._refused(fd)
                os.close(fd)
                raise refused
            self._fd = fd
            _held[key] = fd
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(about).encode(), 0)

    def _refused(self, fd: int) -> CheckpointError:
        who = "another run"
        with contextlib.suppress(OSError, ValueError, KeyError):
            about = json.loads(os.pread(fd, 4096, 0))
            who = f"process {about['pid']} on {about['host']}, since {about['since']}"
        return CheckpointError(
            f"{self.path.parent} is in use", f"{who} writes its checkpoints there", "give this run another folder"
        )

    def release(self) -> None:
        with _guard:
            if self._fd >= 0:
                _held.pop(os.path.realpath(self.path), None)
                os.close(self._fd)
                self._fd = -1
