"""Parts of a batch, for the trial of a loss (loss/probe.py), and where its targets lie."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfit.data import tree


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
