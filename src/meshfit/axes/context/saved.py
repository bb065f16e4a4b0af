"""What autograd saves of gathered keys and values: the rank's own positions. Backward gathers the rest again.

So what a rank keeps is 1/n of it, for one gather more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshfit.axes.context.piece import Piece, gather
from meshfit.axes.context.span import SplitDim
from meshfit.comm.group import Group
from meshfit.torch_private import checkpoint_now, saved_tensors_hooks_now, storage_id, version


@dataclass(frozen=True, slots=True)
class _SavedGather:
    """In place of a whole that was gathered, or of a view of it."""

    local: Any
    where: tuple[SplitDim, Group]
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def noted(*given: Any) -> Iterator[None]:
    """For what is saved within of the wholes of those that are pieces."""
    hooks = saved_tensors_hooks_now()
    again = checkpoint_now(again=True) is not None  # what is computed again is not saved at all
    found = {storage_id(x.whole()): x for x in given if isinstance(x, Piece)}
    if again or not found or not torch.is_grad_enabled():
        yield
        return
    keep, fetch = hooks or (lambda x: x, lambda x: x)

    def pack(x: Tensor) -> Any:
        piece = found.get(storage_id(x)) if x.layout is torch.strided else None
        if piece is None:
            return keep(x)
        local = piece.local.detach()
        where = piece.span, piece.group
        return _SavedGather(keep(local), where, version(local), x.size(), x.stride(), int(x.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _SavedGather):
            return fetch(packed)
        local = fetch(packed.local)
        if version(local) != packed.version:
            raise RuntimeError("a tensor that attention needs for its gradient was changed in place")
        with torch.no_grad():
            return gather(local, *packed.where).as_strided(packed.size, packed.stride, packed.offset)

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        found.clear()  # autograd keeps the hooks, and they would keep the wholes
