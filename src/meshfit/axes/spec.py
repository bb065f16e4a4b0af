"""Split tensors, which hold a rank's part and show the shape of the whole, as a plain tensor and its specs.

So they are sent between stages of a pipeline: the local tensor each time, its specs once. The receiver has the same
index along the same axes, and builds the tensor again over its own group.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from meshfit.comm.group import Group
from meshfit.comm.transport import Layout


class SplitTensor(Tensor):
    """A tensor subclass that holds this rank's part of a tensor."""

    axis: ClassVar[str]
    """The axis over which it is split."""

    def to_local(self) -> "tuple[Tensor, Spec | None]":
        """This rank's part, and how it is split; None: the part is the whole."""
        raise NotImplementedError

    @classmethod
    def from_local(cls, local: Tensor, group: Group, how: Any) -> Tensor:
        """The inverse of ``to_local``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Spec:
    """How a tensor is split: plain data, the same on all ranks that hold the same part."""

    kind: type[SplitTensor]
    how: Any


def to_local(tensor: Tensor) -> tuple[Tensor, tuple[Spec, ...]]:
    """A plain tensor, and how it is split, outermost first."""
    specs = []
    while isinstance(tensor, SplitTensor):
        tensor, spec = tensor.to_local()
        specs += [] if spec is None else [spec]
    return tensor, tuple(specs)


def locals_of(tensors: Iterable[Tensor]) -> tuple[list[Tensor], tuple[Layout, ...]]:
    """This rank's parts of ``tensors``, and the layouts of a message with them."""
    parts = [to_local(tensor) for tensor in tensors]
    layouts = tuple(Layout(tuple(t.shape), t.dtype, t.requires_grad, specs) for t, specs in parts)
    return [local for local, _ in parts], layouts


def from_local(local: Tensor, specs: tuple[Spec, ...], groups: Mapping[str, Group]) -> Tensor:
    """The tensor of which ``local`` is this rank's part; ``groups`` by axis."""
    for spec in reversed(specs):
        local = spec.kind.from_local(local, groups[spec.kind.axis], spec.how)
    return local
