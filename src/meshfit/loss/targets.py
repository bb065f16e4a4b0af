"""Which of a batch's tensors holds the targets of a loss: noted where a cross entropy is computed, and looked for.

Masks are noted as well: as long as ``mask`` is all ones, a loss over ``mask.sum()`` looks like a mean over samples.
"""

import itertools
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfit.data import tree
from meshfit.loss.objective import TargetPlace

SUMS = (torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero)
KEPT = (
    *(getattr(Tensor, name) for name in ("clamp", "clamp_min", "clip", "to", "float", "double", "detach", "type_as")),
    *(getattr(Tensor, name) for name in ("__add__", "__radd__", "add", "maximum", "long")),
    *(torch.clamp, torch.clamp_min, torch.clip, torch.add, torch.maximum, torch.max),
)
"""Of a sum they make what still counts as that sum: ``mask.sum().clamp(min=1)``."""
DIVISIONS = (torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__, Tensor.true_divide)


class CrossEntropies(TorchFunctionMode):
    """Notes every mean cross entropy computed below it: (result, targets, ignored index, class weights); and whether
    something is divided by the sum of a mask, or selected by a mask, that is all ones here."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, int, Tensor | None]] = []
        self.full_mask = False
        self._sums: dict[int, Tensor] = {}  # holds them, so that their ids stay theirs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._note_masks(func, args, result)
        if func in (F.cross_entropy, F.nll_loss):
            given: dict[str, Any] = dict(
                zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)
            )
            given |= kwargs or {}
            if given.get("reduction", "mean") == "mean":
                self.seen.append((result, given["target"], given.get("ignore_index", -100), given.get("weight")))
        return result

    def _note_masks(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func in DIVISIONS:
            self.full_mask |= any(id(x) in self._sums for x in args[1:2])
        elif func is Tensor.__getitem__ or func in (torch.masked_select, Tensor.masked_select):
            masks = args[1] if isinstance(args[1], tuple) else args[1:2]
            self.full_mask |= any(isinstance(m, Tensor) and m.dtype == torch.bool and _all_ones(m) for m in masks)
        elif not isinstance(result, Tensor) or result.dim() or not args:
            pass
        elif (func in SUMS and _all_ones(args[0])) or (func in KEPT and any(id(x) in self._sums for x in args)):
            self._sums[id(result)] = result


def _all_ones(mask: Tensor) -> bool:
    """Of several numbers that are not trained."""
    with suppress(RuntimeError):  # under vmap nothing may be asked
        return mask.numel() > 1 and mask.device.type != "meta" and not mask.requires_grad and bool((mask == 1).all())
    return False


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
