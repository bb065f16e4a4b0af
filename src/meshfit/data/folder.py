"""Folders of images by class: folder/cat/1.jpg, folder/dog/2.png. A sample is (image uint8, class)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data.blob import Blob, LocalFile, Url, find, is_remote, tag_of
from meshfit.data.cache import Cache
from meshfit.data.images import ENDINGS, decode
from meshfit.data.source import BadSample, Source
from meshfit.errors import DataError


class ImageFolder(Source):
    """Image files and the folders they lie in. ``classes`` are the folders' names, in order."""

    def __init__(self, blobs: list[Blob], classes: list[str], labels: NDArray[np.int64], channels: int):
        self.blobs, self.classes, self.labels, self.channels = blobs, classes, labels, channels
        self.waits = not isinstance(blobs[0], LocalFile)

    def __len__(self) -> int:
        return len(self.blobs)

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        wanted = ids.tolist()
        images = decode([self._bytes(i) for i in wanted], lambda k: self.name_of(wanted[k]), self.channels)
        return images, torch.from_numpy(self.labels[ids])

    def _bytes(self, i: int) -> Any:
        blob = self.blobs[i]
        if not isinstance(blob, LocalFile):
            return bytes(blob.read())
        try:
            return blob.path.read_bytes()
        except OSError as error:
            raise BadSample(f"{blob.name} cannot be read", str(error)) from error

    def name_of(self, i: int) -> str:
        return self.blobs[i].name

    @property
    def fingerprint(self) -> str:
        return f"folder {tag_of(self.blobs)}"


def folder(
    url: Url,
    *,
    channels: int = 3,
    storage: Mapping[str, Any] | None = None,
    cache: Cache | Url | None = None,
    on_bad: str = "stop",
) -> Source:
    """Images in folders named by their class. ``channels`` 1 reads them as grey. Images of different sizes need a
    ``resize`` or ``crop_any_size`` (see transform.py) before they make a batch."""
    where = f"{url.rstrip('/')}/" if isinstance(url, str) and is_remote(url) else url
    blobs = find(where, ENDINGS, storage=storage, cache=Cache.of(cache))
    root = str(url).rstrip("/").removeprefix("file://")
    inside = [blob.name.split("?")[0] for blob in blobs]
    if not is_remote(url):
        inside = [name.removeprefix(root).lstrip("/") for name in inside]
    else:
        inside = [name.partition(root.rpartition("/")[2] + "/")[2] for name in inside]
    kinds = [name.partition("/")[0] if "/" in name else "" for name in inside]
    if "" in kinds:
        stray = blobs[kinds.index("")].name
        raise DataError(f"{stray} lies in no class", f"folders are classes: {root}/cat/1.jpg")
    classes = sorted(set(kinds))
    labels = np.array([classes.index(kind) for kind in kinds], np.int64)
    return ImageFolder(blobs, classes, labels, channels).on_bad(on_bad)
