"""Functions that put dims elsewhere, see them as others, or take some of the positions."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.context.local import aligned, argument, mapped
from meshfit.axes.context.piece import Piece, pieces, rule
from meshfit.axes.spec import name_of
from meshfit.comm.collectives import all_reduce
from meshfit.torch_private.trees import tree_map


def _tried(func: Any, sizes: Any, args: Any, kwargs: Any) -> torch.Size:
    """What ``func`` makes of a shape."""
    args, kwargs = tree_map(
        lambda x: torch.empty(x.shape, device="meta") if isinstance(x, Tensor) else x, (args, kwargs)
    )
    return func(torch.empty(sizes, device="meta"), *args, **kwargs).shape


@rule("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "H", "mH", "adjoint")
def moved(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Dims are told apart by their sizes."""
    sizes = [1 if size == 1 and dim != x.span.dim else 2 * dim + 3 for dim, size in enumerate(x.shape)]
    tried = _tried(func, sizes, args, kwargs)
    return Piece(func(x.local, *args, **kwargs), x.span.at(list(tried).index(sizes[x.span.dim])), x.group)


@rule("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "squeeze", "unsqueeze")
def viewed(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Piece):
        return _like(func, x, *args)
    if any(isinstance(arg, torch.dtype) for arg in args) or not x.numel():
        return NotImplemented
    shape = _tried(func, x.shape, args, kwargs)
    span = x.span.through(tuple(x.shape), tuple(shape))
    if span is None:
        return NotImplemented
    return Piece(x.local.reshape(span.local(tuple(shape), x.group.rank)), span, x.group)


def _like(func: Any, x: Tensor, other: Any = None, *args: Any) -> Any:
    """A whole, given the shape of a piece."""
    name = name_of(func)
    as_piece = name.endswith("_as") and isinstance(other, Piece) and not args
    return getattr(x, name.removesuffix("_as"))(other.shape) if as_piece else NotImplemented


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def spread(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Piece):
        return _like(func, x, *args)
    shape = tuple(_tried(func, x.shape, args, kwargs))
    span = x.span.at(x.span.dim + len(shape) - x.dim())
    if shape[span.dim] != span.size:
        return NotImplemented
    own = span.local(shape, x.group.rank)
    if name_of(func) in ("repeat", "tile"):
        padded = (1,) * (len(shape) - x.dim()) + tuple(x.shape)
        times = [size // old for size, old in zip(shape, padded, strict=True)]
        return Piece(x.local.repeat(times), span, x.group)
    return Piece(x.local.expand(own), span, x.group)


PARTS = ("chunk", "split", "tensor_split", "split_with_sizes")


@rule("repeat_interleave", "index_select", "roll", "flip", "narrow", *PARTS)
def other_dim(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Along a dim that is not cut; of one that is, ranges."""
    name = name_of(func)
    place = 0 if name in ("index_select", "narrow", "flip") else 1
    dim = argument(args, kwargs, place, "dims" if name in ("roll", "flip") else "dim", 0 if name in PARTS else None)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if not isinstance(x, Piece) or not isinstance(dim, int) or pieces((args, kwargs)):
        return NotImplemented
    if dim % x.dim() != x.span.dim:
        return mapped(func(x.local, *args, **kwargs), x.span, x.group)
    if name not in (*PARTS, "narrow"):
        return NotImplemented
    args = tuple(0 if i == place else arg for i, arg in enumerate(args))
    marks = func(torch.arange(x.shape[dim]), *args, **{key: 0 if key == "dim" else arg for key, arg in kwargs.items()})
    ranges = [(int(m[0]), int(m[-1]) + 1) if len(m) else (0, 0) for m in ([marks] if name == "narrow" else marks)]
    found = [some_of(x, start, stop) for start, stop in ranges]
    if any(one is None for one in found):
        return NotImplemented
    return found[0] if name == "narrow" else tuple(found)


def some_of(x: Piece, start: int, stop: int) -> Piece | None:
    """Positions ``start`` to ``stop``; None where a rank would have none of them."""
    ends = tuple(min(max(end, start), stop) - start for end in x.span.ends)
    span, rank = replace(x.span, ends=ends), x.group.rank
    if not x.span.plain or min(span.counts) < 1:
        return None
    skipped = sum(min(max(start - begin, 0), end - begin) for begin, end in x.span.chunks(rank))
    return Piece(x.local.narrow(x.span.dim, skipped, span.counts[rank]), span, x.group)


def one_of(x: Piece, at: int) -> Tensor:
    """One position, sent to all by the rank that has it."""
    span, places, before = x.span, [], 0
    for start, stop in span.chunks(x.group.rank):
        places += [before + at - start] if start <= at < stop else []
        before += stop - start
    own = x.local.select(span.dim, places[0] if places else 0)
    term = torch.where(own.new_full((), bool(places), dtype=torch.bool), own, own.new_zeros(()))
    return all_reduce(term, x.group)


@rule("select", "unbind")
def taken(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    dim = argument(args, kwargs, 0, "dim", 0)
    if not isinstance(x, Piece) or not isinstance(dim, int) or pieces((args, kwargs)):
        return NotImplemented
    dim %= x.dim()
    if dim != x.span.dim:
        return mapped(func(x.local, *args, **kwargs), x.span.at(x.span.dim - (dim < x.span.dim)), x.group)
    at = argument(args, kwargs, 1, "index")
    return (
        one_of(x, at % x.shape[dim])
        if isinstance(at, int) and x.span.plain and x.is_floating_point()
        else NotImplemented
    )


@rule("__iter__")
def each(func: Any, x: Piece) -> Any:
    return iter(x.unbind(0))


@rule("__getitem__")
def indexed(func: Any, x: Any, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Piece) or any(not _simple(i) for i in index):
        return NotImplemented
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    at = next((place for place, i in enumerate(index) if i is Ellipsis), len(index))
    index = [*index[:at], *[slice(None)] * (x.dim() - used), *index[at + 1 :]]
    dim = made = 0  # of the piece, of what is made
    for place, i in enumerate(index):
        if i is None:
            made += 1
            continue
        if dim == x.span.dim:
            return _at_span(x, index, place, made)
        made += isinstance(i, slice)
        dim += 1
    return NotImplemented


def _simple(i: Any) -> bool:
    return i is None or i is Ellipsis or isinstance(i, slice) or (isinstance(i, int) and not isinstance(i, bool))


def _at_span(x: Piece, index: list[Any], place: int, made: int) -> Any:
    """``index`` of a piece, of whose cut dim it takes what stands at ``place``; ``made``: where that dim will be."""
    taken, rest = index[place], (*index[:place], slice(None), *index[place + 1 :])
    if isinstance(taken, int):
        if not x.span.plain or not x.is_floating_point():
            return NotImplemented
        return one_of(Piece(x.local[rest], x.span.at(made), x.group), taken % x.shape[x.span.dim])
    start, stop, step = taken.indices(x.shape[x.span.dim])
    if step != 1:
        return NotImplemented
    if (start, stop) != (0, x.span.size):
        part = some_of(x, start, stop)
        if part is None:
            return NotImplemented
        x = part
    return Piece(x.local[rest], x.span.at(made), x.group)


@rule("cat", "concat", "concatenate")
def joined(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    tensors = [x for x in tensors if x.dim() != 1 or x.shape[0]]  # torch leaves out those without elements
    if len(tensors) == 1 and not kwargs:
        return tensors[0].clone()
    if kwargs or len({x.dim() for x in tensors}) > 1:
        return NotImplemented
    first = pieces(tensors)[0]
    if dim % first.dim() == first.span.dim:
        return NotImplemented
    found = aligned(tensors)
    return NotImplemented if found is None else Piece(func(found[2], dim), first.span, first.group)


@rule("stack")
def stacked(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    first, found = pieces(tensors)[0], aligned(list(tensors))
    if found is None or kwargs:
        return NotImplemented
    at = dim % (first.dim() + 1)
    return Piece(func(found[2], dim), first.span.at(first.span.dim + (at <= first.span.dim)), first.group)
