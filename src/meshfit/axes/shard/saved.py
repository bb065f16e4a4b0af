"""What autograd saves of gathered weights: nothing but where to find them again.

With zero=3 a unit is dropped after its call, but autograd saves weights. Hooks on saved tensors put a note in their
place (which unit, where in its row), and gather the unit again when backward asks for one. Nothing has to be foreseen:
a weight is never stale, whatever is done to the outputs of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshfit.axes.shard.open_unit import OpenUnit
from meshfit.comm.flat import Flat
from meshfit.torch_private import storage_id, version


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """In place of a saved weight."""

    unit: OpenUnit
    flat: Flat
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """Any other saved tensor. With hooks, torch leaves it to them to see that it was not changed since."""

    tensor: Tensor
    version: int


class Saved:
    """Notes on the weights that autograd saves; ``fetch`` gathers a unit."""

    def __init__(self, fetch: Callable[[OpenUnit], None]):
        self._fetch = fetch
        self._storages: dict[int, tuple[OpenUnit, Flat]] = {}
        """Of gathered rows."""

    def watched(self) -> saved_tensors_hooks:
        """Around the forwards whose saved tensors are meant."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def know(self, unit: OpenUnit, flat: Flat) -> None:
        """``flat`` is gathered."""
        assert flat.whole is not None
        self._storages[storage_id(flat.whole)] = (unit, flat)

    def forget(self, flat: Flat) -> None:
        """It will be dropped: its memory may come to hold anything."""
        if flat.whole is not None:
            self._storages.pop(storage_id(flat.whole), None)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            found = self._storages.get(storage_id(tensor))
            if found is not None:
                return _SavedWeight(*found, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _Kept(tensor.detach() if tensor.grad_fn is not None else tensor, version(tensor))  # no node holds itself

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept):
            if version(packed.tensor) != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" a tensor of shape {tuple(packed.tensor.shape)}, {version(packed.tensor) - packed.version} times"
                )
            return packed.tensor
        self._fetch(packed.unit)
        assert packed.flat.whole is not None
        return packed.flat.whole.as_strided(packed.size, packed.stride, packed.offset).to(packed.dtype)
