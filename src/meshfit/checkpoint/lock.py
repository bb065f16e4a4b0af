"""One run writes to a folder at a time. The lock is the operating system's: it goes when its process does, however
that ends. The file only says who it is."""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

from meshfit.errors import CheckpointError
from meshfit.launch.system import BINARY, lock_file

NAME = "lock"
LINGER = 5.0  # seconds: ranks notice that their caller was killed a moment after that, and end; then it is free
_held: dict[str, int] = {}  # by this process, which the system would let in again; and where to read who it is: a
# process that opens a file it has locked, and closes it, has lost the lock
_guard = threading.Lock()


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
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | BINARY, 0o644)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints cannot be written to {self.path.parent}", f"{type(error).__name__}: {error.strerror}"
                ) from None
            if not lock_file(fd, patience=LINGER):
                refused = self._refused(fd)
                os.close(fd)
                raise refused
            self._fd = fd
            _held[key] = fd
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, json.dumps(about).encode())

    def check(self) -> None:
        """It is not lost while its process lives."""

    def _refused(self, fd: int) -> CheckpointError:
        who = "another run"
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.lseek(fd, 0, os.SEEK_SET)
            about = json.loads(os.read(fd, 4096))
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
