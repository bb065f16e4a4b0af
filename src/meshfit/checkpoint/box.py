"""Boxes: which part of a tensor, as a range of indices for each dim. What is on disk and in memory are boxes of the
same tensors, so any layout is read from any other by the boxes they have in common."""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]
"""A (start, stop) for each dim; () is all of a tensor without dims."""


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in it."""
    return prod(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """What both hold; None if nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def inside(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Where ``inner`` is in a tensor that holds ``outer``."""
    return tuple(slice(a - first, b - first) for (first, _), (a, b) in zip(outer, inner, strict=True))


def runs(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a tensor, counted row by row, as boxes one after another: 2n - 1 at most."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row = prod(shape[1:])
    first, skipped = divmod(start, row)
    last, rest = divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *box) for box in runs(shape[1:], skipped, rest))
        return
    if skipped:
        yield from (((first, first + 1), *box) for box in runs(shape[1:], skipped, row))
        first += 1
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    if rest:
        yield from (((last, last + 1), *box) for box in runs(shape[1:], 0, rest))


def slabs(box: Box, most: int) -> Iterator[Box]:
    """``box`` cut along its first dims into parts of ``most`` elements, or one of the last dim's."""
    if volume(box) <= most or not box:
        yield box
        return
    (start, stop), rest = box[0], box[1:]
    rows = most // max(1, volume(rest))
    if rows:
        yield from (((at, min(at + rows, stop)), *rest) for at in range(start, stop, rows))
    else:
        yield from (((at, at + 1), *part) for at in range(start, stop) for part in slabs(rest, most))
