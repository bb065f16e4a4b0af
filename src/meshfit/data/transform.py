"""Transforms of whole batches, for ``source.map`` and ``source.on_device``.

    source.map(crop(32, padding=4), flip()).on_device(normalise(mean, std))

Images are (samples, channels, height, width), uint8 until ``normalise`` makes them float. Each transform works on the
images of a batch, wherever in its tuples and dicts they are (tensors of four dims; with ``on=`` those at that key or
position only), and draws other numbers for every sample. Images of different sizes (``Ragged``) go through ``resize``,
``crop_centre`` and ``crop_any_size``, which make them one size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshfit.data import tree
from meshfit.data.draw import SampleRandom
from meshfit.data.source import DifferentShapes
from meshfit.errors import DataError

On = int | str | None
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LABELS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True)
class Transform:
    """A function of the images of a batch and of its samples' random numbers."""

    name: str
    function: Callable[[Any, SampleRandom], Any]
    on: On = None
    any_size: bool = False
    """Whether it takes images of different sizes."""

    def __call__(self, batch: Any, draw: SampleRandom) -> Any:
        return at(batch, self.on, lambda leaf: self._applied(leaf, draw))

    def _applied(self, leaf: Any, draw: SampleRandom) -> Any:
        if isinstance(leaf, tree.Ragged):
            if not leaf or not isinstance(leaf[0], Tensor) or leaf[0].dim() != 3:
                return leaf
            if not self.any_size:
                sizes = [tuple(image.shape[1:]) for image in leaf]
                remedy = "put resize(size) or crop_any_size(size) before it; or .on_bad('skip')"
                raise DifferentShapes(f"{self.name} needs images of one size, but a batch holds", sizes, remedy)
        elif not isinstance(leaf, Tensor) or leaf.dim() != 4:
            return leaf
        return self.function(leaf, draw)

    def __repr__(self) -> str:
        return self.name


def at(batch: Any, on: On, change: Callable[[Any], Any]) -> Any:
    """``batch`` with every leaf changed; with ``on``, what is at that key or position."""
    if on is None:
        return tree.map_leaves(change, batch)
    try:
        batch[on]
    except (KeyError, IndexError, TypeError):
        has = list(batch) if isinstance(batch, Mapping) else f"{len(batch)} parts"
        raise DataError(f"a transform is to work on={on!r}, which the batch does not have", f"it has {has}") from None
    if isinstance(batch, Mapping):
        return {**batch, on: tree.map_leaves(change, batch[on])}
    assert isinstance(on, int)
    changed = [tree.map_leaves(change, part) if i == on % len(batch) else part for i, part in enumerate(batch)]
    return type(batch)(changed)


# Per-pixel work


def normalise(mean: Any = IMAGENET[0], std: Any = IMAGENET[1], *, on: On = None) -> Transform:
    """float32 of mean 0 and deviation 1: uint8 is divided by 255 first. ``mean`` and ``std`` are per channel."""
    both = tuple(tuple(torch.as_tensor(v, dtype=torch.float32).view(-1).tolist()) for v in (mean, std))

    def apply(image: Tensor, draw: SampleRandom) -> Tensor:
        shift, scale = _terms(both, 255.0 if image.dtype == torch.uint8 else 1.0, image.device)
        return image.to(torch.float32, copy=True).sub_(shift).mul_(scale)

    return Transform("normalise", apply, on)


@lru_cache(maxsize=16)
def _terms(both: tuple[tuple[float, ...], ...], unit: float, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).view(-1, 1, 1) * unit for values in both)
    return mean.to(device), (1 / std).to(device)


def unit(*, on: On = None) -> Transform:
    """uint8 as float32 between 0 and 1."""
    return Transform("unit", lambda image, draw: image.to(torch.float32, copy=True).mul_(1 / 255), on)


def from_bytes(dtype: str, shape: tuple[int, ...], *, on: On = None) -> Callable[[Any], Any]:
    """Bytes, as databases and Parquet hold them, as arrays of ``dtype`` and ``shape``."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, tree.Ragged) or not leaf or isinstance(leaf[0], str | Tensor):
            return leaf
        rows = np.empty((len(leaf), *shape), dtype)
        for row, data in zip(rows, leaf, strict=True):
            found = np.frombuffer(data, dtype)
            if found.size != row.size:
                raise ValueError(f"{found.size} numbers of {dtype} are there, {shape} needs {row.size}")
            row[...] = found.reshape(shape)
        return torch.from_numpy(rows)

    apply = lambda batch: at(batch, on, change)
    apply.__qualname__ = "from_bytes"
    return apply


def one_hot(classes: int, *, smooth: float = 0.0, on: On = None) -> Callable[[Any], Any]:
    """Labels as float32 rows of ``classes`` shares; ``smooth`` of each row is spread over all classes.

    Labels are what is at ``on``; else the last part of a tuple, or the key label(s), target(s) or y.
    """

    def hot(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point():
            raise DataError(
                "one_hot found no whole numbers to work on", "say where the labels are: one_hot(10, on=...)"
            )
        low, high = (int(leaf.min()), int(leaf.max())) if leaf.is_cpu and leaf.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise DataError(f"one_hot({classes}) met the label {low if low < 0 else high}", "labels count from 0")
        return F.one_hot(leaf.long(), classes).float() * (1 - smooth) + smooth / classes

    def apply(batch: Any) -> Any:
        where = on
        if where is None:
            where = next((k for k in LABELS if k in batch), None) if isinstance(batch, Mapping) else -1
        return at(batch, where, hot)

    apply.__qualname__ = "one_hot"
    return apply


# Geometry


def crop(size: int | tuple[int, int], *, padding: int = 0, on: On = None) -> Transform:
    """A window of ``size`` at random, out of the image with ``padding`` zeros around it."""
    height, width = _pair(size)

    def apply(image: Tensor, draw: SampleRandom) -> Tensor:
        spare = [image.shape[2] + 2 * padding - height, image.shape[3] + 2 * padding - width]
        if min(spare) < 0:
            raise DataError(f"crop({size}) asks for more than the image has", f"it is {tuple(image.shape[2:])}")
        top, left = draw.integers(0, spare[0] + 1), draw.integers(0, spare[1] + 1)
        return _windows(F.pad(image, (padding,) * 4) if padding else image, top, left, height, width)

    return Transform("crop", apply, on)


def _windows(image: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    n, channels, high, wide = image.shape
    if image.is_cpu:  # each row of a window is one copy, from wherever it begins
        image = image.contiguous()
        starts = _corners(n, channels, high, wide, height) + (top * wide + left).view(-1, 1, 1)
        everywhere = image.as_strided((max(image.numel() - width + 1, 0), width), (1, 1))
        return everywhere.index_select(0, starts.view(-1)).view(n, channels, height, width)
    rows = top.to(image.device)[:, None] + torch.arange(height, device=image.device)
    cols = left.to(image.device)[:, None] + torch.arange(width, device=image.device)
    index = (rows[:, :, None] * wide + cols[:, None, :]).view(n, 1, -1).expand(n, channels, -1)
    return image.flatten(2).gather(2, index).view(n, channels, height, width)


@lru_cache(maxsize=8)
def _corners(n: int, channels: int, high: int, wide: int, height: int) -> Tensor:
    """Where the rows of the windows at the top left begin."""
    return (torch.arange(n * channels).view(n, channels, 1) * high + torch.arange(height)) * wide


def flip(p: float = 0.5, *, on: On = None) -> Transform:
    """Left and right swapped, with probability ``p``."""

    def apply(image: Tensor, draw: SampleRandom) -> Tensor:
        chosen = draw.uniform() < p
        if not image.is_cpu:
            return torch.where(chosen.to(image.device).view(-1, 1, 1, 1), image.flip(3), image)
        at, which = chosen.nonzero()[:, 0], torch.arange(len(image))
        if not len(at):
            return image
        which[at] = torch.arange(len(image), len(image) + len(at))
        return torch.cat((image, image.index_select(0, at).flip(3))).index_select(0, which)  # index_copy is slow

    return Transform("flip", apply, on)


def resize(size: int | tuple[int, int], *, on: On = None) -> Transform:
    """Images of ``size``: (height, width), or the length of the shorter side, the other in proportion."""

    def to(image: Tensor) -> Tensor:  # (n, c, h, w)
        if not isinstance(size, int):
            return _resized(image, size)
        height, width = image.shape[2:]
        short = min(height, width)
        return _resized(image, (round(height * size / short), round(width * size / short)))

    def apply(leaf: Any, draw: SampleRandom) -> Any:
        return tree.stack([to(image[None])[0] for image in leaf]) if isinstance(leaf, tree.Ragged) else to(leaf)

    return Transform("resize", apply, on, any_size=True)


def _resized(image: Tensor, want: tuple[int, int]) -> Tensor:
    if tuple(image.shape[2:]) == want:
        return image
    if image.dtype == torch.uint8 and not image.is_cpu:
        return _resized(image.float(), want).round().clamp(0, 255).to(torch.uint8)
    return F.interpolate(image, want, mode="bilinear", antialias=True, align_corners=False)


def crop_centre(size: int | tuple[int, int], *, on: On = None) -> Transform:
    """The middle of the image."""
    height, width = _pair(size)

    def middle(image: Tensor) -> Tensor:
        top, left = (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2
        if min(top, left) < 0:
            raise DataError(f"crop_centre({size}) asks for more than the image has", f"it is {tuple(image.shape[-2:])}")
        return image[..., top : top + height, left : left + width].contiguous()

    def apply(leaf: Any, draw: SampleRandom) -> Any:
        return tree.stack([middle(image) for image in leaf]) if isinstance(leaf, tree.Ragged) else middle(leaf)

    return Transform("crop_centre", apply, on, any_size=True)


def crop_any_size(
    size: int | tuple[int, int],
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    on: On = None,
) -> Transform:
    """A window of a random share of the image's area and a random shape, resized to ``size``: what ImageNet is
    trained with (torchvision's RandomResizedCrop)."""
    want = _pair(size)

    def apply(leaf: Any, draw: SampleRandom) -> Tensor:
        share = draw.uniform(low=area[0], high=area[1]).tolist()
        shape = draw.uniform(low=float(np.log(ratio[0])), high=float(np.log(ratio[1]))).exp().tolist()
        where = draw.uniform(2).tolist()
        done = []
        for image, part, form, (down, across) in zip(leaf, share, shape, where, strict=True):
            height, width = image.shape[1:]
            h = min(height, max(1, round((height * width * part / form) ** 0.5)))
            w = min(width, max(1, round((height * width * part * form) ** 0.5)))
            top, left = int(down * (height - h + 1)), int(across * (width - w + 1))
            done.append(_resized(image[None, :, top : top + h, left : left + w].contiguous(), want)[0])
        return torch.stack(done)

    return Transform("crop_any_size", apply, on, any_size=True)


def cutout(size: int, *, fill: float = 0.0, on: On = None) -> Transform:
    """A square of side ``size`` filled, its centre anywhere in the image."""

    def apply(image: Tensor, draw: SampleRandom) -> Tensor:

        def inside(length: int) -> Tensor:
            centre = draw.integers(0, length).to(image.device)
            at = torch.arange(length, device=image.device) - centre[:, None] + size // 2
            return (at >= 0) & (at < size)

        rows, cols = inside(image.shape[2]), inside(image.shape[3])
        return image.masked_fill((rows[:, :, None] & cols[:, None, :])[:, None], fill)

    return Transform("cutout", apply, on)


# Colour


def colour(brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, *, on: On = None) -> Transform:
    """Brightness, contrast and saturation times a factor each, between 1 - x and 1 + x, in this order."""

    def apply(image: Tensor, draw: SampleRandom) -> Tensor:
        work = image.float()
        most = 255.0 if image.dtype == torch.uint8 else 1.0
        if brightness:
            work = (work * _factor(draw, brightness, image)).clamp(0, most)
        if contrast:
            mean = _grey(work).mean((1, 2, 3), keepdim=True)
            work = torch.lerp(mean.expand_as(work), work, _factor(draw, contrast, image)).clamp(0, most)
        if saturation and image.shape[1] == 3:
            work = torch.lerp(_grey(work).expand_as(work), work, _factor(draw, saturation, image)).clamp(0, most)
        return work.round().to(torch.uint8) if image.dtype == torch.uint8 else work

    return Transform("colour", apply, on)


def _factor(draw: SampleRandom, spread: float, image: Tensor) -> Tensor:
    return draw.uniform(low=max(0.0, 1 - spread), high=1 + spread).to(image.device).view(-1, 1, 1, 1)


def _grey(image: Tensor) -> Tensor:
    if image.shape[1] != 3:
        return image.mean(1, keepdim=True)
    weights = torch.tensor([0.299, 0.587, 0.114], device=image.device).view(1, 3, 1, 1)
    return (image * weights).sum(1, keepdim=True)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
