"""Functions in which positions meet: products, attention, sums over positions, losses."""

import inspect
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from meshfit.axes.context.local import argument, mapped, pointwise
from meshfit.axes.context.piece import Piece, attended, pieces, rule, wholes
from meshfit.axes.context.saved import noted
from meshfit.axes.context.span import SplitDim
from meshfit.axes.spec import name_of
from meshfit.comm.collectives import all_reduce
from meshfit.comm.draws import own_draws

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


# Attention


@rule("scaled_dot_product_attention")
def attention(
    func: Any,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """A rank's queries meet the keys and values of all positions; of a causal one, of those up to its own."""
    if (
        not isinstance(q, Piece)
        or q.span.dim != q.dim() - 2
        or not q.span.plain
        or (is_causal and attn_mask is not None)
    ):
        return NotImplemented
    span, group = q.span, q.group
    keys, (k, v) = (k, v), wholes((k, v))
    call = partial(func, dropout_p=dropout_p, **kwargs)
    with noted(*keys) as joined, own_draws(group, q.device) if dropout_p else nullcontext():
        if is_causal:
            attended["causal"] += 1
            made = joined.along_positions(_causal(call, q.local, k, v, span.chunks(group.rank)))
        else:
            made = call(q.local, k, v, attn_mask=None if attn_mask is None else _rows(attn_mask, span, group.rank))
    return Piece(made, span.at(made.dim() - 2), group)


def _causal(call: Any, q: Tensor, k: Tensor, v: Tensor, chunks: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Each chunk of the queries meets the keys up to its own end: no more is computed, and no mask is needed for which
    torch would have to leave FlashAttention."""
    made, length = [], k.shape[-2]
    for (start, stop), own in zip(chunks, q.split([stop - start for start, stop in chunks], -2), strict=True):
        if start == stop:
            continue
        k_own, v_own = (x.narrow(-2, 0, min(stop, length)) for x in (k, v))
        if start == 0:
            made.append(call(own, k_own, v_own, is_causal=True))
        else:
            made.append(call(own, k_own, v_own, attn_mask=_after(start, own, k_own, v_own, call.keywords)))
    return made


def _after(start: int, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    """The causal mask of queries that begin at ``start``: in words, where a kernel of the GPU knows them."""
    if q.is_cuda and k.shape[-2] == start + q.shape[-2]:
        params = SDPAParams(q, k, v, None, given["dropout_p"], False, given.get("enable_gqa", False))
        if can_use_flash_attention(params) or can_use_efficient_attention(params):
            return causal_lower_right(q.shape[-2], k.shape[-2])
    rows = torch.arange(start, start + q.shape[-2], device=q.device)
    return rows[:, None] >= torch.arange(k.shape[-2], device=q.device)


def _rows(mask: Tensor, span: SplitDim, rank: int) -> Tensor:
    """Of a mask by queries and keys, this rank's queries."""
    if isinstance(mask, Piece):
        if mask.span == span.at(mask.dim() - 2):
            return mask.local
        mask = mask.whole()
    return mask if mask.dim() < 2 or mask.shape[-2] == 1 else span.at(mask.dim() - 2).of(mask, rank)


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
    if soft:
        return made / (target.numel() // target.shape[classes])
    kept = target != ignore
    return made / (kept.sum() if weight is None else (weight[target.clamp(min=0)] * kept).sum())


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
