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

from meshfit.axes.context.ops import gather
from meshfit.axes.context.piece import Piece, whole
from meshfit.axes.context.span import Span
from meshfit.axes.tensor.ops import Group

AGAIN = "_checkpoint_hook.", "_recomputation_hook."
"""torch.utils.checkpoint's: what is computed again is not saved at all."""


@dataclass(frozen=True, slots=True)
class _Note:
    """In place of a whole that was gathered, or of a view of it."""

    local: Any
    where: tuple[Span, Group]
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def noted(*given: Any) -> Iterator[None]:
    """For what is saved within of the wholes of those that are pieces."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    again = bool(hooks) and getattr(hooks[0], "__qualname__", "").startswith(AGAIN)
    found = {whole(x).untyped_storage()._cdata: x for x in given if isinstance(x, Piece)}
    if again or not found or not torch.is_grad_enabled():
        yield
        return
    keep, fetch = hooks or (lambda x: x, lambda x: x)

    def pack(x: Tensor) -> Any:
        piece = found.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None
        if piece is None:
            return keep(x)
        local = piece.local.detach()
        where = piece.span, piece.group
        return _Note(keep(local), where, local._version, x.size(), x.stride(), int(x.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _Note):
            return fetch(packed)
        local = fetch(packed.local)
        if local._version != packed.version:
            raise RuntimeError("a tensor that attention needs for its gradient was changed in place")
        with torch.no_grad():
            return gather(local, *packed.where).as_strided(packed.size, packed.stride, packed.offset)

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        found.clear()  # autograd keeps the hooks, and they would keep the wholes
