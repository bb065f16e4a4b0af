"""Differentiable collectives over a Group.

    forward                                                        backward
    copy             x as it is                                    reduce
    reduce           the sum over ranks                            copy
    all_reduce       the sum over ranks                            all_reduce
    gather           the parts of all ranks, concatenated          split
    split            this rank's part                              gather
    all_gather       the parts of all ranks, concatenated          reduce_scatter
    reduce_scatter   this rank's part of the sum over ranks        all_gather
    all_to_all       rows to other ranks                           all_to_all

``reduce`` and ``gather`` are for ranks that compute the same from there on: a gradient that comes back is whole, and
equal on all of them. ``all_reduce`` and ``all_gather`` are for ranks that go on each with its own: what comes back is a
part of the gradient. Each is linear, and its backward its transpose: gradients can be differentiated again.

Parts are along ``dim``; ``counts`` are their lengths, by rank. Uneven ones are padded to the longest on their way. A
part may be in several chunks that do not follow each other: ``places`` are then, of each chunk in the order of the
whole, the rank, where it begins in that rank's part, and its length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from meshfit.comm.group import Group
from meshfit.errors import DataError

Places = Sequence[tuple[int, int, int]]


def even(length: int, size: int) -> list[int]:
    """``length`` in ``size`` parts, even up to one."""
    least, more = divmod(length, size)
    return [least + (rank < more) for rank in range(size)]


def copy(x: Tensor, group: Group) -> Tensor:
    return Collective.apply(x, "copy", group)  # type: ignore[return-value]


def reduce(x: Tensor, group: Group, *, alone: bool = False) -> Tensor:
    """``alone``: nothing else reads the memory of ``x``, so the sum may take its place."""
    return Collective.apply(x, "reduce", group, *([alone] if alone else ()))  # type: ignore[return-value]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    return Collective.apply(x, "all_reduce", group)  # type: ignore[return-value]


def gather(x: Tensor, dim: int, counts: Sequence[int], group: Group) -> Tensor:
    return Collective.apply(x, "gather", group, dim, counts)  # type: ignore[return-value]


def split(x: Tensor, dim: int, counts: Sequence[int], group: Group) -> Tensor:
    return Collective.apply(x, "split", group, dim, counts)  # type: ignore[return-value]


def all_gather(x: Tensor, dim: int, counts: Sequence[int], group: Group, places: Places = ()) -> Tensor:
    return Collective.apply(x, "all_gather", group, dim, counts, places)  # type: ignore[return-value]


def reduce_scatter(x: Tensor, dim: int, counts: Sequence[int], group: Group) -> Tensor:
    return Collective.apply(x, "reduce_scatter", group, dim, counts)  # type: ignore[return-value]


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """``all_gather`` of rows, any number from each rank, which tell each other how many."""
    shapes = group.exchange(x.shape)
    widths = {tuple(shape[1:]) for shape in shapes if shape[0]}
    if len(widths) > 1:
        raise DataError(
            f"rows of different ranks differ in shape: {' and '.join(map(str, sorted(widths)))}",
            "to be put together they must be of one: pad sequences to one length",
        )
    if not len(x) and widths:
        x = x.reshape(0, *widths.pop())
    return all_gather(x, 0, [shape[0] for shape in shapes], group)


def all_to_all(rows: Tensor, sent: Sequence[int], taken: Sequence[int], group: Group, anchor: Tensor) -> Tensor:
    """``anchor`` requires a gradient, so that backward runs on every rank, whether or not its ``rows`` do."""
    return send_rows(rows, sent, taken, group, anchor)()


def send_rows(
    rows: Tensor, sent: Sequence[int], taken: Sequence[int], group: Group, anchor: Tensor
) -> Callable[[], Tensor]:
    """``all_to_all`` under way: call the result for what came. What is computed before that runs meanwhile, and its
    backward while the gradients are on their way back."""
    way = _Transit(tuple(sent), tuple(taken), group)
    return way.send(rows, anchor)


class Collective(torch.autograd.Function):
    """The collective ``name`` of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, group: Group, *parts: Any) -> Tensor:
        ctx.name, ctx.group, ctx.parts = name, group, parts
        return FORWARD[name](x, group, *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        back: Any = Collective.apply(grad, BACKWARD[ctx.name], ctx.group, *ctx.parts)
        return back, None, None, *(None for _ in ctx.parts)


class _Transit:
    """Rows of one all_to_all on their way: begun by ``Sent``, waited for by ``Arrived``; in backward the other way."""

    def __init__(self, sent: Sequence[int], taken: Sequence[int], group: Group):
        self.sent, self.taken, self.group = sent, taken, group
        self.under_way: Callable[[], object] | None = None
        """What waits for them. It holds what comes, whose node holds this: a cycle that Python cannot see."""
        self.gradients: Callable[[], Tensor] | None = None
        """What waits for those that are on their way back."""

    def send(self, rows: Tensor, anchor: Tensor) -> Callable[[], Tensor]:
        coming: Any = Sent.apply(rows, anchor, self)
        return lambda: Arrived.apply(coming, self)  # type: ignore[return-value]


class Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, way: _Transit) -> Tensor:
        ctx.way = way
        found, way.under_way = way.group.start_all_to_all(rows, way.sent, way.taken)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        back, ctx.way.gradients = ctx.way.gradients(), None
        return back, None, None


class Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, way: _Transit) -> Tensor:
        wait, way.under_way = way.under_way, None
        assert wait is not None
        wait()
        ctx.way = way
        ctx.save_for_backward(coming.new_empty(0))  # a block that is computed again comes at least this far
        return coming.view_as(coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (empty,) = ctx.saved_tensors
        ctx.way.gradients = _Transit(ctx.way.taken, ctx.way.sent, ctx.way.group).send(grad, empty)
        return grad, None  # as a sign: what Sent takes is on its way


def start(name: str, x: Tensor, group: Group, *parts: Any) -> tuple[Tensor, Callable[[], object]]:
    """Start "reduce" or "reduce_scatter", without a derivative: where the result will be, and what waits for it.
    ``x`` belongs to it from now on."""
    if name == "reduce":
        return group.start_all_reduce(x.detach())
    dim, counts, *places = parts
    own, wait = group.start_reduce_scatter(_by_rank(x, group, dim, counts, *places))
    return own.narrow(dim, 0, counts[group.rank]), wait


def start_all_gather(
    x: Tensor, group: Group, dim: int, counts: Sequence[int], places: Places = ()
) -> Callable[[], Tensor]:
    """``all_gather`` in the background, without a derivative: what is returned waits for it."""
    every, wait = group.start_all_gather(_padded(x, dim, _longest(counts, group)))

    def arrived() -> Tensor:
        wait()
        return _joined(every, dim, counts, places)

    return arrived


def _summed(x: Tensor, group: Group, alone: bool = False) -> Tensor:
    if not alone:
        return group.all_reduce(x)
    if not x.is_inference():
        increment_version(x)  # should autograd have saved it after all, backward will say so
    return group.all_reduce_(x.detach().contiguous())


def _gathered(x: Tensor, group: Group, dim: int, counts: Sequence[int], places: Places = ()) -> Tensor:
    return _joined(group.all_gather(_padded(x, dim, _longest(counts, group))), dim, counts, places)


def _joined(every: Tensor, dim: int, counts: Sequence[int], places: Places) -> Tensor:
    """The whole, of the parts of all ranks, padded to the longest: [ranks, ...]."""
    if places or len(counts) * every.shape[1:][dim] > sum(counts):
        places = places or [(rank, 0, count) for rank, count in enumerate(counts)]
        return torch.cat([every[rank].narrow(dim, start, count) for rank, start, count in places], dim)
    dim %= every.dim() - 1
    return every.movedim(0, dim).flatten(dim, dim + 1)  # no copy where the dims before it are of size 1


def _scattered(x: Tensor, group: Group, dim: int, counts: Sequence[int], places: Places = ()) -> Tensor:
    return group.reduce_scatter(_by_rank(x, group, dim, counts, places)).narrow(dim, 0, counts[group.rank])


def _by_rank(x: Tensor, group: Group, dim: int, counts: Sequence[int], places: Places = ()) -> Tensor:
    """The parts of ``x`` for each rank, padded to the longest: [ranks, ...]."""
    longest = _longest(counts, group)
    if places:
        shape = [*x.shape[:dim], longest, *x.shape[dim + 1 :]]
        rows = x.new_zeros(len(counts), *shape) if min(counts) < longest else x.new_empty(len(counts), *shape)
        for (rank, start, count), chunk in zip(places, x.split([count for *_, count in places], dim), strict=True):
            rows[rank].narrow(dim, start, count).copy_(chunk)
        return rows
    if longest * len(counts) == sum(counts):
        return x.unflatten(dim, (len(counts), longest)).movedim(dim % x.dim(), 0)
    return torch.stack([_padded(part, dim, longest) for part in x.split(list(counts), dim)])


def _own(x: Tensor, group: Group, dim: int, counts: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(counts[: group.rank]), counts[group.rank]).contiguous()


FORWARD = {
    "copy": lambda x, group, *_: x.view_as(x),
    "reduce": _summed,
    "all_reduce": lambda x, group: group.all_reduce(x),
    "gather": _gathered,
    "split": _own,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
}
BACKWARD = {"copy": "reduce", "reduce": "copy", "all_reduce": "all_reduce", "gather": "split", "split": "gather"}
BACKWARD |= {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def _longest(counts: Sequence[int], group: Group) -> int:
    """The length of what a rank sends: that of the longest part."""
    return -(-max(counts) // group.counted) * group.counted


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = list(x.shape)
    missing[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim) if missing[dim] else x
