"""Tensors from rank to rank of a pipeline.

All that crosses a cut for one microbatch travels as one message. Both ends know beforehand, from the schedule, which
messages pass between two ranks and in what order (issue.py), so no message says what it is. What the sizes are the
sender says once for each kind of microbatch, in a small header before its first.

Every two neighbours have a group of their own for each direction, so that a message does not wait behind the receive of
one that comes the other way. Both are made, and used once, when the transport is made: no communicator comes into being
in the middle of a step. A run has one transport, for training and evaluation alike.

    gloo        buffers in host memory; tags count the messages, so that none can be taken for another
    nccl        buffers in GPU memory; what is issued in one direction runs in the order in which it was issued
    gloo, GPU   gloo cannot send from GPU memory: by way of host memory
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.comm.encoding import dumps, loads
from meshfit.comm.flat import starts_of
from meshfit.comm.group import destroy, groups
from meshfit.events import current

TAGS = 2**15


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    specs: tuple[Any, ...] = ()
    """How the tensor is split of which this is one rank's part (axes/spec.py)."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A buffer that is being filled."""

    buffer: Tensor
    work: Any


class Transport:
    """Sends and receives between ranks of ``group``, of which ``pairs`` talk to each other. All ranks of the world
    build it together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, pairs: Iterable[tuple[int, int]]):
        self.device, self.rank = device, dist.get_rank(group)
        self.memory = device if "nccl" in dist.get_backend(group) else torch.device("cpu")
        world = dist.get_process_group_ranks(group)
        near = {sum(pair) - self.rank: tuple(sorted(world[r] for r in pair)) for pair in pairs if self.rank in pair}
        up, down = (groups(near.values(), fresh=True) for _ in range(2))
        self._lines = {peer: (up[ranks], down[ranks]) for peer, ranks in sorted(near.items())}
        """By the other rank: the groups of the two, for messages to the higher and to the lower of them."""
        self._places = {peer: ranks.index(world[peer]) for peer, ranks in near.items()}
        """... and its place there."""
        self._count: dict[tuple[str, int], int] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        self._warm_up()

    def send(self, buffer: Tensor, target: int) -> None:
        """Returns at once; the buffer is kept until it has gone."""
        if not buffer.numel():
            return
        buffer = buffer.to(self.memory)
        current().moved("send", buffer.nbytes)
        work = self._issue(self._operation(dist.isend, buffer, target))
        self._sending = [(w, kept) for w, kept in self._sending if not w.is_completed()]
        self._sending.append((work, buffer))

    def announce(self, layouts: Sequence[Layout], target: int) -> None:
        """Say what the messages will hold: once, before the first."""
        said = header(layouts)
        self.send(torch.tensor([said.numel()]).view(torch.uint8), target)
        self.send(said, target)

    def receive_layouts(self, source: int) -> tuple[Layout, ...]:
        """What ``source`` announces."""
        size = self.take(self.receive(8, source)).cpu().view(torch.int64)
        return read_header(self.take(self.receive(int(size), source)))

    def receive(self, size: int, source: int) -> Pending:
        """``size`` bytes; ask ``take`` for them."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.memory)
        return Pending(buffer, self._issue(self._operation(dist.irecv, buffer, source)) if size else None)

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

    def close(self) -> None:
        """All ranks of the world call it together, when nothing is under way."""
        self.flush()
        destroy(group for both in self._lines.values() for group in both)
        self._lines = {}

    def _warm_up(self) -> None:
        """Both ways between every two neighbours: a communicator connects when it is first used."""
        for peer in sorted(self._lines, key=lambda peer: (min(peer, self.rank), max(peer, self.rank))):
            mine, theirs = (torch.full((8,), float(r), device=self.memory) for r in (self.rank, -1.0))
            both = [self._operation(dist.isend, mine, peer), self._operation(dist.irecv, theirs, peer)]
            for operation in both if peer > self.rank else both[::-1]:  # to the higher rank first, on both
                self._issue(operation).wait()
            assert theirs.tolist() == [float(peer)] * 8, f"rank {self.rank} hears {theirs.tolist()} from rank {peer}"

    def _operation(self, kind: Any, buffer: Tensor, peer: int) -> dist.P2POp:
        up, down = self._lines[peer]
        group = up if (peer > self.rank) == (kind is dist.isend) else down
        way = (kind.__name__, peer)
        tag = self._count[way] = (self._count.get(way, -1) + 1) % TAGS
        return dist.P2POp(kind, buffer, group=group, group_peer=self._places[peer], tag=tag)

    def _issue(self, operation: dist.P2POp) -> Any:
        """As a batch of one: NCCL runs that by the communicator of the group, an operation alone by another."""
        return _Works(dist.batch_isend_irecv([operation]))


class _Works:
    """What a batch is to be waited for by: one work, or one for each of its operations."""

    def __init__(self, works: Sequence[Any]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


# Messages


def packed_size(layouts: Iterable[Layout]) -> int:
    return _starts(_sizes(layouts))[1]


def _sizes(layouts: Iterable[Layout]) -> tuple[int, ...]:
    return tuple(prod(layout.shape) * layout.dtype.itemsize for layout in layouts)


_starts = lru_cache(1024)(starts_of)
"""Where tensors of so many bytes begin in a message, and where it ends."""


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` as bytes, one after the other."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    starts, size = _starts(tuple(part.numel() for part in flat))
    if len(flat) == 1 and flat[0].numel() == size:
        return flat[0]
    buffer = torch.empty(size, dtype=torch.uint8, device=flat[0].device if flat else None)
    for at, part in zip(starts, flat, strict=True):
        buffer[at : at + part.numel()] = part
    return buffer


def unpacked(buffer: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """Tensors that share the memory of ``buffer``."""
    sizes = _sizes(layouts)
    return [
        buffer[at : at + size].view(layout.dtype).view(layout.shape)
        for at, size, layout in zip(_starts(sizes)[0], sizes, layouts, strict=True)
    ]


def header(layouts: Sequence[Layout]) -> Tensor:
    """``layouts`` as bytes."""
    return torch.frombuffer(bytearray(dumps(tuple(layouts))), dtype=torch.uint8)


def read_header(buffer: Tensor) -> tuple[Layout, ...]:
    return loads(buffer.cpu())
