"""Tensors that no rank holds whole, which show the shape of the whole: logits, of which each rank has a slice of the
classes, and activations, of which it has some rows (sequence=split).

The head of a model is cut by its output channels and returns a ``SlicedTensor``. What keeps the classes apart (other
types and shapes, scaling, tanh) is done to the slice. ``F.cross_entropy`` is computed from slices: see functions.py.
Whatever else reads it gets the whole, gathered from all ranks: exact, differentiable, and a collective, so that all
ranks have to come by. ``whole_output`` does that for what leaves a step.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.spec import Spec, SplitTensor, changes, name_of
from meshfit.axes.tensor.functions import Entrance, cross_entropy
from meshfit.axes.tensor.region import SEQUENCE
from meshfit.comm import collectives
from meshfit.comm.collectives import even
from meshfit.comm.group import Group
from meshfit.torch_private.tensors import without_subclasses
from meshfit.torch_private.trees import tree_leaves, tree_map

OF_THE_SLICE = set(
    """
dtype device requires_grad is_cuda is_cpu layout is_leaf grad_fn is_sparse is_meta is_quantized is_mkldnn is_nested
is_mps is_xpu _version ndim dim is_floating_point is_complex element_size get_device is_contiguous is_inference names
itemsize ndimension is_signed is_conj is_neg output_nr _backward_hooks
""".split()  # noqa: SIM905
)
"""Asked of a slice, the answer is that of the whole."""

POINTWISE = set(
    """
float double half bfloat16 to type clone contiguous detach cpu cuda data tanh sigmoid exp relu gelu silu abs neg
square clamp softplus mul div add sub multiply divide true_divide subtract nan_to_num __mul__ __rmul__ __truediv__
__add__ __radd__ __sub__ __rsub__ __neg__ __div__
""".split()  # noqa: SIM905
)
"""Functions of each element by itself, and of tensors that say nothing of single classes."""

MOVES = {"transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "unsqueeze"}
"""Functions that put dims elsewhere, whatever their sizes."""


OF_ITSELF = ("gathered", "put_together", "entrances", "changed", "shown")
"""Attributes of a slice that another one made from it does not have."""


class SlicedTensor(SplitTensor):
    """A rank's share of one dim of a tensor; every rank has another one, of the same size."""

    axis = "tensor"
    at: int
    """The dim of the classes, counted from the last: -1; or of the rows: -2."""

    length: int
    """Of the dim that is cut, where it is of rows: then not all shares are of one size."""

    gathered: Tensor | None = None
    """The whole, once it was asked for."""

    put_together: Tensor | None = None
    """All rows, once they entered a region without a gradient."""

    entrances: dict[bool, Entrance]
    changed = False
    """The whole was changed in place: the slice no longer counts."""

    shown = False
    """It is a view of another slice."""

    @classmethod
    def made(cls, local: Tensor, **attributes: Any) -> Self:
        out = local.as_subclass(cls)
        vars(out).update(attributes, entrances={})
        return out

    @staticmethod
    def of(local: Tensor, group: Group, at: int = -1) -> "SlicedTensor":
        return SlicedTensor.made(local, group=group, at=at, length=0)

    @staticmethod
    def rows(local: Tensor, length: int, group: Group) -> "SlicedTensor":
        """A rank's rows (tokens): ``length`` in parts that are even up to one."""
        return SlicedTensor.made(local, group=group, at=SEQUENCE, length=length)

    def like(self, local: Tensor, *, view: bool = False, **others: Any) -> Self:
        """Another, cut as this one is, but for ``others`` of its attributes; ``view``: of this one."""
        kept = {name: value for name, value in vars(self).items() if name not in OF_ITSELF}
        return self.made(local, **kept | others, shown=view)

    @property
    def full_length(self) -> int:
        """Of the dim that is cut."""
        return self.length or local_of(self).shape[self.at] * self.group.size

    @property
    def split_dim(self) -> int:
        return self.dim() + self.at

    def to_local(self) -> tuple[Tensor, Spec | None]:
        return (self.whole(), None) if self.changed else (local_of(self), Spec(SlicedTensor, (self.at, self.length)))

    @classmethod
    def from_local(cls, local: Tensor, group: Group, how: tuple[int, int]) -> "SlicedTensor":
        at, length = how
        return SlicedTensor.rows(local, length, group) if length else SlicedTensor.of(local, group, at)

    def whole(self) -> Tensor:
        """All classes, or rows, gathered from all ranks. All ranks call it together."""
        local, known, size = local_of(self), self.gathered, self.group.size
        if known is None or (torch.is_grad_enabled() and local.requires_grad and not known.requires_grad):
            counts = even(self.length, size) if self.length else [local.shape[self.at]] * size
            known = self.gathered = collectives.gather(local, self.at, counts, self.group)
        return known

    def entered(self) -> Tensor:
        """All rows, for a region, where they get no gradient."""
        if self.changed:
            return self.whole()
        if self.put_together is None:
            counts = even(self.length, self.group.size)
            self.put_together = collectives.all_gather(local_of(self), SEQUENCE, counts, self.group)
        return self.put_together

    def entrance(self, columns: Sequence[nn.Module], *, alone: bool) -> Entrance:
        """The same where each rank has part of their gradient. Put together once, however many ask."""
        if alone not in self.entrances:
            x, length = (self.whole(), 0) if self.changed else (local_of(self), self.length)
            self.entrances[alone] = Entrance(x, columns, self.group, length, alone=alone)
        return self.entrances[alone]

    def pointwise(self, func: Any, args: Any, kwargs: Any) -> "SlicedTensor | None":
        """What a function of each element by itself makes of it; None: what it needs is not here."""
        return _pointwise(func, args, kwargs, self)

    def cross_entropy(self, target: Tensor, **how: Any) -> Tensor:
        """Of these logits."""
        return cross_entropy(local_of(self), target, self.group, at=self.at, **how)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SplitTensor) and kind is not cls for kind in types):
            return NotImplemented  # theirs are split by an axis around this one
        kwargs, name = kwargs or {}, name_of(func)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SlicedTensor)]
        if not given:
            with without_subclasses():
                return func(*args, **kwargs)
        first = given[0]
        if name in OF_THE_SLICE and len(given) == 1:
            with without_subclasses():
                return func(*args, **kwargs)
        if name in ANSWERS and args and args[0] is first:
            return ANSWERS[name](first, *args[1:], **kwargs)
        if name == "__set__" or "out" in kwargs:
            raise TypeError("logits that are cut over ranks cannot be written to like this")
        if changes(name):
            return _change(func, name, args, kwargs)
        if not any(x.changed for x in given):
            made = _kept(func, name, args, kwargs, given)
            if made is not None:
                return made
        return func(*_wholes(args), **_wholes(kwargs))


def shape_of(x: SlicedTensor) -> torch.Size:
    """Of the whole."""
    size = list(local_of(x).shape)
    size[x.at] = x.full_length
    return torch.Size(size)


def local_of(x: SlicedTensor) -> Tensor:
    """What this rank holds, as a plain tensor."""
    with without_subclasses():
        return x.as_subclass(Tensor)


def _wholes(tree: Any) -> Any:
    return tree_map(lambda x: x.whole() if isinstance(x, SlicedTensor) else x, tree)


def _change(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A change in place: the whole is gathered and changed, and stands for the slice from then on."""
    target = args[0]
    if not isinstance(target, SlicedTensor):  # a plain tensor takes something from a slice
        return func(*_wholes(args), **_wholes(kwargs))
    if target.shown:
        raise RuntimeError(
            f"{name} changes a view of logits that are cut over ranks, which the logits would not see: "
            "change a copy (.clone()), or the logits themselves"
        )
    if not target.changed:
        target.gathered, target.changed = target.whole().clone(), True
    func(*_wholes(args), **_wholes(kwargs))
    return target


def _kept(func: Any, name: str, args: Any, kwargs: Any, given: list[SlicedTensor]) -> Any:
    """What ``func`` makes of the slice alone, where that is a slice of what it makes of the whole; else None."""
    first = given[0]
    if func is F.cross_entropy:
        return _loss(*args, **kwargs)
    if name in POINTWISE:
        return first.pointwise(func, args, kwargs)
    if len(given) > 1 or not args or args[0] is not first:
        if name == "view_as" and len(given) == 2 and given[0] is given[1]:
            return first.like(local_of(first).view_as(local_of(first)), view=True)
        return None
    if name in MOVES and not first.length:
        rest = tuple(args[1:])
        sizes = [2 * i + 3 for i in range(first.dim())]
        tried = func(torch.empty(sizes, device="meta"), *rest, **kwargs)
        at = list(tried.shape).index(sizes[first.at]) - tried.dim()
        return first.like(func(local_of(first), *rest, **kwargs), view=True, at=at)
    if first.length and name in SAME and SAME[name](first, *args[1:], **kwargs):
        return first.like(local_of(first).view_as(local_of(first)), view=True)
    if name in SHAPES and first.at == -1:
        return SHAPES[name](first, *args[1:], **kwargs)
    return None


def _pointwise(func: Any, args: Any, kwargs: Any, first: SlicedTensor) -> SlicedTensor | None:
    shape = shape_of(first)

    def fits(x: Any) -> bool:
        if isinstance(x, SlicedTensor):
            return x.group is first.group and x.at == first.at and shape_of(x) == shape
        return not isinstance(x, Tensor) or x.dim() < -first.at or x.shape[first.at] == 1 or of_rows(x)

    def of_rows(x: Tensor) -> bool:
        return bool(first.length) and x.shape[first.at] == first.length

    def own(x: Any) -> Any:
        if isinstance(x, SlicedTensor):
            return local_of(x)
        if isinstance(x, Tensor) and x.dim() >= -first.at and of_rows(x):
            return collectives.split(x, SEQUENCE, even(first.length, first.group.size), first.group)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return collectives.copy(x, first.group)  # each rank has part of its gradient
        return x

    if not all(fits(x) for x in tree_leaves((args, kwargs))):
        return None
    args, kwargs = tree_map(own, (args, kwargs))
    made = func(*args, **kwargs)
    return first.like(made) if isinstance(made, Tensor) else None


def _loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if not isinstance(input, SlicedTensor) or not isinstance(target, Tensor) or isinstance(target, SlicedTensor):
        return None
    old = size_average is not None or reduce is not None
    if old or isinstance(weight, SlicedTensor) or (weight is not None and weight.requires_grad):
        return None
    shape = shape_of(input)
    expected = 0 if len(shape) == 1 else 1  # where cross entropy looks for classes
    if len(shape) + input.at != expected or target.is_floating_point():
        return None
    if target.shape != (*shape[:expected], *shape[expected + 1 :]):
        return None
    return input.cross_entropy(
        target, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


# Functions of shapes, where the classes are the last dim


def _viewed(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sees the same elements in another shape."""

    def act(x: SlicedTensor, *args: Any, **kwargs: Any) -> SlicedTensor | None:
        shape, local = _tried(func, x, args, kwargs), local_of(x)
        fits = shape and shape[-1] == x.full_length and prod(shape)
        return x.like(local.reshape(*shape[:-1], local.shape[-1]), view=True) if fits else None

    return act


def _tried(func: Callable[..., Any], x: SlicedTensor, args: Any, kwargs: Any) -> torch.Size:
    """The shape that ``func`` gives to the whole; none where elements of another dtype are asked for."""
    if any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return torch.Size()
    return func(torch.empty(shape_of(x), device="meta"), *args, **kwargs).shape


def _indexed(x: SlicedTensor, index: Any) -> SlicedTensor | None:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, list) for i in index):
        return None
    taken = [i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in index if i is not None]
    taken = [0 if i is Ellipsis else n for i, n in zip([i for i in index if i is not None], taken, strict=True)]
    count, dims = sum(taken), x.dim()
    reaches = count == dims if Ellipsis not in index else bool(index) and index[-1] is not Ellipsis
    if reaches and not (isinstance(index[-1], slice) and index[-1] == slice(None)):
        return None
    if Ellipsis in index and not reaches and count >= dims:
        return None
    if any(isinstance(i, SlicedTensor) for i in index) or (index and index[-1] is None):
        return None
    return x.like(local_of(x)[index], view=True)


def _along(func: Callable[..., Any], default: int | None = None) -> Callable[..., Any]:
    """A function of one dim, where that is not the last."""

    def act(x: SlicedTensor, *args: Any, **kwargs: Any) -> Any:
        names = {"select": ("dim", "index"), "narrow": ("dim", "start", "length"), "index_select": ("dim", "index")}
        order = names.get(func.__name__, ("parts", "dim") if func.__name__ != "unbind" else ("dim",))
        given = dict(zip(order, args, strict=False)) | kwargs
        dim = given.get("dim", default)
        if not isinstance(dim, int) or dim % x.dim() == x.dim() - 1:
            return None
        made = func(local_of(x), *args, **kwargs)
        if isinstance(made, Tensor):
            return x.like(made, view=True)
        return tuple(x.like(part, view=True) for part in made)

    return act


SHAPES: dict[str, Callable[..., Any]] = {
    "view": _viewed(Tensor.view),
    "reshape": _viewed(Tensor.reshape),
    "flatten": _viewed(Tensor.flatten),
    "__getitem__": _indexed,
    "select": _along(torch.select),
    "narrow": _along(torch.narrow),
    "index_select": _along(torch.index_select),
    "chunk": _along(torch.chunk, 0),
    "split": _along(torch.split, 0),
    "unbind": _along(torch.unbind, 0),
}


def _keeps_shape(x: SlicedTensor, *args: Any, **kwargs: Any) -> bool:
    return _tried(Tensor.reshape, x, args, kwargs) == shape_of(x)


def _takes_all(x: SlicedTensor, index: Any) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    return all(i is Ellipsis or (isinstance(i, slice) and i in (slice(None), slice(0, None))) for i in index)


SAME: dict[str, Callable[..., bool]] = {"view": _keeps_shape, "reshape": _keeps_shape, "__getitem__": _takes_all}
"""Functions of shapes that may leave a tensor as it is."""


def _size(x: SlicedTensor, dim: int | None = None) -> Any:
    return shape_of(x) if dim is None else shape_of(x)[dim]


ANSWERS: dict[str, Callable[..., Any]] = {
    "shape": shape_of,
    "size": _size,
    "numel": lambda x: prod(shape_of(x)),
    "nelement": lambda x: prod(shape_of(x)),
    "__len__": lambda x: shape_of(x)[0],
    "stride": lambda x, *dim: torch.empty(shape_of(x), device="meta").stride(*dim),
    "__hash__": id,
    "__repr__": lambda x, **_: f"SlicedTensor({tuple(shape_of(x))}, rank {x.group.rank} of {x.group.size}, {x.dtype})",
}
"""What is asked of a slice and answered for the whole."""
