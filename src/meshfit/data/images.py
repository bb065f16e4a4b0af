"""Images out of their files' bytes: JPEG by simplejpeg where it is installed (6 times PIL on 32 x 32 pixels, the same
bytes), all else by PIL. Many at once; libjpeg runs without the GIL, so threads decode side by side.

``folder``: images by class, folder/cat/1.jpg, folder/dog/2.png. A sample is (image uint8, class)."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.data import tree
from meshfit.data.blob import Blob, LocalFile, Url, find, tag_of
from meshfit.data.cache import Cache
from meshfit.data.extra import needed
from meshfit.data.remote import folders_of, without_secrets
from meshfit.data.source import BadSample, Source, stage
from meshfit.errors import DataError
from meshfit.launch.limits import PIXELS, largest_picture

STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

try:
    from simplejpeg import decode_jpeg, decode_jpeg_header
except ImportError:
    decode_jpeg = decode_jpeg_header = None


def looks_like_image(data: Any) -> bool:
    start = bytes(data[:16])
    return start.startswith(STARTS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


def decode(files: Sequence[Any], name_of: Callable[[int], str], channels: int = 3) -> Any:
    """(n, channels, height, width) uint8, or ``Ragged`` where sizes differ. The i-th is called ``name_of(i)``."""
    images = []
    with stage("decode"):
        for i, data in enumerate(files):
            try:
                images.append(_decoded(data, channels))
            except DataError:  # nothing is wrong with the image: there is nobody to read it
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise BadSample(f"{name_of(i)} is no image that can be read", why) from error
        if len({image.shape for image in images}) == 1:
            return torch.from_numpy(np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2)))
        return tree.Ragged(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))) for image in images)


def _decoded(data: Any, channels: int) -> np.ndarray:
    """(height, width, channels) uint8."""
    if decode_jpeg is not None and decode_jpeg_header is not None and bytes(data[:3]) == STARTS[0]:
        try:
            height, width, *_ = decode_jpeg_header(data)
            _check_size(int(height), int(width))
            return decode_jpeg(data, colorspace="RGB" if channels == 3 else "GRAY")
        except ValueError as error:
            if "olorspace" not in str(error) and "CMYK" not in str(error):
                raise
    needed("PIL", "images")
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # ours is below
        image = Image.open(io.BytesIO(data))
    with image:
        _check_size(image.height, image.width)
        pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _check_size(height: int, width: int) -> None:
    """Before memory is taken for it."""
    if height * width > (limit := largest_picture()):
        raise ValueError(f"{height} x {width} pixels, more than {limit:,}; {PIXELS}=1G would raise that limit")


class ImageFolder(Source):
    """Image files by folder. ``classes`` are the folders' names, in order."""

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
    blobs = find(url, ENDINGS, storage=storage, cache=cache, folder=True)
    above = len(folders_of(url))
    inside = [blob.name.split("?")[0].split("/")[above:] for blob in blobs]
    kinds = [folders[0] if len(folders) > 1 else "" for folders in inside]
    if "" in kinds:
        stray = blobs[kinds.index("")].name
        raise DataError(f"{stray} is in no class", f"folders are classes: {without_secrets(str(url))}/cat/1.jpg")
    classes = sorted(set(kinds))
    labels = np.array([classes.index(kind) for kind in kinds], np.int64)
    return ImageFolder(blobs, classes, labels, channels).on_bad(on_bad)
