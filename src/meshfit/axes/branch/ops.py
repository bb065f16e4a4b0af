"""Where the ranks of a branch group part, and where they meet; and the derivatives.

    enter    values as they are; backward sums their gradients over the ranks, each of which used them for its own
    join     each rank's values to all; backward is the gradient as it is: from there on all ranks compute alike

A *token* of no value goes through all of them in turn and ends in the result: so backward comes to each of them on
every rank, in one order, whether or not the rank's own branch leads there.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.axes.spec import from_local, locals_of, to_local
from meshfit.comm.group import Group, RankGroup
from meshfit.comm.objects import all_gather_object
from meshfit.comm.transport import Layout, packed, packed_size, unpacked
from meshfit.errors import JobError
from meshfit.events import current
from meshfit.transfer import upload

Layouts = tuple[tuple[Layout, ...], ...]
"""Of what each rank hands to all."""


class Line:
    """The ranks of a branch group, and when the own work of this one began in backward. ``groups``: by axis, the ranks
    over which tensors are split; all have the same place in the branch group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, groups: Mapping[str, Group]):
        self.ranks, self.device, self.groups, self.began = RankGroup(group), device, groups, None
        self.memory = device if "nccl" in dist.get_backend(group) else torch.device("cpu")

    def agree(self, mine: Sequence[Tensor]) -> Layouts:
        """What all ranks have to hand out: what autocast makes of it shows only when it runs."""
        return tuple(all_gather_object(locals_of(mine)[1], self.ranks.group))

    def hand_out(self, mine: Sequence[Tensor], layouts: Layouts) -> list[list[Tensor]]:
        """What each rank has, on all; this rank's own is left out."""
        buffers = [
            packed(mine).to(self.memory)
            if rank == self.ranks.rank
            else torch.empty(packed_size(theirs), dtype=torch.uint8, device=self.memory)
            for rank, theirs in enumerate(layouts)
        ]
        self.ranks.broadcast_(buffers)
        return [
            [] if rank == self.ranks.rank else unpacked(buffer.to(self.device), layouts[rank])
            for rank, buffer in enumerate(buffers)
        ]

    def sum(
        self, grads: Sequence[Tensor | None], like: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[Tensor | None]:
        """Over the ranks, one call a dtype; None where no rank has any."""
        found: list[Tensor | None] = list(grads)
        for dtype in dict.fromkeys(kind for _, kind in like):
            some = [i for i, (_, kind) in enumerate(like) if kind == dtype]
            parts = [_flat(grads[i], *like[i], self.device) for i in some]
            reached = upload([grads[i] is not None for i in some], self.device, dtype)
            flat = self.ranks.all_reduce_(torch.cat([*parts, reached]))
            *sums, reached = flat.split([*(part.numel() for part in parts), len(some)])
            missing = any(grads[i] is None for i in some)  # then the host waits: nobody may have it
            for i, total, there in zip(some, sums, reached.tolist() if missing else [1.0] * len(some), strict=True):
                found[i] = total.view(like[i][0]) if there else None
        return found


def _flat(grad: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape.numel(), dtype=dtype, device=device) if grad is None else grad.to(dtype).reshape(-1)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, token: Tensor, copies: Sequence[bool], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.line, ctx.like = line, [(value.shape, value.dtype) for value in values]
        ctx.set_materialize_grads(False)
        return token.clone(), *(v.clone() if copy else v.view_as(v) for v, copy in zip(values, copies, strict=True))

    @staticmethod
    def backward(ctx: Any, of_token: Tensor, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        line, events = ctx.line, current()
        if line.began is not None:
            events.between("branch", line.began, events.mark())
            line.began = None
        with events.span("join"):
            summed = line.sum(grads, ctx.like) if grads else []
        return None, of_token, None, *summed


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, line: Line, layouts: Layouts, copies: Sequence[bool], token: Tensor, *mine: Tensor
    ) -> tuple[Tensor, ...]:
        every = line.hand_out(mine, layouts)
        every[line.ranks.rank] = [t.view_as(t) for t in mine]
        flat = [t.clone() if copy else t for t, copy in zip(chain(*every), copies, strict=True)]
        fixed = [t for t, kind in zip(flat, chain(*layouts), strict=True) if not kind.needs_grad]
        ctx.line, ctx.start, ctx.count = line, sum(map(len, layouts[: line.ranks.rank])), len(mine)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fixed)
        return token.clone(), *flat

    @staticmethod
    def backward(ctx: Any, of_token: Tensor, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.line.began = current().mark()
        return None, None, None, of_token, *grads[ctx.start : ctx.start + ctx.count]


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, token: Tensor) -> Tensor:
        ctx.like = token
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.zeros_like(ctx.like)


def enter(line: Line, token: Tensor, values: Sequence[Tensor], copies: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
    """``copies`` says which of the values the rank's own work will change in place."""
    values, layouts = locals_of(values)
    plain = [v.clone() if copy and not v.requires_grad else v for v, copy in zip(values, copies, strict=True)]
    some = [i for i, value in enumerate(values) if value.requires_grad]
    token, *entered = _Enter.apply(line, token, [copies[i] for i in some], *(values[i] for i in some))  # type: ignore
    for i, value in zip(some, entered, strict=True):
        plain[i] = value
    return token, [from_local(t, kind.specs, line.groups) for t, kind in zip(plain, layouts, strict=True)]


def join(
    line: Line, token: Tensor, mine: Sequence[Tensor], layouts: Layouts, copies: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """What every rank has, rank after rank; ``copies`` says what of it the trunk will change in place."""
    mine, now = locals_of(mine)
    if layouts[line.ranks.rank] != now:
        i = next(i for i, (a, b) in enumerate(zip(layouts[line.ranks.rank], now, strict=True)) if a != b)
        raise JobError(
            f"what a branch hands on has another size than before: {now[i].shape}",
            f"it was {layouts[line.ranks.rank][i].shape}, for a microbatch of the same shape: it depends on the values",
            "data= takes the model as it is",
        )
    token, *every = _Join.apply(line, layouts, copies, token, *mine)  # type: ignore[misc]
    return token, [from_local(t, kind.specs, line.groups) for t, kind in zip(every, chain(*layouts), strict=True)]


def tie(line: Line, result: Tensor, token: Tensor) -> Tensor:
    """``result``, from which backward comes to the token too."""
    local, specs = to_local(result)
    return from_local(_Tie.apply(local, token), specs, line.groups)  # type: ignore[arg-type]
