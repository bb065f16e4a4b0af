"""Checkpoints in a bucket: s3://, gs://, az://, through obstore.

An object appears whole or not at all, and is durable when its upload is acknowledged, so nothing is synced or renamed;
the manifest still comes last. A folder is taken by an object that only one can create. The lock is a lease: there is
no operating system to end it with its process, so it is renewed every minute, and taken over when it was not for five.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshfit.checkpoint.files import Files
from meshfit.checkpoint.lock import NAME as LOCK
from meshfit.data.remote import over_http
from meshfit.errors import CheckpointError, JobError

BEGUN = ".begun"
RENEWED, STALE = 60.0, 300.0  # seconds


class Bucket(Files):
    """A prefix of a bucket. ``storage``: what obstore is told beside the environment (endpoint, keys, region)."""

    def __init__(self, url: str, storage: Mapping[str, Any] | None = None, store: Any = None):
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise JobError(f"{url.partition('://')[0]}:// needs obstore", "pip install 'meshfit[cloud]'") from None
        self.obs: Any = obstore
        self.url, self.storage = url.rstrip("/"), dict(storage or {})
        self.root = Path(self.url)  # for joining names alone
        if store is None:
            http = over_http(self.url, self.storage)
            asked: dict[str, Any] = {"config": self.storage} if self.storage else {}
            store = from_url(self.url, **asked, client_options={"allow_http": True} if http else None)
        self.store: Any = store

    def __str__(self) -> str:
        return self.url

    # Writing

    def make(self, name: str = "") -> None:
        self.about("make", name)
        if name:
            try:
                self._said(lambda: self.obs.put(self.store, f"{name}/{BEGUN}", b"begun", mode="create"))
            except self.obs.exceptions.AlreadyExistsError:
                raise FileExistsError(name) from None

    def write(self, name: str, chunks: Iterable[Any]) -> int:
        self.about("open", name)
        size = 0

        def upload() -> None:
            nonlocal size
            with self.obs.open_writer(self.store, name, buffer_size=8 * 2**20) as file:
                for chunk in chunks:
                    self.about("write", name)
                    size += len(chunk)
                    file.write(bytes(chunk))
                self.about("fsync", name)

        self._said(upload)
        return size

    def put(self, name: str, chunks: Iterable[Any]) -> None:
        self.about("rename", name)
        self._said(lambda: self.obs.put(self.store, name, b"".join(chunks)))

    def sync(self, name: str = "") -> None: ...

    def remove(self, name: str, *, missing: bool = True) -> None:
        self.about("remove", name)
        with contextlib.suppress(FileNotFoundError):
            self._said(lambda: self.obs.delete(self.store, name))

    def remove_folder(self, name: str) -> None:
        self.about("remove", name)
        inside = self._said(lambda: [each["path"] for each in self.obs.list(self.store, f"{name}/").collect()])
        if inside:
            self._said(lambda: self.obs.delete(self.store, inside))

    def free(self) -> int | None:
        return None

    def lock(self) -> Any:
        return Lease(self)

    # Reading

    def names(self, name: str = "") -> list[str]:
        found = self._said(lambda: self.obs.list_with_delimiter(self.store, f"{name}/" if name else None))
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(last for path in paths if (last := path.rstrip("/").rpartition("/")[2]) != BEGUN)

    def size(self, name: str) -> int:
        try:
            return self._said(lambda: self.obs.head(self.store, name))["size"]
        except FileNotFoundError:
            return -1

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None:
            return self._said(lambda: bytes(self.obs.get(self.store, name).bytes()))[start:]
        return self._said(lambda: bytes(self.obs.get_range(self.store, name, start=start, end=stop)))

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        content = self._said(lambda: self.obs.get_range(self.store, name, start=start, end=start + len(buffer)))
        view = memoryview(content).cast("B")
        buffer[: len(view)] = view
        return len(view)

    def _said(self, act: Any) -> Any:
        """``act``, with errors as those of a disk; obstore has tried again where that may help."""
        try:
            return act()
        except (self.obs.exceptions.AlreadyExistsError, OSError):
            raise
        except self.obs.exceptions.NotFoundError as error:
            raise FileNotFoundError(str(error).splitlines()[0]) from None
        except self.obs.exceptions.BaseError as error:
            raise OSError(5, str(error).partition("Debug source")[0].strip()[:300]) from None


class Lease:
    """The lock of a bucket."""

    def __init__(self, bucket: Bucket):
        self.bucket, self.me = bucket, uuid.uuid4().hex
        self._over = threading.Event()
        self._tag: Any = None

    def take(self) -> None:
        bucket, obs = self.bucket, self.bucket.obs
        try:
            bucket._said(lambda: self._put("create"))
        except obs.exceptions.AlreadyExistsError:
            held = bucket._said(lambda: obs.get(bucket.store, LOCK))
            about, tag = json.loads(bytes(held.bytes())), held.meta["e_tag"]
            if time.time() - about["renewed"] < STALE:
                raise CheckpointError(
                    f"{bucket} is in use",
                    f"process {about['pid']} on {about['host']} writes its checkpoints there",
                    f"if it is gone, its lease ends {STALE - time.time() + about['renewed']:.0f} s from now",
                ) from None
            try:
                bucket._said(lambda: self._put({"e_tag": tag}))
            except OSError:
                raise CheckpointError(f"{bucket} is in use", "another run has just taken it") from None
        threading.Thread(target=self._renew, name="meshfit-lease", daemon=True).start()

    def _put(self, mode: Any) -> None:
        about = {"id": self.me, "pid": os.getpid(), "host": socket.gethostname(), "renewed": time.time()}
        done = self.bucket.obs.put(self.bucket.store, LOCK, json.dumps(about).encode(), mode=mode)
        self._tag = done["e_tag"]

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            with contextlib.suppress(OSError):
                self.bucket._said(lambda: self._put({"e_tag": self._tag}))

    def release(self) -> None:
        if self._tag is not None and not self._over.is_set():
            self._over.set()
            with contextlib.suppress(OSError):
                self.bucket.remove(LOCK)
