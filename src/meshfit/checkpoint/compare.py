"""What differs between two checkpoints: settings, names, shapes, and how far the numbers are apart. Two parts of a
tensor are in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from meshfit.checkpoint.box import sizes, slabs, volume, whole
from meshfit.checkpoint.manifest import Manifest, Stored
from meshfit.checkpoint.read import AT_ONCE, OnDisk

UNTOLD = ("format", "files", "tensors", "block", "time")


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    what: str
    """ "only in A", "shape", "values" ..."""
    first: str = ""
    second: str = ""


def differences(
    one: Manifest, other: Manifest, progress: Callable[[int], None] = lambda done: None
) -> Iterator[Difference]:
    """Between two checkpoints, settings first."""
    yield from _facts(one.body, other.body)
    mine, theirs = OnDisk.of(one), OnDisk.of(other)
    for key in sorted({**one.tensors, **other.tensors}):
        a, b = one.tensors.get(key), other.tensors.get(key)
        if a is None or b is None:
            yield Difference(key, f"only in {'B' if a is None else 'A'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(key, "shape", f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}")
        else:
            yield from _values(key, (mine, a), (theirs, b), progress)


def _values(
    key: str, one: tuple[OnDisk, Stored], other: tuple[OnDisk, Stored], progress: Callable[[int], None]
) -> Iterator[Difference]:
    stored, count, largest, scale = one[1], 0, 0.0, 0.0
    wide = torch.complex128 if stored.dtype.is_complex else torch.float64
    boxes = list(slabs(whole(stored.shape), AT_ONCE // stored.dtype.itemsize))
    rooms = [torch.empty(max(map(volume, boxes), default=0), dtype=stored.dtype) for _ in range(2)]
    for box in boxes:
        x, y = (room[: volume(box)] for room in rooms)
        one[0].fill(x.view(sizes(box)), box, stored)
        other[0].fill(y.view(sizes(box)), box, other[1])
        progress(2 * x.numel() * stored.dtype.itemsize)
        if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):  # NaN too
            count += int((x.view(torch.uint8) != y.view(torch.uint8)).view(x.numel(), -1).any(1).sum())
            largest = max(largest, float((x.to(wide) - y.to(wide)).abs().nan_to_num(float("inf")).max()))
            scale = max(scale, float(x.to(wide).abs().nan_to_num().max()))
    if count:
        yield Difference(key, "values", f"{count} of {prod(stored.shape)} numbers", f"{largest:.1e} of {scale:.1e}")


def _facts(one: dict[str, Any], other: dict[str, Any], at: str = "") -> Iterator[Difference]:
    for key in {**one, **other}:
        if not at and key in UNTOLD:
            continue
        a, b, name = one.get(key), other.get(key), f"{at}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _facts(a, b, f"{name}.")
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(x, dict) for x in a):
            yield from _facts(dict(enumerate(a)), dict(enumerate(b)), f"{name}.")  # type: ignore[arg-type]
        elif a != b:
            yield Difference(name, "setting", _short(a), _short(b))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
