"""A run's files in a bucket: s3://, gs://, az://, abfs://, through obstore.

An object appears whole or not at all, and is durable when its upload is acknowledged, so nothing is synced or renamed;
the manifest still comes last. Large ones are uploaded in parts of 8 MiB, a few at a time. A folder is taken by an
object that only one can create. A server that does not answer is asked again, for ``patience`` seconds; the first call
that fails after that says so, and for a minute others are not as patient.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshfit.checkpoint.files import Files, joined
from meshfit.checkpoint.lock import Lease
from meshfit.data.remote import over_http, without_secrets, without_secrets_of
from meshfit.errors import JobError

BEGUN = ".begun"
PATIENCE = 120.0  # seconds in which a server that was there before may come back
HURRIED = 2.0  # patience while it is known to be away
AWAY = 60.0  # seconds for which it is taken to be
TIMEOUT, HURRIED_TIMEOUT = "60s", "5s"  # of one request
PART, PARTS = 8 * 2**20, 4  # bytes of a part, and how many are on their way at once
SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")


class Bucket(Files):
    """A prefix of a bucket. ``storage``: what obstore is told beside the environment (endpoint, keys, region)."""

    def __init__(self, url: str, storage: Mapping[str, Any] | None = None, *, patience: float | None = None):
        scheme = url.partition("://")[0].lower()
        if scheme not in SCHEMES:
            raise JobError(
                f"{scheme}:// is no place to write a run to", f"known: {', '.join(f'{s}://' for s in SCHEMES)}"
            )
        try:
            import obstore
        except ImportError:
            raise JobError(f"{scheme}:// needs obstore", "pip install 'meshfit[cloud]'") from None
        self.obs: Any = obstore
        self.url, self.storage = url.rstrip("/"), dict(storage or {})
        self.root = Path(self.url)  # for joining names alone
        self.patience = PATIENCE if patience is None else patience
        self._stores: dict[float, Any] = {}
        self._away = -AWAY

    def __str__(self) -> str:
        return without_secrets(self.url)

    def where(self, name: str) -> str:
        return without_secrets(str(joined(self.url, name)))

    def inside(self, name: str) -> "Bucket":
        return Bucket(str(joined(self.url, name)), self.storage, patience=self.patience)

    def above(self) -> "tuple[Files, str]":
        base, mark, query = self.url.partition("?")
        base, _, name = base.rpartition("/")
        if base.endswith(("/", ":")):  # a bucket itself
            return self, ""
        return Bucket(f"{base}{mark}{query}", self.storage, patience=self.patience), name

    @property
    def store(self) -> Any:
        patience = HURRIED if time.monotonic() - self._away < AWAY else self.patience
        if patience not in self._stores:
            self._stores[patience] = self._open(patience)
        return self._stores[patience]

    def _open(self, patience: float) -> Any:
        from obstore.store import from_url

        client: Any = {"timeout": TIMEOUT, "connect_timeout": "10s"}
        if patience == HURRIED:
            client = {"timeout": HURRIED_TIMEOUT, "connect_timeout": HURRIED_TIMEOUT}
        if over_http(self.url, self.storage):
            client["allow_http"] = True
        pauses = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2}
        retry: Any = {"max_retries": 1000, "retry_timeout": timedelta(seconds=patience), "backoff": pauses}
        asked: Any = {"client_options": client, "retry_config": retry}
        asked |= {"config": self.storage} if self.storage else {}
        try:
            return from_url(self.url, **asked)
        except (self.obs.exceptions.BaseError, ValueError, TypeError) as error:
            raise JobError(f"{self} cannot be opened", self._clean(error)) from None

    # Writing

    def make(self, name: str = "") -> None:
        self.about("make", name)
        if name:
            try:
                self.said(lambda: self.obs.put(self.store, f"{name}/{BEGUN}", b"begun", mode="create"))
            except self.obs.exceptions.AlreadyExistsError:
                raise FileExistsError(name) from None

    def write(self, name: str, chunks: Iterable[Any]) -> int:
        """As on disk, but for a file of that name, which is replaced."""
        self.about("open", name)
        size = 0

        def upload() -> None:
            nonlocal size
            with self.obs.open_writer(self.store, name, buffer_size=PART, max_concurrency=PARTS) as file:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    for at in range(0, len(view), PART):
                        self.about("write", name)
                        file.write(view[at : at + PART])
                    size += len(view)
                self.about("fsync", name)

        self.said(upload)
        return size

    def put(self, name: str, chunks: Iterable[Any]) -> None:
        self.about("rename", name)
        self.write(name, chunks)

    def sync(self, name: str = "") -> None: ...

    def remove(self, name: str) -> None:
        self.about("remove", name)
        with contextlib.suppress(FileNotFoundError):
            self.said(lambda: self.obs.delete(self.store, name))

    def remove_folder(self, name: str) -> None:
        self.about("remove", name)
        inside = list(self.all_names(name))
        if inside:
            self.said(lambda: self.obs.delete(self.store, inside))

    def move(self, name: str, to: str) -> None:
        self.about("rename", to)
        for each in self.all_names(name):
            self.said(lambda each=each: self.obs.rename(self.store, each, to + each.removeprefix(name)))

    def free(self) -> int | None:
        return None

    def lock(self) -> Any:
        return Lease(self)

    # Reading

    def names(self, name: str = "") -> list[str]:
        found = self.said(lambda: self.obs.list_with_delimiter(self.store, f"{name}/" if name else None))
        folders = [path for path in found["common_prefixes"] if next(self.all_names(path.rstrip("/")), None)]
        paths = [*folders, *(each["path"] for each in found["objects"])]  # some servers list folders that are empty
        return sorted(last for path in paths if (last := path.rstrip("/").rpartition("/")[2]) != BEGUN)

    def all_names(self, name: str = "") -> Iterator[str]:
        """Of every object below ``name``, from here."""
        pages = self.said(lambda: self.obs.list(self.store, f"{name}/" if name else None, chunk_size=1000))
        while page := self.said(lambda: next(pages, None)):
            yield from (each["path"] for each in page)

    def size(self, name: str) -> int:
        try:
            return self.said(lambda: self.obs.head(self.store, name))["size"]
        except FileNotFoundError:
            return -1

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None:
            return self.said(lambda: bytes(self.obs.get(self.store, name).bytes()))[start:]
        return self.said(lambda: bytes(self.obs.get_range(self.store, name, start=start, end=stop)))

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        content = self.said(lambda: self.obs.get_range(self.store, name, start=start, end=start + len(buffer)))
        view = memoryview(content).cast("B")
        buffer[: len(view)] = view
        return len(view)

    def said(self, act: Callable[[], Any]) -> Any:
        """``act``, with errors as those of a disk; obstore has tried again where that may help."""
        kinds = self.obs.exceptions
        try:
            return act()
        except (kinds.AlreadyExistsError, kinds.PreconditionError, OSError) as error:
            if not isinstance(error, FileNotFoundError):
                raise
            raise FileNotFoundError(2, self._clean(error)) from None
        except kinds.NotFoundError as error:
            raise FileNotFoundError(2, self._clean(error)) from None
        except kinds.BaseError as error:
            if not re.search(r"status code: 4\d\d", str(error)):
                self._away = time.monotonic()
            raise OSError(5, self._clean(error)) from None

    def _clean(self, error: Exception) -> str:
        """What went wrong, in a line without anything secret."""
        text = " ".join(str(error).partition("Debug source")[0].split())
        answer = re.search(r"status code: (\d{3}[\w ]*)", text)
        code, message = (re.search(rf"<{name}>(.*?)</{name}>", text) for name in ("Code", "Message"))
        if answer is not None:
            told = ": ".join(found[1] for found in (code, message) if found is not None)
            text = f"the server answers {answer[1].strip()}" + (f", {told}" if told else "")
        elif found := re.search(r"Error performing \w+ (\w+://[^/ ]+)\S* in [\d.]+\S*(.*?) - (.*)", text):
            text = f"{found[1]} does not answer: {found[3]}"
        return without_secrets_of(text, self.url, self.storage)[:300]
