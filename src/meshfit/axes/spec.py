"""Split tensors, which hold a rank's part and show the shape of the whole, as a plain tensor and its specs.

So they are sent between stages of a pipeline: the local tensor each time, its specs once. The receiver has the same
index along the same axes, and builds the tensor again over its own group.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from meshfit.comm.group import Group
from meshfit.comm.transport import Layout


class SplitTensor(Tensor):
    """A tensor subclass that holds this rank's part of a tensor."""

    axis: ClassVar[str]
    """The axis over which it is split."""

    group: Group

    @property
    def split_dim(self) -> int:
        """The dim of which each rank has a part."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All of it, gathered from all ranks, which call it together."""
        raise NotImplementedError

    def to_local(self) -> "tuple[Tensor, Spec | None]":
        """This rank's part, and how it is split; None: the part is the whole."""
        raise NotImplementedError

    @classmethod
    def from_local(cls, local: Tensor, group: Group, how: Any) -> Tensor:
        """The inverse of ``to_local``."""
        raise NotImplementedError

    def like(self, local: Tensor) -> Tensor:
        """Another, split as this one is, of which this rank has ``local``."""
        raise NotImplementedError

    def on_local(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``function`` makes of this rank's part, split as this one is; it leaves the dim that is split alone. So
        an axis acts inside another: the part may be split again."""
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


def whole_output(tree: Any) -> Any:
    """``tree``, what a model returned, with every tensor that is split made whole. All ranks call it together."""
    if isinstance(tree, Tensor):
        return tree.whole() if isinstance(tree, SplitTensor) else tree
    if isinstance(tree, Mapping):
        new = {key: whole_output(item) for key, item in tree.items()}
        if all(new[key] is tree[key] for key in new):
            return tree
        if type(tree) is dict:
            return new
        made = copy.copy(tree)
        for key, item in new.items():
            made[key] = item  # type: ignore[index]
        return made
    if isinstance(tree, (tuple, list)):
        items = [whole_output(item) for item in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if hasattr(tree, "__dict__") and not isinstance(tree, type) and not callable(tree):
        new = {key: whole_output(item) for key, item in vars(tree).items()}
        if all(new[key] is item for key, item in vars(tree).items()):
            return tree
        made = copy.copy(tree)
        made.__dict__.update(new)
        return made
    return tree


# Functions of torch, by name

CHANGES = frozenset(
    """
__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__ __ifloordiv__ __imod__
""".split()  # noqa: SIM905
)


def name_of(func: Any) -> str:
    """Of an attribute, its own."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def changes(name: str) -> bool:
    """Whether the function changes a tensor in place."""
    return name in CHANGES or (name.endswith("_") and not name.endswith("__"))
