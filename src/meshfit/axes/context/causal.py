"""Causal attention of a rank's queries with gathered keys, in parts of which none needs a mask.

A rank's positions are in order, so its own queries and keys are a causal square like those of one device. Of the other
positions, whole ranges come before a chunk:

    own       all its queries with its own keys, causal: while the keys and values of others are on their way
    before    all its queries with what lies before its first chunk
    between   its second chunk's queries with what lies between the two

Each is computed by the kernel that torch would take on one device; parts are put together by the log-sum-exps of their
scores, as FlashAttention does block by block. Backward takes each part with the result and log-sum-exps of all: first
those of other ranks' keys, whose gradients are then on their way while it computes its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshfit.axes.context.piece import Piece
from meshfit.axes.context.saved import Saving, noted
from meshfit.axes.context.span import SplitDim
from meshfit.comm import collectives
from meshfit.comm.group import Group
from meshfit.torch_private.kernels import AttentionKernel, attention_kernel

Range = tuple[int, int]
"""Where it begins, and its length."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    kernel: AttentionKernel
    span: SplitDim
    group: Group
    saving: Saving

    @property
    def others(self) -> list[tuple[Range, Range]]:
        """Queries of this rank, and positions of other ranks that all of them see."""
        chunks, total = self.span.chunks(self.group.rank), self.span.counts[self.group.rank]
        first, last = chunks[0], chunks[-1]
        found = [((0, total), (0, first[0]))]
        if len(chunks) == 2:
            skipped = first[1] - first[0]
            found.append(((skipped, total - skipped), (first[1], last[0] - first[1])))
        return [(rows, keys) for rows, keys in found if rows[1] and keys[1]]


def causal_in_parts(q: Tensor, k: Tensor, v: Tensor, span: SplitDim, group: Group, given: dict[str, Any]) -> Any:
    """Of this rank's queries, keys and values, [samples, heads, positions, channels]; None where no kernel of torch's
    computes such parts."""
    if q.dim() != 4 or given["dropout_p"] or len({x.dtype for x in (q, k, v)}) > 1:
        return None
    if k.shape[:-1] != v.shape[:-1] or len({x.shape[0] for x in (q, k)}) > 1 or q.shape[-2] != k.shape[-2]:
        return None
    kernel = attention_kernel(q, k, v, scale=given.get("scale"), grouped=given.get("enable_gqa", False))
    if kernel is None:
        return None
    with noted(later=True) as saving:
        return CausalParts.apply(q, k, v, _Gathered(kernel, span.at(2), group, saving))


class CausalParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Gathered) -> Tensor:
        arriving = [call.saving.gather(Piece(x, call.span, call.group)) for x in (k, v)]
        out, total, state = call.kernel.forward(q, k, v, causal=True)
        every, states, dtype = [arrived() for arrived in arriving], [state], out.dtype
        if call.others:
            out = out.to(torch.promote_types(dtype, torch.float32))
        for rows, keys in call.others:
            seen = [x.narrow(-2, *keys) for x in every]
            part, part_total, state = call.kernel.forward(q.narrow(-2, *rows), *seen, causal=False)
            states.append(state)
            _add(out.narrow(-2, *rows), total.narrow(-2, *rows), part, part_total)
        out = out.to(dtype)
        ctx.call, ctx.states = call, states
        ctx.save_for_backward(q, out, total, *every)  # of the last two a rank keeps its own: see saved.py
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, out, total, *every = ctx.saved_tensors
        call: _Gathered = ctx.call
        k, v = (call.span.of(x, call.group.rank) for x in every)
        (own_state, *states), backward = ctx.states, call.kernel.backward
        to_others = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in every]
        of_rows = []
        for (rows, keys), state in zip(call.others, states, strict=True):
            seen_k, seen_v = (x.narrow(-2, *keys) for x in every)
            of_out, own, made, sums = (x.narrow(-2, *rows) for x in (grad, q, out, total))
            of_q, *of_keys = backward(of_out, own, seen_k, seen_v, made, sums, state, causal=False)
            of_rows.append((rows, of_q))
            for held, part in zip(to_others, of_keys, strict=True):
                held.narrow(-2, *keys).copy_(part)
        del every
        span, places = call.span, (call.span.places,) if call.span.zigzag else ()
        sent = [collectives.start("reduce_scatter", x, call.group, span.dim, span.counts, *places) for x in to_others]
        of_q, *own = backward(grad, q, k, v, out, total, own_state, causal=True)
        if of_rows:
            wide = of_q.to(torch.promote_types(of_q.dtype, torch.float32))
            for rows, part in of_rows:
                wide.narrow(-2, *rows).add_(part)
            of_q = wide.to(of_q.dtype)
        of_keys = []
        for mine, (others, wait) in zip(own, sent, strict=True):
            wait()
            of_keys.append(mine + others)
        return of_q, *of_keys, None


def _add(out: Tensor, total: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Put ``part`` to ``out``, and its log-sum-exps to ``total``; in place."""
    both = torch.logaddexp(total, part_total)
    out.mul_((total - both).exp()).add_(part * (part_total - both).exp())
    total.copy_(both)
