"""What a rank holds of each tensor of a model, said without naming the strategy that put it there: boxes of the whole
tensor, each with the view of the rank's memory that holds it.

    replicated    one box, all of it, on several ranks: one of them is chosen to write it
    tensor        the rank's index ranges of one dim, a box each
    shard         a range of the elements in memory order: up to 2n - 1 boxes of an n-dim tensor
    both          the boxes of that range, within the rank's index ranges

A pipeline's rank holds some names and not others; a server holds state and no model. Neither needs more than this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from meshfit.axes.place import Placed
from meshfit.axes.tensor.region import Cut
from meshfit.checkpoint.box import Box, runs, volume, whole


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor, and where it is in the memory of the rank's own part of that tensor."""

    box: Box
    part: tuple[slice, ...]
    """Where it is in the part, or in the run below."""

    start: int = -1
    """Of the run that holds it, in a part that is one row; -1 where parts have dims of their own."""

    shape: tuple[int, ...] = ()
    """Of the run, dims in memory order."""

    order: tuple[int, ...] = ()
    """For each dim, its place in memory."""

    def of(self, mine: Tensor) -> Tensor:
        """The piece of ``mine``: a weight, its moment, its average, laid out alike. A view."""
        if self.start < 0:
            return mine[self.part]
        run = mine.detach()[self.start : self.start + prod(self.shape)].view(self.shape)
        return run.permute(self.order)[self.part]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What one rank holds of a tensor that may be sharded over several."""

    shape: tuple[int, ...]
    """Of the whole tensor."""

    pieces: tuple[LocalBox, ...]
    """Of this rank; none if it has nothing of it."""


def layout_of(placed: Placed, tensor: Tensor) -> ShardLayout:
    """The layout of ``tensor``, a parameter or buffer of the placed model."""
    found = placed.shards.place.get(tensor) if placed.shards is not None else None  # type: ignore[arg-type]
    if found is None or found[0].degree == 1:
        shape, pieces = tuple(tensor.shape), list(uncut(tensor).pieces)
    else:
        flat, i = found
        shape, taken = tuple(flat.shapes[i]), flat.slices(i)[1]
        pieces = list(_row_pieces(shape, flat.strides[i], taken.start, taken.stop))
    for layer in reversed(placed.layers.values()):
        if (cut := layer.cuts.get(tensor)) is not None:
            pieces = [part for piece in pieces for part in _within(piece, cut.dim, cut.ranges[layer.rank])]
            shape = (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])
    return ShardLayout(shape, tuple(pieces))


def boxes_of(
    shape: tuple[int, ...], elements: tuple[int, int] | None, cuts: Sequence[tuple[Cut | None, int]]
) -> list[Box]:
    """Boxes of a contiguous tensor of ``shape`` that a rank holds, by what it has of its ``elements`` (None: all) after
    ``cuts``, of each of which it has the share of that number."""
    made = [(cut, rank) for cut, rank in cuts if cut is not None]
    part = list(shape)
    for cut, rank in made:
        part[cut.dim] = sum(stop - start for start, stop in cut.ranges[rank])
    strides = tuple(prod(part[dim + 1 :]) for dim in range(len(part)))
    pieces = list(_row_pieces(tuple(part), strides, *((0, prod(part)) if elements is None else elements)))
    for cut, rank in made:
        pieces = [each for piece in pieces for each in _within(piece, cut.dim, cut.ranges[rank])]
    return [piece.box for piece in pieces if volume(piece.box)]


def uncut(tensor: Tensor) -> ShardLayout:
    """The layout of a tensor that every rank has whole."""
    return whole_of(tuple(tensor.shape))


def whole_of(shape: tuple[int, ...]) -> ShardLayout:
    """The layout of a tensor of which a rank has all."""
    return ShardLayout(shape, (LocalBox(whole(shape), tuple(slice(0, n) for n in shape)),))


def _row_pieces(shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[LocalBox]:
    """Of a part that is elements ``start`` to ``stop`` of a tensor, as ``strides`` lay them out."""
    memory = sorted(range(len(shape)), key=lambda dim: -strides[dim])  # dims from outer to inner
    order = tuple(memory.index(dim) for dim in range(len(shape)))
    at = 0
    for box in runs([shape[dim] for dim in memory], start, stop):
        size = tuple(b - a for a, b in box)
        yield LocalBox(tuple(box[i] for i in order), tuple(slice(0, size[i]) for i in order), at, size, order)
        at += prod(size)


def _within(piece: LocalBox, dim: int, ranges: tuple[tuple[int, int], ...]) -> Iterator[LocalBox]:
    """``piece``, whose ``dim`` counts within a rank's ``ranges``, by the indices of the whole."""
    first, last = piece.box[dim]
    at = 0
    for start, stop in ranges:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            box = (*piece.box[:dim], (start + low - at, start + high - at), *piece.box[dim + 1 :])
            part = (*piece.part[:dim], slice(low - first, high - first), *piece.part[dim + 1 :])
            yield LocalBox(box, part, piece.start, piece.shape, piece.order)
        at += stop - start
