"""A group of ranks and its collectives.

    RankGroup       a process group
    ThreadGroup     threads of this process: a proof runs the parts of a module in them
    CountingGroup   one rank of a group that does not exist: shapes are right, and what it would send is counted

Workers of model servers gather through their server (server/workers.py). Derivatives are in collectives.py.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.comm.objects import all_gather_object
from meshfit.cpu_threads import cpu_threads
from meshfit.events import current
from meshfit.torch_private.autograd import in_backward
from meshfit.torch_private.groups import all_gather_single, reduce_scatter_single, timeout_of

R = TypeVar("R")

Wait = Callable[[], object]

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Group(ABC):
    """Ranks that communicate. All of them call each collective together, in the same order."""

    rank: int
    size: int

    counted = 1
    """Ranks that each stands for, where traffic is counted."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, all of one shape: [ranks, ...]."""

    def all_reduce(self, x: Tensor, op: Any = SUM) -> Tensor:
        """The sum, or the largest, over all ranks."""
        return self.all_reduce_(x.detach().clone(memory_format=torch.contiguous_format), op)

    def all_reduce_(self, x: Tensor, op: Any = SUM) -> Tensor:
        """The same; ``x``, which is contiguous, may be overwritten."""
        return self.all_gather(x).sum(0) if op == SUM else self.all_gather(x).amax(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's row of the sum over all ranks; ``x`` has a row for each: [ranks, ...]."""
        return self.all_gather(x)[:, self.rank].sum(0)

    def start_all_reduce(self, x: Tensor) -> tuple[Tensor, Wait]:
        """``all_reduce_`` under way: where the sum will be, and what waits for it."""
        return self.all_reduce_(x), _done

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Likewise."""
        return self.reduce_scatter(x), _done

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Likewise."""
        return self.all_gather(x), _done

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """``sent[r]`` of ``rows`` to each rank, in order; returns the ``taken[r]`` that came from each."""
        raise NotImplementedError

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> tuple[Tensor, Wait]:
        """Likewise, under way: where they will be, and what waits for them."""
        return self.all_to_all(rows, sent, taken), _done

    def broadcast_(self, buffers: Sequence[Tensor]) -> None:
        """Fill ``buffers[r]`` with rank r's, for all ranks at once. An empty one is not sent."""
        raise NotImplementedError

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Integers that the host knows, of all ranks: no device is waited for."""
        return self.all_gather(torch.tensor(numbers, dtype=torch.int64, device=self.host)).tolist()

    @property
    def host(self) -> torch.device:
        """Where tensors lie that the host reads at once."""
        return torch.device("cpu")


def _done() -> None:
    """What there is to wait for where a collective was not put off."""


class RankGroup(Group):
    """A process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "RankGroup | None":
        return None if group is None else cls(group)

    @property
    def host(self) -> torch.device:
        """A process group of the caller's own may take tensors of GPUs alone."""
        on_cpu = "nccl" not in (backend := dist.get_backend(self.group)) or "gloo" in backend
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def among(self, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], "RankGroup"]:
        """Groups of some of the ranks, this one among them. All ranks of the world call it together."""
        world = dist.get_process_group_ranks(self.group)
        named = {members: tuple(world[r] for r in members) for members in wanted}
        made = groups(named.values())
        return {
            members: self if len(members) == self.size else RankGroup(made[ranks]) for members, ranks in named.items()
        }

    def all_reduce_(self, x: Tensor, op: Any = SUM) -> Tensor:
        current().moved("all_reduce", x.nbytes)
        with current().waiting("meet"):
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def start_all_reduce(self, x: Tensor) -> tuple[Tensor, Wait]:
        current().moved("all_reduce", x.nbytes)
        return x, _waiting(dist.all_reduce(x, group=self.group, async_op=True))

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        every = x.new_empty(self.size, *x.shape)
        current().moved("all_gather", every.nbytes)
        with current().waiting("meet"):
            all_gather_single(_plain(every), _plain(x), group=self.group)
        return every

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        x = x.detach().contiguous()
        every = x.new_empty(self.size, *x.shape)
        current().moved("all_gather", every.nbytes)
        return every, _waiting(all_gather_single(_plain(every), _plain(x), group=self.group, async_op=True))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own, x = _to_scatter(x)
        with current().waiting("meet"):
            reduce_scatter_single(_plain(own), _plain(x), group=self.group)
        return own

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        own, x = _to_scatter(x)
        return own, _waiting(reduce_scatter_single(_plain(own), _plain(x), group=self.group, async_op=True))

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> tuple[Tensor, Wait]:
        rows = rows.detach().contiguous()
        found = rows.new_empty(sum(taken), *rows.shape[1:])
        current().moved("all_to_all", rows.nbytes)
        work = dist.all_to_all_single(found, rows, list(taken), list(sent), group=self.group, async_op=True)
        return found, _waiting(work)

    def broadcast_(self, buffers: Sequence[Tensor]) -> None:
        works = []
        for rank, buffer in enumerate(buffers):
            if buffer.numel():
                current().moved("broadcast", buffer.nbytes)
                works.append(dist.broadcast(buffer, group=self.group, group_src=rank, async_op=True))
        for work in works:
            work.wait()


def _to_scatter(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for a row of ``x``, and ``x`` as it is sent."""
    x = x.detach().contiguous()
    current().moved("reduce_scatter", x.nbytes)
    return torch.empty_like(x[0]), x


def _waiting(work: Any) -> Wait:
    def wait() -> None:
        with current().waiting("meet"):
            work.wait()

    return wait


def _plain(x: Tensor) -> Tensor:
    """``x`` in one dimension and a dtype that every backend takes."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(-1).view(torch.uint8) if x.dtype == torch.bool else x.view(-1)


# Groups without processes


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective, as a ThreadGroup or CountingGroup counts it."""

    op: str
    """ "all_reduce", "all_gather" or "reduce_scatter"."""

    backward: bool
    elements: int
    """Of the tensor that is summed or scattered, or of what is gathered of all ranks."""

    shape: tuple[int, ...] = ()
    """Of what a rank gives. It grows with the samples if one of its dims is a multiple of them."""

    itemsize: int = 0
    """Bytes of an element that is no float; 0: it is one, of the precision in which the model runs."""

    @classmethod
    def of(cls, op: str, x: Tensor, times: int = 1) -> "Traffic":
        itemsize = 0 if x.is_floating_point() else x.element_size()
        return cls(op, in_backward(), x.numel() * times, tuple(x.shape), itemsize)

    def bytes(self, wide: int) -> int:
        """Where floats have ``wide`` bytes."""
        return self.elements * (self.itemsize or wide)

    def grows(self, samples: int) -> bool:
        return samples > 0 and any(size and size % samples == 0 for size in self.shape)


PATIENCE = 120.0
"""Seconds after which a thread that waits for the others gives up: they took another way through the code."""


class ThreadGroup(Group):
    """One rank of a group of threads. Backward on the CPU runs in the thread that called it, so it may wait too."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]):
        self.rank, self.size, self.barrier, self._slots = rank, len(slots), barrier, slots
        self.log: list[Traffic] = []

    @classmethod
    def make(cls, size: int) -> list["ThreadGroup"]:
        """All ranks of a group."""
        barrier, slots = threading.Barrier(size, timeout=PATIENCE), [None] * size
        return [cls(rank, barrier, slots) for rank in range(size)]

    def share(self, mine: Any) -> list[Any]:
        """The objects of all ranks."""
        self._slots[self.rank] = mine
        self.barrier.wait()
        every = list(self._slots)
        self.barrier.wait()
        return every

    def all_reduce_(self, x: Tensor, op: Any = SUM) -> Tensor:
        every = self._every("all_reduce", x)
        return every.sum(0) if op == SUM else every.amax(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._every("all_gather", x, self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._every("reduce_scatter", x)[:, self.rank].sum(0)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        return torch.cat([parts[self.rank] for parts in self.share(rows.detach().split(list(sent)))])

    def broadcast_(self, buffers: Sequence[Tensor]) -> None:
        for buffer, theirs in zip(buffers, self.share(buffers[self.rank].clone()), strict=True):
            buffer.copy_(theirs)

    def _every(self, op: str, x: Tensor, times: int = 1) -> Tensor:
        self.log.append(Traffic.of(op, x, times))
        every = self.share(x.detach())
        if len({(part.shape, part.dtype) for part in every}) > 1:
            raise RuntimeError(f"ranks gather tensors of different shapes: {[tuple(part.shape) for part in every]}")
        return torch.stack(every)


def in_threads(groups: Sequence[ThreadGroup], work: Callable[[ThreadGroup], R]) -> list[R]:
    """``work`` of all ranks at once. Raises what stopped the first, not that others missed it."""
    made: list[Any] = [None] * len(groups)
    raised: list[BaseException] = []

    def one(group: ThreadGroup) -> None:
        try:
            made[group.rank] = work(group)
        except BaseException as error:
            raised.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=one, args=(group,), daemon=True) for group in groups]
    with cpu_threads(max(1, torch.get_num_threads() // len(groups))):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if raised:
        raise min(raised, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return made


class CountingGroup(Group):
    """Rank ``rank`` of ``size`` that is alone: it receives its own tensors. ``counted``: each of them stands for so
    many ranks, as where one has all of the weights."""

    def __init__(self, rank: int = 0, size: int = 1, *, counted: int = 1):
        self.rank, self.size, self.counted = rank, size, counted
        self.log: list[Traffic] = []

    def all_reduce_(self, x: Tensor, op: Any = SUM) -> Tensor:
        return self._counted("all_reduce", x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._counted("all_gather", x, self.size).expand(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._counted("reduce_scatter", x)[self.rank]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        return self._counted("all_to_all", rows).new_zeros(sum(taken), *rows.shape[1:])

    def broadcast_(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self._counted("broadcast", buffer)

    def _counted(self, op: str, x: Tensor, times: int = 1) -> Tensor:
        self.log.append(Traffic.of(op, x, times))
        return x.detach()


# Process groups


def groups(wanted: Iterable[tuple[int, ...]], *, fresh: bool = False) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each set of ranks of the world that this rank names. All ranks call it together, each with
    its own sets: all of them make all groups, in one order. ``fresh``: not even the world is reused."""
    mine, world = set(wanted), dist.get_world_size()
    every = all_gather_object(mine)
    some = sorted(ranks for ranks in set().union(*every) if fresh or len(ranks) < world)
    found = {ranks: new_group(ranks) for ranks in some}
    return {ranks: found.get(ranks, dist.group.WORLD) for ranks in mine}  # type: ignore[misc]


def new_group(ranks: Iterable[int]) -> dist.ProcessGroup:
    """A process group with the timeout of the world's."""
    assert dist.group.WORLD is not None
    return dist.new_group(list(ranks), timeout=timeout_of(dist.group.WORLD))  # type: ignore[return-value]


def destroy(made: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy groups, but not the world's. All their ranks call it, with groups that they share in the same order."""
    for group in made:
        if dist.is_initialized() and group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
