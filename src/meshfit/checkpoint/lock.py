"""One run writes to a folder at a time.

Lock     of a folder: the operating system's. It goes when its process does, however that ends; the file only says
         who it is.
Lease    of a bucket: an object that is renewed while its run lives. It is free at once where the process that holds
         it was on this machine and is gone; else when nobody has renewed it for a while, by this machine's clock
         alone. A run that finds its lease taken by another (it stood still for longer than that) saves nothing
         more.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from meshfit.errors import CheckpointError
from meshfit.launch.system import BINARY, lock_file

if TYPE_CHECKING:
    from meshfit.checkpoint.bucket import Bucket

NAME = "lock"
LINGER = 5.0  # seconds: ranks notice that their caller was killed a moment after that, and end; then it is free
_held: dict[str, int] = {}  # by this process, which the system would let in again; and where to read who it is: a
# process that opens a file it has locked, and closes it, has lost the lock
_guard = threading.Lock()
RENEWED, STALE = 15.0, 60.0  # seconds
LOOK = 0.5
_leases: set[str] = set()  # by this process


def _in_use(where: Any, who: str) -> CheckpointError:
    return CheckpointError(f"{where} is in use", f"{who} writes its checkpoints there", "give this run another folder")


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
        return _in_use(self.path.parent, who)

    def release(self) -> None:
        with _guard:
            if self._fd >= 0:
                _held.pop(os.path.realpath(self.path), None)
                os.close(self._fd)
                self._fd = -1


class Lease:
    """Held from ``take`` to ``release``."""

    def __init__(self, bucket: "Bucket"):
        self.bucket, self.me = bucket, uuid.uuid4().hex
        self._over = threading.Event()
        self._tag: Any = None
        self._lost = False

    def take(self) -> None:
        taken = self.bucket.obs.exceptions.AlreadyExistsError
        seen, since = None, time.monotonic()
        while True:
            with contextlib.suppress(taken):
                self.bucket.said(lambda: self._put("create"))
                break
            try:
                about, tag = self._held()
            except FileNotFoundError:  # released meanwhile
                continue
            if seen is not None and seen != tag:
                raise _in_use(self.bucket, f"process {about['pid']} on {about['host']}")
            seen = tag
            if self._is_gone(about) or time.monotonic() - since > STALE:
                try:
                    self.bucket.said(lambda tag=tag: self._put({"e_tag": tag}))
                    break
                except (OSError, self.bucket.obs.exceptions.PreconditionError):
                    raise CheckpointError(f"{self.bucket} is in use", "another run has just taken it") from None
            time.sleep(LOOK)
        _leases.add(self.me)
        threading.Thread(target=self._renew, name="meshfit-lease", daemon=True).start()

    def check(self) -> None:
        """Raise if another run has it."""
        if self._lost:
            raise CheckpointError(
                f"another run has taken {self.bucket}",
                f"this one did not renew its lease for {STALE:.0f} s, and saves nothing more there",
            )

    def _held(self) -> tuple[dict[str, Any], Any]:
        found = self.bucket.said(lambda: self.bucket.obs.get(self.bucket.store, NAME))
        return json.loads(bytes(found.bytes())), found.meta["e_tag"]

    def _is_gone(self, about: dict[str, Any]) -> bool:
        """Whether it was held by a process of this machine that has ended."""
        if not _machine() or about.get("machine") != _machine():
            return False
        if about["pid"] == os.getpid():
            return about["id"] not in _leases
        try:
            return psutil.Process(about["pid"]).create_time() != about["started"]
        except psutil.NoSuchProcess:
            return True

    def _put(self, mode: Any) -> None:
        about = {
            "id": self.me,
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "renewed": time.time(),
        }
        done = self.bucket.obs.put(self.bucket.store, NAME, json.dumps(about).encode(), mode=mode)
        self._tag = done["e_tag"]

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            try:
                self.bucket.said(lambda: self._put({"e_tag": self._tag}))
            except self.bucket.obs.exceptions.PreconditionError:
                with contextlib.suppress(OSError):  # an answer that was lost: it is ours all the same
                    about, tag = self._held()
                    if about["id"] != self.me:
                        self._lost = True
                        return
                    self._tag = tag
            except OSError:
                pass

    def release(self) -> None:
        if self._tag is not None and not self._over.is_set():
            self._over.set()
            _leases.discard(self.me)
            with contextlib.suppress(OSError, CheckpointError):
                self.check()
                self.bucket.remove(NAME)


def _machine() -> str:
    """This machine since it was started, and what numbers its processes have; "" where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
