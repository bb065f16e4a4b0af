"""A tensor of which each rank has some positions, and which shows the shape of the whole.

A model's own code runs on pieces as it is: it reads whole shapes, and makes masks and positions for the whole. What
each function does to pieces is in tables by its name (``RULES``): most compute on the rank's own positions, and make
a piece again. Where a rule does not hold, and for whatever is in no table, the whole is gathered and the function
computed on it, by every rank alike: exact, differentiable, and the same as on one device; and noted in ``gathered``.

Nothing reads a piece by mistake: below the functions of torch it has no elements, and says so.
"""

import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.functional
import torch.nn.functional
from torch import Tensor

from meshfit.axes.context.span import SplitDim
from meshfit.axes.spec import Spec, SplitTensor, changes, name_of
from meshfit.comm.collectives import all_gather, start_all_gather
from meshfit.comm.group import Group
from meshfit.torch_private.autograd import watched_functions
from meshfit.torch_private.tensors import version, without_subclasses, wrapper_of
from meshfit.torch_private.trees import tree_leaves, tree_map

RULES: dict[str, Callable[..., Any]] = {}
"""By the name of a function: given it and its arguments, what it makes of pieces; NotImplemented: gather."""

OF_THE_WHOLE = set(
    """
shape size dim ndim ndimension numel nelement stride __len__ dtype device is_floating_point is_complex element_size
itemsize nbytes get_device layout names is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mkldnn is_mps
is_xpu is_signed is_conj is_neg is_inference is_same_size is_contiguous __hash__
""".split()  # noqa: SIM905
)
"""Asked of a piece, and answered for the whole."""

OF_THE_LOCAL = set(
    """
requires_grad grad_fn is_leaf register_hook retain_grad grad _version output_nr requires_grad_ _backward_hooks
retains_grad
""".split()  # noqa: SIM905
)


class Piece(SplitTensor):
    axis = "context"
    local: Tensor
    """What this rank has, which autograd knows: a plain tensor, or one that a tensor group has split again."""
    span: SplitDim
    known: tuple[Tensor, Tensor, int] | None
    """The whole, once it was gathered; of what, and of which version of that."""

    @staticmethod
    def __new__(cls, local: Tensor, span: SplitDim, group: Group) -> "Piece":
        shape = [span.size if dim == span.dim else size for dim, size in enumerate(local.shape)]
        out = wrapper_of(cls, shape, local)
        out.local, out.span, out.group, out.known = local, span, group, None
        return out

    @property
    def split_dim(self) -> int:
        return self.span.dim

    def to_local(self) -> tuple[Tensor, Spec | None]:
        return self.local, Spec(Piece, self.span)

    @classmethod
    def from_local(cls, local: Tensor, group: Group, how: SplitDim) -> "Piece":
        return Piece(local, how, group)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in OF_THE_WHOLE:
            with without_subclasses():
                return func(*args, **kwargs)
        if name in OF_THE_LOCAL or name == "__set__":
            if name == "__set__" and func.__self__.__name__ not in OF_THE_LOCAL:
                raise TypeError(f"{func.__self__.__name__} of a tensor that is cut over ranks cannot be set")
            return func(args[0].local, *args[1:], **kwargs)
        if name == "__repr__":
            return f"Piece({tuple(args[0].shape)}, rank {args[0].group.rank} of {args[0].group.size})"
        rule = RULES.get(name) if kwargs.get("out") is None else None
        if rule is not None:
            made = rule(func, *args, **kwargs)
            if made is not NotImplemented:
                return made
        elif (inside := opened(func)) is not None:
            return inside(*args, **kwargs)
        return on_wholes(func, name, args, kwargs)

    def whole(self) -> Tensor:
        """All positions, gathered from all ranks. All ranks call it together."""
        local = self.plain()
        if self.known is not None and self.known[1] is local and self.known[2] == version(local):
            known = self.known[0]
            if known.requires_grad or not (torch.is_grad_enabled() and local.requires_grad):
                return known
        made = gather(local, self.span, self.group)
        self.known = made, local, version(local)
        return made

    def plain(self) -> Tensor:
        """All of this rank's positions, also where a tensor group has split them again."""
        return self.local.whole() if isinstance(self.local, SplitTensor) else self.local

    def like(self, local: Tensor) -> "Piece":
        return Piece(local, self.span, self.group)

    def on_local(self, function: Callable[[Tensor], Tensor]) -> "Piece":
        return self.like(function(self.local))

    def as_subclass(self, cls: Any) -> Any:
        """Which torch asks nobody about: a whole."""
        return self.whole().as_subclass(cls)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} was called on a tensor that is cut over ranks, past the functions of torch")


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``RULES``."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return put


def gather(x: Tensor, span: SplitDim, group: Group) -> Tensor:
    """The whole of which ``x`` is this rank's part. Every rank goes backward from its part of the loss, 1/n of it: the
    gradient of a tensor that all ranks hold is then the sum over the ranks, whatever each does with its copy."""
    dim, x = _apart(x, span, group)
    made = all_gather(x, dim, span.counts, group, span.places if span.zigzag else ())
    return made if span.plain else made.flatten(span.dim, span.dim + 2)


def start_gather(x: Tensor, span: SplitDim, group: Group) -> Callable[[], Tensor]:
    """The same, in the background and without a derivative: what is returned waits for it."""
    dim, x = _apart(x, span, group)
    arrived = start_all_gather(x, group, dim, span.counts, span.places if span.zigzag else ())
    return arrived if span.plain else lambda: arrived().flatten(span.dim, span.dim + 2)


def _apart(x: Tensor, span: SplitDim, group: Group) -> tuple[int, Tensor]:
    """The dim of positions alone, and ``x`` with that."""
    if span.plain:
        return span.dim, x
    return span.dim + 1, x.unflatten(span.dim, (span.outer, span.counts[group.rank], span.inner))


gathered: Counter[str] = Counter()
"""Functions that were computed on wholes, and how often."""

attended: Counter[str] = Counter()
"""How attention was computed, and how often: by "gather" or "ulysses"; of the first, "causal". And "carried": recurrent
layers, which need positions in order."""


def on_wholes(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """``func`` as on one device; a piece that it changes in place takes over what became of it."""
    gathered[name] += 1
    target = args[0] if args and isinstance(args[0], Piece) else kwargs.get("out")
    if not isinstance(target, Piece) or not (changes(name) or kwargs.get("out") is not None):
        return func(*wholes(args), **wholes(kwargs))
    fresh = target.whole().clone()
    swap = lambda x: fresh if x is target else x.whole() if isinstance(x, Piece) else x
    func(*tree_map(swap, args), **tree_map(swap, kwargs))
    if fresh.shape != target.shape:
        raise TypeError(f"{name} gave a tensor that is cut over ranks another shape in place")
    target.local.copy_(target.span.of(fresh, target.group.rank))
    return target


def wholes(tree: Any) -> Any:
    return tree_map(lambda x: x.whole() if isinstance(x, Piece) else x, tree)


def pieces(tree: Any) -> list[Piece]:
    return [x for x in tree_leaves(tree) if isinstance(x, Piece)]


# torch's functions that are written in Python run as they are: what they call is met in turn

_SEEN_THROUGH = dict.fromkeys(
    ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
)
_opened: dict[Any, Any] = {}


def opened(func: Any) -> Any:
    """The same function, which does not ask whether its arguments are ordinary tensors; None if it is not Python's."""
    homes = torch.nn.functional.__dict__, torch.functional.__dict__
    if not isinstance(func, types.FunctionType) or not any(func.__globals__ is home for home in homes):
        return None
    if func not in _opened:
        inside = types.FunctionType(
            func.__code__, {**func.__globals__, **_SEEN_THROUGH}, func.__name__, func.__defaults__, func.__closure__
        )
        inside.__kwdefaults__ = func.__kwdefaults__
        _opened[func] = inside
    return _opened[func]


@contextmanager
def guarded() -> Iterator[None]:
    """Around whatever runs a model on pieces: an ``autograd.Function`` is given wholes. What it does inside is not
    known, and gradients of pieces would pass it by."""

    def applied(cls: Any, apply: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if any(isinstance(x, Piece) for x in args):
            gathered[cls.__name__] += 1
            args = tuple(x.whole() if isinstance(x, Piece) else x for x in args)
        return apply(*args, **kwargs)

    with watched_functions(applied, everywhere=True):
        yield
