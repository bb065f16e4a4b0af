"""Attention between positions that lie on different ranks, in one of two ways.

    gather    a rank's queries meet the keys and values of all positions, gathered for that. Under zigzag chunks causal
              attention gives all ranks the same work
    ulysses   ranks exchange positions for heads (all-to-all): each computes some heads on all positions, as one device
              would, and the results go back

    elements on the wire, forward and backward, of h query heads and kv key heads, sequences of s over n ranks
    gather    6 kv s (n-1)/n        gathered, gathered again, gradients scattered; each of keys and values
    ulysses   4 (h + kv) s (n-1)/n^2

``auto`` takes ulysses where heads divide and fewer bytes travel; with a mask that is given as a tensor it gathers,
since under ulysses every rank would need the mask of all positions.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from meshfit.axes.context.causal import causal_in_parts
from meshfit.axes.context.piece import Piece, attended, rule, wholes
from meshfit.axes.context.saved import noted
from meshfit.axes.context.span import SplitDim
from meshfit.axes.tensor.functions import in_autocast
from meshfit.comm.collectives import all_to_all
from meshfit.comm.draws import own_draws
from meshfit.comm.group import Group


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
    if (
        not isinstance(q, Piece)
        or q.span.dim != q.dim() - 2
        or not q.span.plain
        or (is_causal and attn_mask is not None)
    ):
        return NotImplemented
    how = "ulysses" if _by_heads(q, k, v, attn_mask, kwargs.get("enable_gqa", False)) else "gather"
    attended[how] += 1
    call = partial(func, dropout_p=dropout_p, **kwargs)
    with own_draws(q.group, q.device) if dropout_p else nullcontext():
        made = (_on_heads if how == "ulysses" else _on_own_queries)(call, q, k, v, attn_mask, is_causal)
    return Piece(made, q.span.at(made.dim() - 2), q.group)


# Own queries, gathered keys


def _on_own_queries(call: Any, q: Piece, k: Any, v: Any, mask: Any, is_causal: bool) -> Tensor:
    attended["causal"] += is_causal
    if is_causal and all(isinstance(x, Piece) and x.span.at(0) == q.span.at(0) for x in (k, v)):
        own_q, own_k, own_v = (in_autocast(x.plain()) for x in (q, k, v))
        made = causal_in_parts(own_q, own_k, own_v, q.span, q.group, call.keywords)
        if made is not None:
            return made
    keys, (k, v) = (k, v), wholes((k, v))
    with noted(*keys) as saving:
        if is_causal:
            return saving.along_positions(_causal(call, q.plain(), k, v, q.span.chunks(q.group.rank)))
        return call(q.plain(), k, v, attn_mask=None if mask is None else _rows(mask, q.span, q.group.rank))


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
            from torch.nn.attention.bias import causal_lower_right  # which imports torch's compiler

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


# Own heads, all positions


def _by_heads(q: Piece, k: Any, v: Any, mask: Any, grouped: bool) -> bool:
    """Whether heads divide, and exchanging them is what the plan says or costs less."""
    n, given = q.group.size, [x for x in (k, v) if isinstance(x, Piece)]
    if q.span.attention == "gather" or q.dim() < 3 or any(x.dim() != q.dim() for x in (k, v)):
        return False
    heads = [x.shape[-3] for x in (q, k, v)]
    alike = k.shape[:-3] == q.shape[:-3] == v.shape[:-3] and heads[1] == heads[2] and (grouped or heads[0] == heads[1])
    if not alike or any(h % n for h in heads) or any(x.span.dim != x.dim() - 2 or not x.span.plain for x in given):
        return False
    if q.span.attention == "ulysses":
        return True
    keys = sum(x.numel() for x in given)
    result = q.numel() // q.shape[-1] * v.shape[-1]
    return mask is None and 2 * (q.numel() + keys + result) <= 3 * keys * n


def _on_heads(call: Any, q: Piece, k: Any, v: Any, mask: Any, is_causal: bool) -> Tensor:
    group = q.group
    own = dict(zip(map(id, (q, k, v)), _heads_of((q, k, v), group), strict=True))
    if mask is not None:
        mask = wholes(mask)
        mask = mask if mask.dim() < 3 or mask.shape[-3] == 1 else mask.chunk(group.size, -3)[group.rank]
    made = call(own[id(q)], own[id(k)], own[id(v)], attn_mask=mask, is_causal=is_causal)
    return _positions_of(made, q.span, group)


def _heads_of(tensors: tuple[Any, ...], group: Group) -> list[Tensor]:
    """This rank's heads of all positions, of each tensor [..., heads, positions, channels]. Pieces are exchanged in one
    all-to-all; what is whole is there already."""
    n = group.size
    given = list({id(x): x for x in tensors if isinstance(x, Piece)}.values())
    rows = torch.cat([x.plain().unflatten(-3, (n, -1)).movedim(-4, 0).flatten(1) for x in given], 1).view(-1)
    shapes = [[(*x.shape[:-3], x.shape[-3] // n, count, x.shape[-1]) for count in x.span.counts] for x in given]
    sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    taken = [sum(each) for each in zip(*sizes, strict=True)]
    found = all_to_all(rows, [taken[group.rank]] * n, taken, group, rows)
    parts = found.split([size for rank in range(n) for size in (each[rank] for each in sizes)])
    made: dict[int, Tensor] = {}
    for place, x in enumerate(given):
        of_rank = [parts[rank * len(given) + place].view(shapes[place][rank]) for rank in range(n)]
        chunks = [of_rank[rank].narrow(-2, start, count) for rank, start, count in x.span.places]
        made[id(x)] = torch.cat(chunks, -2)
    return [made[id(x)] if isinstance(x, Piece) else x.chunk(n, -3)[group.rank] for x in tensors]


def _positions_of(x: Tensor, span: SplitDim, group: Group) -> Tensor:
    """All heads of this rank's positions, of [..., own heads, all positions, channels]. In memory the heads of a
    position are neighbours, as kernels leave them."""
    n, at = group.size, span.at(x.dim() - 2)
    shapes = [at.local(tuple(x.shape), rank) for rank in range(n)]
    rows = torch.cat([at.of(x, rank).reshape(-1) for rank in range(n)])
    sent = [torch.Size(shape).numel() for shape in shapes]
    found = all_to_all(rows, sent, [sent[group.rank]] * n, group, rows)
    every = found.view(n, *shapes[group.rank])  # [ranks, ..., heads, positions, channels]
    by_position = every.movedim(0, -4).movedim(-2, -4)  # [..., positions, ranks, heads, channels]
    return by_position.flatten(-3, -2).transpose(-2, -3)
