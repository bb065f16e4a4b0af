"""WebDataset tars: files that share a name up to the first dot are one sample ({"jpg": image, "cls": 3}).

A tar has no index, so one is made when it is first opened (the headers are read, not the contents) and kept in the
cache. After that any sample is two range reads: order, shuffling and resuming are exact, which a stream cannot be.
"""

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.images import ENDINGS, decode
from meshfit.data.rows import Asked, names_in, shaped
from meshfit.data.source import BadSample, Source
from meshfit.data.tablefiles import BlobFile
from meshfit.data.unfold import array
from meshfit.errors import DataError

WHOLE = ("cls", "id", "index", "count")
"""Endings whose files hold one whole number, as WebDataset reads them."""


class Tars(Source):
    """Samples of tar files, through an index: for each sample and ending, which bytes of which file."""

    def __init__(self, blobs: list[Blob], columns: Asked, index: Path):
        self.blobs, self.asked = blobs, columns
        held = np.load(index / "index.npy")
        about = json.loads((index / "about.json").read_text())
        self.endings: list[str] = about["endings"]
        self.names: list[str] = about["names"]
        self.files, self.spans = held[:, 0], held[:, 1:].reshape(len(held), -1, 2)
        self.used = names_in(columns, self.endings)
        self.waits = not isinstance(blobs[0], LocalFile)
        cache = getattr(blobs[0], "cache", None)
        if cache is not None and sum(blob.size for blob in blobs) > cache.most / 2:
            each = np.unique(np.stack([self.files, self.spans[:, 0, 0] // 2**23], 1), axis=0, return_index=True)[1]
            self.blocks = np.append(np.sort(each), len(self))

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        return shaped(self.asked, {ending: self._column(ending, ids) for ending in self.used})

    def _column(self, ending: str, ids: NDArray[np.int64]) -> Any:
        k = self.endings.index(ending)
        data: list[Any] = [b""] * len(ids)
        for file in np.unique(self.files[ids]).tolist():
            at = np.flatnonzero(self.files[ids] == file)
            spans = self.spans[ids[at], k]
            if (spans[:, 0] < 0).any():
                missing = int(ids[at[np.argmax(spans[:, 0] < 0)]])
                raise BadSample(f"{self.name_of(missing)} has no .{ending}")
            for i, found in zip(at, self.blobs[file].ranges(spans[:, 0].tolist(), spans[:, 1].tolist()), strict=True):
                data[i] = found
        name = lambda i: f".{ending} of {self.name_of(int(ids[i]))}"
        if f".{ending.rpartition('.')[2]}" in ENDINGS:
            return decode([np.ascontiguousarray(np.frombuffer(x, np.uint8)).data for x in data], name)
        return _understood(ending.rpartition(".")[2], data, name)

    def name_of(self, i: int) -> str:
        return f"{self.names[i]} in {self.blobs[int(self.files[i])].name}"

    @property
    def fingerprint(self) -> str:
        return f"tars {tag_of(self.blobs)} {len(self)}"


def _understood(kind: str, data: list[Any], name: Any) -> Any:
    found = []
    for i, one in enumerate(data):
        raw = bytes(one)
        try:
            if kind in WHOLE:
                found.append(int(raw))
            elif kind == "json":
                found.append(json.loads(raw))
            elif kind in ("txt", "text"):
                found.append(raw.decode())
            elif kind == "npy":
                found.append(array(raw))
            else:
                found.append(raw)
        except (ValueError, RecursionError, MemoryError) as error:
            raise BadSample(f"{name(i)} cannot be read", str(error)) from error
    return tree.stack(found)


def tars(
    url: Url | Sequence[Url],
    *,
    columns: Asked = None,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    on_bad: str = "stop",
) -> Source:
    """Samples of WebDataset tars; ``columns`` are endings: ("jpg", "cls"). See rows.py for what it can say."""
    held = Cache.of(cache)
    blobs = find(url, (".tar",), storage=storage, cache=held)
    index = held.folder(f"tars 2 {tag_of(blobs)}", lambda place: _index(blobs, place))
    return Tars(blobs, columns, index).on_bad(on_bad)


def _check_end(blob: Blob, end: int) -> None:
    """Refuse a tar that does not end at ``end``, where the last header was found: a block of zeros marks the end, and
    nothing comes after it. Python's tarfile takes any other end for one."""
    after = np.frombuffer(bytes(blob.read(end, min(blob.size, end + 2**20))) if end < blob.size else b"", np.uint8)
    if len(after) < tarfile.BLOCKSIZE:
        raise DataError(
            f"{blob.name} is cut short", f"its {blob.size} bytes have no end-of-archive marker", "copy it again"
        )
    if after[: tarfile.BLOCKSIZE].any():
        raise DataError(f"{blob.name} is no tar after its first {end} bytes", "it is damaged: copy it again")
    if after.any():
        raise DataError(
            f"{blob.name} goes on after its end, at byte {end}", "tars joined by cat? give each as a file of its own"
        )


def _index(blobs: list[Blob], place: Path) -> None:
    rows: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
    for number, blob in enumerate(blobs):
        known: dict[str, dict[str, tuple[int, int]]] = {}
        try:
            local = isinstance(blob, LocalFile)
            with tarfile.open(blob.path if local else None, "r:", None if local else BlobFile(blob)) as tar:  # type: ignore[arg-type]
                for member in tar:
                    if not member.isfile() or member.name.rpartition("/")[2].startswith("."):
                        continue
                    folder, slash, base = member.name.rpartition("/")
                    stem, _, ending = base.partition(".")
                    parts = known.setdefault(f"{folder}{slash}{stem}", {})
                    parts[ending] = (member.offset_data, member.offset_data + member.size)
                end = tar.offset
        except tarfile.TarError as error:
            raise DataError(f"{blob.name} is no tar, or is cut short", str(error)) from error
        _check_end(blob, end)
        rows += [(number, name, parts) for name, parts in known.items()]
    endings = sorted({ending for _, _, parts in rows for ending in parts})
    held = [[n, *(x for ending in endings for x in parts.get(ending, (-1, -1)))] for n, _, parts in rows]
    np.save(place / "index.npy", np.array(held, np.int64).reshape(len(rows), 1 + 2 * len(endings)))
    (place / "about.json").write_text(json.dumps({"endings": endings, "names": [name for _, name, _ in rows]}))
