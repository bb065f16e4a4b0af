"""Functions in which positions meet: products, sums over positions, losses. Attention is in attend.py."""

import inspect
from math import prod
from typing import Any

import torch

from meshfit.axes.context.local import argument, mapped, pointwise
from meshfit.axes.context.piece import Piece, pieces, rule, wholes
from meshfit.axes.context.saved import noted
from meshfit.axes.spec import name_of
from meshfit.axes.tensor.functions import loss_denominator
from meshfit.comm.collectives import all_reduce

# Products


@rule("matmul", "bmm", "mm", "__matmul__")
def product(func: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs or a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    dims = max(a.dim(), b.dim())
    at_a, at_b = (x.span.dim - x.dim() if isinstance(x, Piece) else 0 for x in (a, b))
    if isinstance(a, Piece) and isinstance(b, Piece) and (at_a, at_b) == (-1, -2) and _alike(a, b):
        return all_reduce(func(a.local, b.local), a.group)  # each rank has some of the terms
    if at_a == -2:  # rows: of what they meet, all
        with noted(b):
            return Piece(func(a.local, wholes(b)), a.span.at(dims - 2), a.group)
    if at_b == -1 and not isinstance(a, Piece):
        return Piece(func(a, b.local), b.span.at(dims - 1), b.group)
    if at_a == -1 or at_b in (-1, -2):
        return NotImplemented
    return _batched(func, a, b, dims)


def _alike(a: Piece, b: Piece) -> bool:
    return a.span.at(0) == b.span.at(0)


def _batched(func: Any, a: Any, b: Any, dims: int) -> Any:
    """Cut along a dim in front of the matrices."""
    first = pieces((a, b))[0]
    span = first.span.at(first.span.dim + dims - first.dim())
    if span.dim >= dims - 2:
        return NotImplemented
    given = []
    for x in (a, b):
        at = span.dim - dims + x.dim()
        if isinstance(x, Piece) and x.span == span.at(at):
            given.append(x.local)
            continue
        x = wholes(x)
        given.append(x if at < 0 or x.shape[at] == 1 else span.at(at).of(x, first.group.rank))
    return Piece(func(*given), span, first.group)


@rule("addmm")
def added_product(func: Any, bias: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if not isinstance(a, Piece) or a.span.dim or pieces((bias, b)) or (bias.dim() > 1 and bias.shape[0] > 1):
        return NotImplemented
    return Piece(func(bias, a.local, b, **kwargs), a.span, a.group)


@rule("einsum")
def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    terms, _, out = equation.replace(" ", "").partition("->")
    named = list(zip(terms.split(","), operands, strict=True))
    first = next(x for _, x in named if isinstance(x, Piece))
    letter = {term[x.span.dim] for term, x in named if x is first}.pop()
    given, shared = [], 0
    for term, x in named:
        own = term.count(letter) == 1
        if term.count(letter) > 1:
            return NotImplemented
        if isinstance(x, Piece) and own and x.span == first.span.at(term.index(letter)):
            given.append(x.local)
        else:
            x = wholes(x)
            given.append(first.span.at(term.index(letter)).of(x, first.group.rank) if own else x)
        shared += own
    made = func(equation, *given)
    if letter in out:
        return Piece(made, first.span.at(out.index(letter)), first.group)
    return all_reduce(made, first.group)


# Sums


REDUCTIONS = """
sum mean amax amin logsumexp any all prod var std var_mean std_mean count_nonzero norm max min argmax argmin median
nansum
""".split()  # noqa: SIM905


@rule(*REDUCTIONS)
def reduced(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    name = name_of(func)
    place = 1 if name == "norm" else 0
    dims = argument(args, kwargs, place, "dim", kwargs.get("axis"))
    if not isinstance(x, Piece) or pieces((args, kwargs)):
        return NotImplemented
    dims = [dims] if type(dims) is int else range(x.dim()) if dims is None else dims
    if not isinstance(dims, tuple | list | range):
        return NotImplemented
    some = [dim % x.dim() for dim in dims] or list(range(x.dim()))
    keep = bool(kwargs.get("keepdim", kwargs.get("keepdims", _keeps(name, args))))
    if x.span.dim not in some:
        at = x.span.dim if keep else x.span.dim - sum(dim < x.span.dim for dim in some)
        return mapped(func(x.local, *args, **kwargs), x.span.at(at), x.group)
    if name not in ("sum", "mean") or len(args) > 2 or x.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        return NotImplemented
    dtype = kwargs.get("dtype") or x.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else kwargs.get("dtype")
    made = all_reduce(torch.sum(x.local, some, keepdim=keep, dtype=wide), x.group)
    made = made / prod(x.shape[dim] for dim in some) if name == "mean" else made
    return made if wide is kwargs.get("dtype") else made.to(dtype)


def _keeps(name: str, args: tuple) -> bool:
    """keepdim, given by place."""
    place = {"norm": 2, "prod": 1, "var": 2, "std": 2}.get(name, 1)
    return len(args) > place and args[place] is True


# Losses


@rule("cross_entropy", "nll_loss")
def by_classes(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The sum over a rank's targets, added over ranks; a mean is over the targets of all."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    x, target, weight = given.pop("input"), given.pop("target"), given.get("weight")
    reduction, ignore = given.pop("reduction", "mean"), given.get("ignore_index", -100)
    old = given.pop("size_average", None), given.pop("reduce", None)
    classes = 0 if x.dim() == 1 else 1
    if not isinstance(x, Piece) or x.span.dim == classes or old != (None, None) or isinstance(weight, Piece):
        return NotImplemented
    soft = target.is_floating_point()
    span = x.span if soft else x.span.at(x.span.dim - (x.span.dim > classes))
    own = target.local if isinstance(target, Piece) and target.span == span else span.of(wholes(target), x.group.rank)
    if reduction == "none":
        return Piece(func(x.local, own, reduction="none", **given), span, x.group)
    made = all_reduce(func(x.local, own, reduction="sum", **given), x.group)
    if reduction == "sum":
        return made
    target = wholes(target)
    return made / (target.numel() // target.shape[classes] if soft else loss_denominator(target, weight, ignore))


LOSSES = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
soft_margin_loss poisson_nll_loss
""".split()  # noqa: SIM905


@rule(*LOSSES)
def by_elements(func: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    reduction = given.pop("reduction", "mean")
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NotImplemented
    if reduction not in ("mean", "sum", "none", "batchmean"):
        return NotImplemented
    made = pointwise(func, reduction="none", **given)
    if made is NotImplemented or reduction == "none":
        return made
    return made.mean() if reduction == "mean" else made.sum() if reduction == "sum" else made.sum() / made.shape[0]
