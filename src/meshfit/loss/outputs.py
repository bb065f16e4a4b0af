"""Which dim of what a model returns is that of the samples, for a loss of the whole batch: found by running parts.

Outputs of several ranks or microbatches are then put together along it: loss/batch_loss.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshfit.data import tree
from meshfit.generators import Generators


def cuts_of(samples: int) -> list[list[slice]]:
    """Ways to cut some samples into two parts, of different sizes where that can be."""
    firsts = dict.fromkeys((max(1, (samples - 1) // 2), max(1, samples // 4)))
    return [[slice(0, first), slice(first, samples)] for first in firsts]


def cut_rows(whole: Tensor, dim: int, cut: slice, samples: int) -> Tensor:
    """The rows of some samples; there may be several for each."""
    each = whole.shape[dim] // samples
    return whole.narrow(dim, cut.start * each, (cut.stop - cut.start) * each)


class NoRows(Exception):
    """What the model returns cannot be put together from parts; says why."""


def output_rows(
    run: Callable[[slice], Any], samples: int, limit: Callable[[], float], start: Generators
) -> tuple[Any, tuple[int | None, ...]]:
    """What the model returns for all samples, and which dim of each tensor in it is that of the samples; None: it is
    the same for all parts. ``run`` gives what it returns for some samples; ``limit``, known after that: what rounding
    may change, of the largest element; ``start``: random numbers, from which every run begins. Of tensors on meta
    shapes alone are compared."""
    cuts, returned = cuts_of(samples)[0], []
    with torch.no_grad():
        for cut in (slice(0, samples), *cuts):
            start.restore()
            returned.append(run(cut))
    compare = not start.moved
    whole, *parts = ([*tree.leaves(each)] for each in returned)
    if any(len(part) != len(whole) for part in parts):
        raise NoRows("the model returns another number of things for other numbers of samples")

    def dim_of(i: int, leaf: Any, theirs: list[Any]) -> int | None:
        if not isinstance(leaf, Tensor):
            return None
        shape = tuple(leaf.shape)
        if all(part.shape == leaf.shape for part in theirs):
            if compare and not all(_same(part, leaf, limit()) for part in theirs):
                raise NoRows(f"the model itself computes output {i}, of shape {shape}, from the whole batch")
            return None
        sizes = [cut.stop - cut.start for cut in cuts]
        for dim in range(leaf.dim()):
            rest = (*shape[:dim], *shape[dim + 1 :])
            if all(
                part.dim() == leaf.dim()
                and part.shape[dim] * samples == shape[dim] * size
                and (*part.shape[:dim], *part.shape[dim + 1 :]) == rest
                for part, size in zip(theirs, sizes, strict=True)
            ):
                break
        else:
            raise NoRows(f"output {i} of the model, of shape {shape} for {samples} samples, has no dim of samples")
        for part, cut in zip(theirs, cuts, strict=True) if compare else ():
            if not _same(part, cut_rows(leaf, dim, cut, samples), limit()):
                raise NoRows(f"what the model returns for a sample (output {i}) depends on the others in its batch")
        return dim

    return returned[0], tuple(dim_of(i, leaf, [part[i] for part in parts]) for i, leaf in enumerate(whole))


def _same(a: Tensor, b: Tensor, limit: float) -> bool:
    if not a.is_floating_point() or not a.numel() or a.is_meta:  # a number that is rounded may be another
        return True
    scale = float(b.detach().nan_to_num().abs().max())
    return bool(torch.isclose(a, b, rtol=0.0, atol=limit * max(scale, 1e-30), equal_nan=True).all())


def bytes_moved(outputs: Any, dims: tuple[int | None, ...], targets: Any, samples: int) -> tuple[int, int]:
    """Bytes of a sample's outputs and targets that are gathered; and of the gradients that come back."""
    kept = [leaf for dim, leaf in zip(dims, tree.leaves(outputs), strict=True) if dim is not None]
    size = lambda t: t.numel() * (4 if t.is_floating_point() else t.element_size()) // samples
    there = sum(map(size, kept)) + sum(map(size, tree.tensors(targets)))
    return there, sum(size(t) for t in kept if t.is_floating_point())
