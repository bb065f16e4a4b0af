"""Tensors from rank to rank of a pipeline.

All that crosses a cut for one microbatch travels as one message. Both ends know beforehand, from the schedule, which
messages pass between two ranks and in what order; so receives are posted before they are needed and no message says
what it is. What the sizes are the sender says once for each kind of microbatch, in a small header before its first.

    gloo        buffers in host memory; tags count the messages, so that none can be taken for another
    nccl        a communicator for each direction between two ranks: neither waits for the other's turn
    gloo, GPU   gloo cannot send from GPU memory: by way of host memory
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.errors import JobError
from meshfit.events import current
from meshfit.layout.stages.program import Layout
from meshfit.schedule.actions import Message

ALIGN = 64
DIMS = 12
TAGS = 2**15
AHEAD = 2
"""Receives posted before they are needed, from each rank."""

DTYPES = tuple(
    dict.fromkeys(d for name in sorted(vars(torch)) if isinstance(d := getattr(torch, name, None), torch.dtype))
)


@dataclass(frozen=True, slots=True)
class Pending:
    """A buffer that is being filled."""

    buffer: Tensor
    work: Any


class Transport:
    """Sends and receives between ranks of ``group``. All of them build it together."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, pairs: Iterable[tuple[int, int]] = ()):
        self.group, self.device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        nccl = group is not None and "nccl" in dist.get_backend(group)
        self.memory = device if nccl else torch.device("cpu")
        self._lines = dict.fromkeys(pairs, group)
        if nccl and group is not None:
            ranks = dist.get_process_group_ranks(group)
            for source, target in sorted(self._lines):
                if self.rank in (source, target):
                    both = [ranks[source], ranks[target]]
                    self._lines[source, target] = dist.new_group(both, use_local_synchronization=True)  # type: ignore
        self._count: dict[tuple[int, int], int] = {}
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, buffer: Tensor, target: int) -> None:
        """Returns at once; the buffer is kept until it has gone."""
        if not buffer.numel():
            return
        buffer = buffer.to(self.memory)
        current().moved("send", buffer.nbytes)
        work = dist.isend(buffer, group=self._line(self.rank, target), tag=self._tag(self.rank, target), **_to(target))
        self._sending = [(w, kept) for w, kept in self._sending if not w.is_completed()]
        self._sending.append((work, buffer))

    def receive(self, size: int, source: int) -> Pending:
        """``size`` bytes; ask ``take`` for them."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.memory)
        if not size:
            return Pending(buffer, None)
        tag = self._tag(source, self.rank)
        return Pending(buffer, dist.irecv(buffer, group=self._line(source, self.rank), tag=tag, **_from(source)))

    def take(self, pending: Pending) -> Tensor:
        """Wait for it (on a GPU: let the GPU wait)."""
        if pending.work is not None:
            pending.work.wait()
        return pending.buffer.to(self.device)

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _line(self, source: int, target: int) -> dist.ProcessGroup | None:
        return self._lines.get((source, target), self.group)

    def _tag(self, source: int, target: int) -> int:
        count = self._count.get((source, target), 0)
        self._count[source, target] = count + 1
        return count % TAGS


def _to(rank: int) -> dict[str, int]:
    return {"group_dst": rank}


def _from(rank: int) -> dict[str, int]:
    return {"group_src": rank}


class Inbox:
    """What comes from one rank in one step, in the order in which it is sent."""

    def __init__(
        self,
        transport: Transport,
        source: int,
        messages: Sequence[Message],
        layouts: Callable[[Message, Callable[[int], Tensor] | None], tuple[Layout, ...] | None],
    ):
        """``layouts`` says what a message holds; None if a header must be read first, for which it is then given a
        way to do so."""
        self.transport, self.source, self.messages, self.layouts = transport, source, messages, layouts
        self._at = 0
        self._posted: dict[Message, tuple[Pending, tuple[Layout, ...]]] = {}

    def look_ahead(self) -> None:
        """Post the receives that come next, as far as their sizes are known."""
        while len(self._posted) < AHEAD and self._at < len(self.messages):
            layouts = self.layouts(self.messages[self._at], None)
            if layouts is None:
                return
            self._post(layouts)

    def take(self, message: Message) -> list[Tensor]:
        """Wait for ``message``; those sent before it wait here for their turn."""
        while message not in self._posted:
            layouts = self.layouts(self.messages[self._at], self._header)
            assert layouts is not None
            self._post(layouts)
        pending, layouts = self._posted.pop(message)
        self.look_ahead()
        return unpacked(self.transport.take(pending), layouts)

    def _post(self, layouts: tuple[Layout, ...]) -> None:
        self._posted[self.messages[self._at]] = self.transport.receive(packed_size(layouts), self.source), layouts
        self._at += 1

    def _header(self, values: int) -> Tensor:
        pending = self.transport.receive(header_size(values), self.source)
        return self.transport.take(pending).cpu()


# Messages


def layouts_of(tensors: Iterable[Tensor]) -> tuple[Layout, ...]:
    return tuple(Layout(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def packed_size(layouts: Iterable[Layout]) -> int:
    return sum(_room(prod(layout.shape) * layout.dtype.itemsize) for layout in layouts)


def _room(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` as bytes, one after the other."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    if len(flat) == 1 and flat[0].numel() % ALIGN == 0:
        return flat[0]
    device = flat[0].device if flat else None
    buffer = torch.empty(sum(_room(part.numel()) for part in flat), dtype=torch.uint8, device=device)
    at = 0
    for part in flat:
        buffer[at : at + part.numel()] = part
        at += _room(part.numel())
    return buffer


def unpacked(buffer: Tensor, layouts: Iterable[Layout]) -> list[Tensor]:
    """Tensors that share the memory of ``buffer``."""
    found, at = [], 0
    for layout in layouts:
        size = prod(layout.shape) * layout.dtype.itemsize
        found.append(buffer[at : at + size].view(layout.dtype).view(layout.shape))
        at += _room(size)
    return found


def header_size(values: int) -> int:
    return values * (3 + DIMS) * 8


def header(layouts: Sequence[Layout]) -> Tensor:
    """``layouts`` as bytes: dtype, gradient, number of dims, dims."""
    rows = torch.zeros(len(layouts), 3 + DIMS, dtype=torch.int64)
    for row, layout in zip(rows, layouts, strict=True):
        if len(layout.shape) > DIMS:
            raise JobError(f"a tensor of {len(layout.shape)} dims crosses from stage to stage", f"{DIMS} are the most")
        said = [DTYPES.index(layout.dtype), int(layout.needs_grad), len(layout.shape), *layout.shape]
        row[: len(said)] = torch.tensor(said)
    return rows.view(-1).view(torch.uint8)


def read_header(buffer: Tensor) -> tuple[Layout, ...]:
    rows = buffer.view(torch.int64).view(-1, 3 + DIMS).tolist()
    return tuple(
        Layout(tuple(dims[:count]), DTYPES[dtype], bool(needs_grad)) for dtype, needs_grad, count, *dims in rows
    )
