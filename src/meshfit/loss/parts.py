"""Parts of a batch, for the trial of a loss (loss/probe.py), and where its targets lie."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfit.data import tree


def size_of(batch: Any) -> int:
    """Samples in a batch."""
    return next((len(t) for t in tree.tensors(batch) if t.dim()), 0)


def part_of(batch: Any, cut: slice | Tensor, samples: int) -> Any:
    """Some of the samples of a batch; what does not hold one row a sample stays as it is."""
    if isinstance(batch, list) and len(batch) == samples and not any(True for _ in tree.tensors(batch)):
        return batch[cut] if isinstance(cut, slice) else [batch[i] for i in cut.tolist()]  # words
    if isinstance(batch, dict):
        return type(batch)({key: part_of(value, cut, samples) for key, value in batch.items()})
    if type(batch) in (tuple, list):
        return type(batch)(part_of(value, cut, samples) for value in batch)
    return tree.map_tensors(lambda t: t[cut] if t.dim() and len(t) == samples else t, batch)


def cuts_of(samples: int) -> list[tuple[int, int]]:
    """Ways to cut some samples into two parts, of different sizes where that can be."""
    return list(dict.fromkeys((first, samples - first) for first in (max(1, (samples - 1) // 2), max(1, samples // 4))))


def cut_rows(whole: Tensor, dim: int, cut: slice, samples: int) -> Tensor:
    """The rows of some samples; there may be several for each."""
    each = whole.shape[dim] // samples
    return whole.narrow(dim, cut.start * each, (cut.stop - cut.start) * each)


class CrossEntropies(TorchFunctionMode):
    """Notes every mean cross entropy computed below it: (result, targets, ignored index, class weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, int, Tensor | None]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (F.cross_entropy, F.nll_loss):
            given: dict[str, Any] = dict(
                zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)
            )
            given |= kwargs or {}
            if given.get("reduction", "mean") == "mean":
                self.seen.append((result, given["target"], given.get("ignore_index", -100), given.get("weight")))
        return result


def finders(batch: Any) -> list[Callable[[Any], Tensor]]:
    """Ways to find integer targets in a batch: each of its tensors, as it is or less its first position
    (a language model's own loss predicts each next token)."""
    found: list[Callable[[Any], Tensor]] = []
    for place, leaf in enumerate(tree.leaves(batch)):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            found.append(partial(_leaf, place=place, skip=0))
            if leaf.dim() > 1:
                found.append(partial(_leaf, place=place, skip=1))
    return found


def _leaf(batch: Any, *, place: int, skip: int) -> Tensor:
    leaf = list(tree.leaves(batch))[place]
    return leaf[..., skip:]
