"""MDS, as mosaicml-streaming writes it: shards of samples, and an index.json that says what they hold.

    shard    n, n + 1 offsets (uint32, from the start of the file), the samples
    sample   the sizes of those columns that have no fixed one (uint32), then the columns

Any sample is one range of bytes, so order and resuming are exact. Compressed shards are decompressed into the cache,
once a host. The library is not needed.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.order import WINDOW, by_part, part_of
from meshfit.data.rows import Asked, ColumnSource, names_in
from meshfit.data.source import BadSample, Source
from meshfit.data.unfold import check, unfolded
from meshfit.errors import DataError

CODECS = {"br": "brotli", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
"""Arrow's names for MDS's compressions; bz2 is Python's own."""
SCALARS = {f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}
VALUES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
"""The types of arrays that say their own."""
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


class Mds(ColumnSource):
    """Samples of MDS shards."""

    def __init__(self, index: Blob, files: Mapping[str, Blob], columns: Asked, images: bool, cache: Cache):
        super().__init__(columns, images)
        about = json.loads(bytes(index.read()))
        self.shards: list[dict[str, Any]] = about["shards"]
        self.folder, self.cache = index.name.rpartition("/")[0], cache
        first = self.shards[0]
        self.columns: list[str] = first["column_names"]
        self.encodings: dict[str, str] = dict(zip(self.columns, first["column_encodings"], strict=True))
        self.sizes: list[int | None] = first["column_sizes"]
        for shard in self.shards:
            wrong = shard["format"] != "mds" or shard["version"] != 2
            if wrong or (shard["column_names"], shard["column_encodings"]) != (self.columns, first["column_encodings"]):
                said = f"{shard['format']} {shard['version']} of {', '.join(shard['column_names'])}"
                raise DataError(
                    f"a shard of {index.name} is {said}", f"the first is mds 2 of {', '.join(self.columns)}"
                )
        self.names = names_in(columns, self.columns)
        for name in self.names:
            _check(name, self.encodings[name], index.name)
        self.blobs = [self._file(shard, files) for shard in self.shards]
        self.firsts = np.concatenate([[0], np.cumsum([shard["samples"] for shard in self.shards])])
        self.waits = not isinstance(index, LocalFile)
        far = self.waits or any(shard["zip_data"] for shard in self.shards)
        if far and sum(shard["raw_data"]["bytes"] for shard in self.shards) > cache.most / 2:
            self.blocks = self.firsts
        self._tag = tag_of([index, *self.blobs])
        self._opened: dict[int, tuple[Blob, NDArray[np.int64]]] = {}

    def _file(self, shard: dict[str, Any], files: Mapping[str, Blob]) -> Blob:
        """The shard's own file, else the compressed one. One that is cut short is refused."""
        for kind in ("raw_data", "zip_data"):
            if shard[kind] and (blob := files.get(shard[kind]["basename"])) is not None:
                if blob.size != shard[kind]["bytes"]:
                    raise DataError(
                        f"{blob.name} has {blob.size} bytes, not {shard[kind]['bytes']} as its index says",
                        "it is cut short, or another's: copy it again",
                    )
                return blob
        raise DataError(f"{self.folder}/{shard['raw_data']['basename']} is missing", "copy the folder again")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def raw(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        parts: dict[str, list[Any]] = {name: [] for name in self.columns}
        for i, one in enumerate(self._samples(ids)):
            at, sizes = 0, []
            for size in self.sizes:
                sizes.append(size if size else int.from_bytes(one[at : at + 4], "little"))
                at += 0 if size else 4
            for name, size in zip(self.columns, sizes, strict=True):
                parts[name].append(one[at : at + size])
                at += size
            if at != len(one):
                raise BadSample(f"{self.name_of(int(ids[i]))} has {len(one)} bytes, and its columns {at}")
        said = lambda name: lambda i: f"{name!r} of {self.name_of(int(ids[i]))}"
        return {name: _decoded(self.encodings[name], parts[name], said(name)) for name in self.names}

    def _samples(self, ids: NDArray[np.int64]) -> list[memoryview]:
        """The bytes of each sample."""
        found: list[Any] = [None] * len(ids)
        for shard, at, rows in by_part(self.firsts, ids):
            blob, offsets = self._shard(shard)
            ranges = blob.ranges(offsets[rows].tolist(), offsets[rows + 1].tolist())
            for i, data in zip(at.tolist(), ranges, strict=True):
                found[i] = np.ascontiguousarray(np.frombuffer(data, np.uint8)).data
        return found

    def _shard(self, shard: int) -> tuple[Blob, NDArray[np.int64]]:
        """A shard's file, not compressed, and where its samples begin."""
        if shard not in self._opened:
            about, blob = self.shards[shard], self.blobs[shard]
            if about["zip_data"] and blob.name.split("?")[0].endswith(about["zip_data"]["basename"]):
                make = lambda place: (place / "shard").write_bytes(_unpacked(blob, about))
                key = f"mds {blob.name} {blob.tag}"
                place: Path = self.cache.folder(key, make, kind="shards", keep=2 * WINDOW)
                blob = LocalFile(place / "shard")
                _ = blob.bytes  # mapped now: whoever removes the folder later does no harm
            if len(self._opened) > 4 * WINDOW and self.blocks is not None:
                self._opened.clear()
            head = np.frombuffer(blob.read(0, 4 * (about["samples"] + 2)), np.uint32)
            if int(head[0]) != about["samples"]:
                raise DataError(
                    f"{blob.name} holds {head[0]} samples, its index says {about['samples']}", "copy it again"
                )
            self._opened[shard] = blob, head[1:].astype(np.int64)
        return self._opened[shard]

    def name_of(self, i: int) -> str:
        shard, sample = part_of(self.firsts, i)
        return f"sample {sample} of {self.folder}/{self.shards[shard]['raw_data']['basename']}"

    @property
    def fingerprint(self) -> str:
        return f"mds {self._tag} {len(self)}"


def _check(name: str, encoding: str, file: str) -> None:
    kind = encoding.partition(":")[0]
    if kind == "pkl":
        raise DataError(f"column {name!r} of {file} is pickled: reading it would run code", "leave it out: columns=")
    known = SCALARS | {"bytes", "str", "int", "ndarray", "str_int", "str_float", "str_decimal"}
    if kind not in known | {"pil", "jpeg", "png", "json"}:
        raise DataError(f"column {name!r} of {file} is {encoding}, which is not read", "leave it out: columns=")


def _unpacked(blob: Blob, about: dict[str, Any]) -> bytes:
    import pyarrow as pa

    kind, data = about["compression"].partition(":")[0], bytes(blob.read())
    try:
        if kind == "bz2":
            return unfolded(blob.name, data, "bz2")
        check(blob.name, len(data), about["raw_data"]["bytes"])
        return pa.decompress(data, about["raw_data"]["bytes"], CODECS[kind], asbytes=True)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{blob.name} cannot be decompressed ({kind})", str(error)[:200]) from error


def _decoded(encoding: str, data: list[memoryview], name: Callable[[int], str]) -> Any:
    """A column: a tensor, or ``Ragged`` of words, bytes or tensors."""
    kind, _, rest = encoding.partition(":")
    if kind in SCALARS or kind == "int":
        values = np.frombuffer(b"".join(data), np.dtype("int64" if kind == "int" else kind))
        return torch.from_numpy(values.astype(np.int64) if values.dtype.kind in "iu" else values.copy())
    if kind in ("bytes", "jpeg", "png"):
        return tree.Ragged(data)
    found = []
    for i, one in enumerate(data):
        try:
            found.append(_value(kind, rest, one))
        except (ValueError, KeyError, IndexError) as error:
            raise BadSample(f"{name(i)} cannot be read as {encoding}", str(error)) from error
    return tree.stack(found)


def _value(kind: str, rest: str, data: memoryview) -> Any:
    if kind == "ndarray":
        return _array(data, *rest.split(":")) if rest else _array(data)
    if kind == "pil":
        width, height, length = np.frombuffer(data[:12], np.uint32).tolist()
        mode = bytes(data[12 : 12 + length]).decode()
        pixels = np.frombuffer(data[12 + length :], np.uint8).reshape(height, width, CHANNELS[mode])
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    text = bytes(data).decode()
    if kind == "str":
        return text
    return json.loads(text) if kind == "json" else int(text) if kind == "str_int" else float(text)


def _array(data: memoryview, kind: str = "", sizes: str = "") -> NDArray[Any]:
    """An array whose type and shape are given, or stand before its values."""
    at = 0
    if not kind:
        kind, at = VALUES[data[0]], 1
    if sizes:
        shape = [int(size) for size in sizes.split(",")]
    else:
        count, width = data[at] >> 2, 2 ** (data[at] % 4)
        shape = np.frombuffer(data[at + 1 : at + 1 + count * width], f"u{width}").tolist()
        at += 1 + count * width
    return np.frombuffer(data[at:], kind).reshape(shape).copy()


def mds(
    url: Url,
    *,
    columns: Asked = None,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    decode: bool = True,
    on_bad: str = "stop",
) -> Source:
    """Samples of a folder of MDS shards, here or in the cloud; ``columns`` is as for tables."""
    held = Cache.of(cache)
    blobs = {blob.name.split("?")[0]: blob for blob in find(url, storage=storage, cache=held, folder=True)}
    found = (name for name in blobs if name.rpartition("/")[2] == "index.json")
    indexes = sorted(found, key=lambda name: (name.count("/"), name))
    if not indexes:
        raise DataError(f"{url} holds no index.json", "MDSWriter writes one: is this the folder?")
    folder = indexes[0].rpartition("/")[0]
    if len(indexes) > 1 and indexes[0].count("/") == indexes[1].count("/"):
        raise DataError(
            f"{url} holds several data sets", f"give one: {', '.join(i.rpartition('/')[0] for i in indexes)}"
        )
    files = {name.removeprefix(f"{folder}/"): blob for name, blob in blobs.items()}
    return Mds(blobs[indexes[0]], files, columns, decode, held).on_bad(on_bad)
