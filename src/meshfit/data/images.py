"""Images out of their files' bytes: JPEG by simplejpeg where it is installed (6 times PIL on 32 x 32 pixels, the same
bytes), all else by PIL. Many at once; libjpeg runs without the GIL, so threads decode side by side."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from meshfit.data import tree
from meshfit.data.extra import needed
from meshfit.data.source import BadSample, stage
from meshfit.errors import DataError

STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

try:
    from simplejpeg import decode_jpeg
except ImportError:
    decode_jpeg = None


def looks_like_image(data: Any) -> bool:
    start = bytes(data[:16])
    return start.startswith(STARTS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


def decode(files: Sequence[Any], name_of: Callable[[int], str], channels: int = 3) -> Any:
    """(n, channels, height, width) uint8, or ``Ragged`` where sizes differ. The i-th is called ``name_of(i)``."""
    with stage("decode"):
        return _all(files, name_of, channels)


def _all(files: Sequence[Any], name_of: Callable[[int], str], channels: int) -> Any:
    out: np.ndarray | None = None
    ragged: list[np.ndarray] = []
    for i, data in enumerate(files):
        try:
            image = _decoded(data, channels)
        except DataError:  # nothing is wrong with the image: there is nobody to read it
            raise
        except Exception as error:
            raise BadSample(f"{name_of(i)} is no image that can be read", f"{type(error).__name__}: {error}") from error
        if out is None and not ragged:
            out = np.empty((len(files), *image.shape), np.uint8)
        if out is not None and out.shape[1:] == image.shape:
            out[i] = image
            continue
        if out is not None:
            ragged, out = [out[k] for k in range(i)], None
        ragged.append(image)
    if out is not None:
        return torch.from_numpy(np.ascontiguousarray(out.transpose(0, 3, 1, 2)))
    return tree.Ragged(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))) for image in ragged)


def _decoded(data: Any, channels: int) -> np.ndarray:
    """(height, width, channels) uint8."""
    if decode_jpeg is not None and bytes(data[:3]) == STARTS[0]:
        try:
            return decode_jpeg(data, colorspace="RGB" if channels == 3 else "GRAY")
        except ValueError as error:
            if "olorspace" not in str(error) and "CMYK" not in str(error):
                raise
    needed("PIL", "images")
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
