"""Which of a batch's tensors holds the targets of a loss: noted where a cross entropy is computed, and looked for."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfit.data import tree
from meshfit.loss.objective import TargetPlace


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


def places(batch: Any) -> list[TargetPlace]:
    """Where a batch may hold integer targets: each of its tensors, as it is or less its first position."""
    found: list[TargetPlace] = []
    for at, leaf in enumerate(tree.leaves(batch)):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            found += [TargetPlace(at, skip) for skip in ((0, 1) if leaf.dim() > 1 else (0,))]
    return found


def are_targets(found: Tensor, target: Tensor, ignore: int) -> bool:
    return torch.equal(found[found != ignore].flatten(), target[target != ignore].flatten())


def with_other_targets(batch: Any, place: TargetPlace, ignore: int) -> Any:
    """``batch`` with other values in the tensor at ``place``, all of them ones that it holds."""
    numbers, leaf = itertools.count(), TargetPlace(place.leaf)(batch)
    kept = leaf[leaf != ignore]
    other = torch.where(leaf == ignore, kept[0], leaf).roll(1, -1) if len(kept) else leaf
    return tree.map_leaves(lambda x: other if next(numbers) == place.leaf else x, batch)
