"""CIFAR and MNIST in the formats they are published in: (images uint8 (channels, height, width), labels int64)."""

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshfit.data.blob import Blob, Url, find, is_remote
from meshfit.data.cache import Cache
from meshfit.data.source import Memory, Source
from meshfit.data.unfold import unfolded
from meshfit.errors import DataError


def cifar(
    url: Url, *, train: bool = True, storage: Mapping[str, Any] | None = None, cache: Cache | Url | None = None
) -> Source:
    """CIFAR-10 or CIFAR-100, binary or Python version: the folder with data_batch_1 to 5 and test_batch, or train and
    test."""
    names = ["data_batch_" + str(i) for i in range(1, 6)] if train else ["test_batch"]
    fine = ["train"] if train else ["test"]
    found = _named(url, [[*names], [f"{n}.bin" for n in names], [*fine], [f"{n}.bin" for n in fine]], storage, cache)
    parts = [_cifar_part(blob) for blob in found]
    images, labels = (np.concatenate(side) for side in zip(*parts, strict=True))
    return Memory((images, labels), str(url))


def _cifar_part(blob: Blob) -> tuple[np.ndarray, np.ndarray]:
    data = bytes(blob.read())
    if blob.name.endswith(".bin"):
        wide = 3074 if blob.name.endswith(("train.bin", "test.bin")) else 3073
        if len(data) % wide:
            raise DataError(f"{blob.name} is no CIFAR file", f"{len(data)} bytes are no whole number of {wide}")
        rows = np.frombuffer(data, np.uint8).reshape(-1, wide)
        return rows[:, wide - 3072 :].reshape(-1, 3, 32, 32), rows[:, wide - 3073].astype(np.int64)
    try:
        held = _Plain(io.BytesIO(data), encoding="bytes").load()
        labels = held.get(b"labels", held.get(b"fine_labels"))
        return np.asarray(held[b"data"], np.uint8).reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)
    except (pickle.UnpicklingError, KeyError, EOFError, ValueError) as error:
        raise DataError(f"{blob.name} is no CIFAR file", str(error)) from error


class _Plain(pickle.Unpickler):
    """Unpickles arrays and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def mnist(
    url: Url, *, train: bool = True, storage: Mapping[str, Any] | None = None, cache: Cache | Url | None = None
) -> Source:
    """MNIST, Fashion-MNIST and their like: the folder with train-images-idx3-ubyte and so on, gzipped or not."""
    kind = "train" if train else "t10k"
    images, labels = (f"{kind}-images-idx3-ubyte", f"{kind}-labels-idx1-ubyte")
    dotted = [name.replace("-idx", ".idx") for name in (images, labels)]
    choices = [[images, labels], [f"{images}.gz", f"{labels}.gz"], dotted, [f"{name}.gz" for name in dotted]]
    x, y = (idx(blob) for blob in _named(url, choices, storage, cache))
    if len(x) != len(y):
        raise DataError(f"{url} holds {len(x)} images but {len(y)} labels")
    return Memory((x[:, None], y.astype(np.int64)), str(url))


def idx(blob: Blob) -> np.ndarray:
    """An array in MNIST's own format."""
    data = bytes(blob.read())
    try:
        data = unfolded(blob.name, data) if data[:2] == b"\x1f\x8b" else data
    except OSError as error:
        raise DataError(f"{blob.name} cannot be read", str(error)) from None
    kinds = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
    if len(data) < 8 or data[:2] != b"\0\0" or data[2] not in kinds:
        raise DataError(f"{blob.name} is no idx file", f"it starts with {data[:4]!r}")
    dims = data[3]
    try:
        shape = np.frombuffer(data, ">u4", dims, 4).tolist()
        found = np.frombuffer(data, kinds[data[2]], offset=4 + 4 * dims)
    except ValueError as error:
        raise DataError(f"{blob.name} is cut short", str(error)) from None
    if found.size != math.prod(shape):
        raise DataError(
            f"{blob.name} is cut short", f"{shape} needs {math.prod(shape)} numbers, {found.size} are there"
        )
    return found.astype(found.dtype.newbyteorder("=")).reshape(shape)


def _named(
    url: Url, choices: Sequence[Sequence[str]], storage: Mapping[str, Any] | None, cache: Cache | Url | None
) -> list[Blob]:
    """The files of the first list of names that are all there."""
    if not is_remote(url) and not Path(url).is_dir():
        raise DataError(f"{url} is no folder", f"it should hold {', '.join(choices[0])}")
    found = {blob.name.rpartition("/")[2]: blob for blob in find(url, storage=storage, cache=cache, folder=True)}
    for names in choices:
        if all(name in found for name in names):
            return [found[name] for name in names]
    raise DataError(f"{url} does not hold {', '.join(choices[0])}", f"it holds {', '.join(sorted(found)[:6])}")
