"""The lock of a bucket: an object that is renewed while its run lives.

There is no operating system to end it with its process. It is free at once where the process that holds it was on this
machine and is gone; else when nobody has renewed it for a while, by this machine's clock alone. A run that finds its
lease taken by another (it stood still for longer than that) saves nothing more.
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

from meshfit.checkpoint.lock import NAME
from meshfit.errors import CheckpointError

if TYPE_CHECKING:
    from meshfit.checkpoint.bucket import Bucket

RENEWED, STALE = 15.0, 60.0  # seconds
LOOK = 0.5
_held: set[str] = set()  # by this process


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
                raise self._refused(about)
            seen = tag
            if self._is_gone(about) or time.monotonic() - since > STALE:
                try:
                    self.bucket.said(lambda tag=tag: self._put({"e_tag": tag}))
                    break
                except (OSError, self.bucket.obs.exceptions.PreconditionError):
                    raise CheckpointError(f"{self.bucket} is in use", "another run has just taken it") from None
            time.sleep(LOOK)
        _held.add(self.me)
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
            return about["id"] not in _held
        try:
            return psutil.Process(about["pid"]).create_time() != about["started"]
        except psutil.NoSuchProcess:
            return True

    def _refused(self, about: dict[str, Any]) -> CheckpointError:
        who = f"process {about['pid']} on {about['host']}"
        return CheckpointError(
            f"{self.bucket} is in use", f"{who} writes its checkpoints there", "give this run another folder"
        )

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
            _held.discard(self.me)
            with contextlib.suppress(OSError, CheckpointError):
                self.check()
                self.bucket.remove(NAME)


def _machine() -> str:
    """This machine since it was started, and what numbers its processes have; "" where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
