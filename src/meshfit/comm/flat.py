"""Tensors in one buffer, each aligned to 64 bytes: shards, gradient buckets, payloads of model servers, messages.

``Flat`` is a buffer of parameters that is cut evenly over ranks: rank r owns the r-th part of it, wherever that cuts
through a parameter. So parts are equal, whatever the shapes (scalars, odd sizes), a gathered buffer needs no copying to
be the parameters again, and each rank's optimizer has about 1/n of the tensors.

``Lane`` is what rows travel in while the rank computes.

A parameter stays the same object under the same name. At rest its ``data`` is this rank's slice of it, one row, maybe
empty: what the optimizer steps. (On one rank it is all of it, in its own shape.)
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.torch_private.groups import all_gather_rows, all_reduce_rows, reduce_scatter_rows
from meshfit.torch_private.kernels import foreach_copy_, foreach_zero_
from meshfit.torch_private.tensors import grad_dtype, set_data

ALIGN = 64
"""Bytes. An element of any dtype fits in a whole number of times."""


def aligned(size: int, itemsize: int = 1) -> int:
    """``size`` elements, rounded up to whole multiples of ALIGN bytes."""
    step = ALIGN // itemsize
    return -(-size // step) * step


def starts_of(sizes: Iterable[int], itemsize: int = 1) -> tuple[list[int], int]:
    """Where tensors of ``sizes`` elements begin in one buffer, and where the last one ends; in elements."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += aligned(size, itemsize)
    return starts, end


def part_of(size: int, degree: int, itemsize: int) -> int:
    """Elements that each of ``degree`` ranks owns of a buffer of ``size``."""
    return aligned(-(-size // degree), itemsize)


class FlatLayout:
    """Where ``tensors``, which are of one dtype, are in a row of ``size`` elements."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None):
        self.dtype = dtype or tensors[0].dtype
        self.shapes = [t.shape for t in tensors]
        self.strides = [_dense_strides(t) for t in tensors]
        self.starts, self.size = starts_of((t.numel() for t in tensors), self.dtype.itemsize)

    def views(self, row: Tensor) -> list[Tensor]:
        """``row``, all of it, as the tensors. They share its memory, but are no views to autograd: each stands for
        itself."""
        places = zip(self.starts, self.shapes, self.strides, strict=True)
        storage, begin = row.untyped_storage(), row.storage_offset()
        return [row.new_empty(0).set_(storage, begin + start, shape, stride) for start, shape, stride in places]

    def gaps(self, row: Tensor) -> list[Tensor]:
        """What of ``row`` is in no tensor."""
        ends = [start + shape.numel() for start, shape in zip(self.starts, self.shapes, strict=True)]
        gaps = zip(ends, [*self.starts[1:], row.numel()], strict=True) if ends else ()
        return [row[end:start] for end, start in gaps if end < start]


class Flat(FlatLayout):
    """``parameters`` (of one dtype, all trained or all frozen) over ``degree`` ranks, of which this is ``rank``."""

    def __init__(self, parameters: list[nn.Parameter], degree: int, rank: int, gathered: torch.dtype | None = None):
        super().__init__(parameters)
        self.parameters = parameters
        self.trained = parameters[0].requires_grad
        self.grad_dtype = grad_dtype(parameters[0])
        self.gathered = gathered or self.dtype
        """What it is gathered as: half the bytes, where the model would round it to that anyway."""
        self.rounds = self.gathered != self.dtype
        self.part = part_of(self.size, degree, self.dtype.itemsize)
        """Elements a rank owns."""
        self.first = rank * self.part
        self.mine = torch.empty(0)
        """This rank's part: the weights that the optimizer steps."""
        self.gradient: Tensor | None = None
        """This rank's part of the summed gradient."""
        self.filled = False
        """Whether ``gradient`` holds something of the step under way."""
        self.whole: Tensor | None = None
        """All of it, while it is gathered."""
        self.degree, self.padded = degree, self.part * degree

    def own(self, row: Tensor) -> None:
        """Let ``row`` hold this rank's part, and fill it from the parameters, which then shrink to their slices."""
        self.mine = row
        with torch.no_grad():
            row.zero_()
            for i, p in enumerate(self.parameters):
                here, there = self.slices(i)
                if not p.is_meta:  # else it is filled later
                    row[here].copy_(_row(p.detach(), self.strides[i])[there])
            for i, p in enumerate(self.parameters):
                set_data(p, self.piece(i, row))

    def restore(self, row: Tensor, device: torch.device) -> None:
        """Make the parameters whole again, out of ``row``, which holds them all."""
        if self.degree == 1 and self.mine.device == device:
            return  # they are
        for p, whole in zip(self.parameters, self.views(row), strict=True):
            p.data = whole.detach().clone(memory_format=torch.preserve_format).to(device)

    def piece(self, i: int, row: Tensor) -> Tensor:
        """Of ``row``, a rank's part, what belongs to parameter ``i``; in its own shape if that is all of it."""
        return self.views(row)[i] if self.degree == 1 else row[self.slices(i)[0]]

    def slices(self, i: int) -> tuple[slice, slice]:
        """Of parameter ``i`` what this rank owns: where it is in ``mine``, and where in the parameter."""
        start, end = self.starts[i], self.starts[i] + self.shapes[i].numel()
        first, last = max(start, self.first), min(end, self.first + self.part)
        if first >= last:
            return slice(0, 0), slice(0, 0)
        return slice(first - self.first, last - self.first), slice(first - start, last - start)

    def cut(self, i: int, tensor: Tensor) -> Tensor:
        """This rank's slice of a tensor that is shaped like parameter ``i``, in the shape and place of that one's."""
        return self.look(i, tensor).clone().to(self.mine.device)

    def look(self, i: int, tensor: Tensor) -> Tensor:
        """The same slice, where it is."""
        if self.degree == 1:
            return tensor.detach()
        return _row(tensor.detach(), self.strides[i])[self.slices(i)[1]]

    def pack(self, gradients: list[Tensor | None], device: torch.device, *, borrow: bool = False) -> Tensor:
        """Gradients as one row; None counts as zero. ``borrow``: if it is only read, it may be the gradient itself."""
        only = gradients[0] if borrow and len(gradients) == 1 else None
        if only is not None and only.layout is torch.strided and only.stride() == self.strides[0]:
            row = only.as_strided((only.numel(),), (1,))
            if (row.numel(), row.dtype, row.device) == (self.padded, self.grad_dtype, device):
                return row
        row = torch.empty(self.padded, dtype=self.grad_dtype, device=device)
        views = self.views(row)
        given = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        missing = [view for view, g in zip(views, gradients, strict=True) if g is None] + self.gaps(row)
        if given:
            foreach_copy_([view for view, _ in given], [g for _, g in given])
        if missing:
            foreach_zero_(missing)
        return row

    def add(self, gradients: list[Tensor | None], row: Tensor) -> None:
        """Add gradients to ``row``."""
        for view, g in zip(self.views(row), gradients, strict=True):
            if g is not None:
                view.add_(g)

    def zeros(self, device: torch.device) -> Tensor:
        """A row of gradients."""
        return torch.zeros(self.padded, dtype=self.grad_dtype, device=device)


class Lane:
    """Collectives of ``group`` beside what the rank computes: on GPUs in a stream of their own, which goes first.

    What is made within ``beside()`` is memory of that stream. Each entry waits for what the device was given before, so
    what was dropped by then is taken again at once, however far the host is ahead of the device.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group, self.device = group, device
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def gather(self, wholes: list[Tensor], parts: list[Tensor]) -> list[Any]:
        """Every rank's parts, in one call. On CPUs what to wait for; on GPUs the stream does."""
        if self.group is None or not wholes:
            return []
        return all_gather_rows(wholes, parts, self.group, async_op=self.stream is None)

    def reduce_scatter(self, parts: list[Tensor], rows: list[Tensor]) -> list[Any]:
        """This rank's parts of the sums, in one call for each dtype; likewise."""
        if self.group is None:
            return []
        calls, alone = _by_dtype(parts, rows), self.stream is None
        return [work for own, every in calls for work in reduce_scatter_rows(own, every, self.group, async_op=alone)]

    def all_reduce(self, rows: list[Tensor]) -> list[Any]:
        """Sums, in one call for each dtype: what to wait for, on GPUs too."""
        if self.group is None:
            return []
        return [work for (some,) in _by_dtype(rows) for work in all_reduce_rows(some, self.group, async_op=True)]

    def event(self) -> Any:
        """All that was given to the stream so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: Any) -> None:
        """What the device is given from now on comes after ``event``."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """Of a parameter that fills its memory without gaps, in whatever order; else those of a contiguous one."""
    order = sorted(range(p.dim()), key=lambda d: (p.stride(d), p.shape[d]))
    expected = 1
    for dim in order:
        if p.shape[dim] != 1 and p.stride(dim) != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= p.shape[dim]
    return p.stride()


def _row(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor's elements as one row, in the order that ``strides`` lays them out."""
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _by_dtype(*rows: list[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Lists of as many rows each, side by side, split by the dtype of the first list's; as ranks exchange them."""
    found: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}
    for together in zip(*rows, strict=True):
        found.setdefault(together[0].dtype, []).append(tuple(map(_as_real, together)))
    return [tuple(map(list, zip(*some, strict=True))) for some in found.values()]


def _as_real(row: Tensor) -> Tensor:
    """A row as ranks exchange it: not all collectives take complex numbers."""
    return torch.view_as_real(row).flatten() if row.is_complex() else row
