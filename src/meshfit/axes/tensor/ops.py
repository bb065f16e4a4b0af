"""What ranks of a tensor group say to each other, and its derivatives.

    enter    x as it is; backward sums the gradients of all ranks      (before columns: each rank has part of it)
    leave    sums x over all ranks; backward is the gradient as it is  (after rows: every rank goes on alike)
    gather   parts of a dim put together; backward is the rank's own part

All ranks compute the same from ``leave`` and ``gather`` on, so gradients that come back there are whole and equal.

``Ranks`` speaks over a process group. ``Threads`` are its stand-in for the check: the ranks of a group as threads of
one process. Backward on the CPU runs in the thread that asked for it, so both directions may wait for each other.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.axes.mesh import groups
from meshfit.axes.tensor.region import Traffic
from meshfit.events import current
from meshfit.torch_private import in_backward, reduce_scatter_single

R = TypeVar("R")


class Group(Protocol):
    """The ranks that hold one copy of a region."""

    rank: int
    size: int

    @property
    def degree(self) -> int:
        """Ranks that it stands for."""
        return self.size

    def sum(self, x: Tensor) -> Tensor: ...

    def max(self, x: Tensor) -> Tensor: ...

    def scatter(self, x: Tensor) -> Tensor:
        """Of the sum over all ranks, the rank's own along the first dim, which has one for each."""
        ...

    def parts(self, x: Tensor) -> list[Tensor]:
        """``x`` of every rank, in order."""
        ...


class Ranks(Group):
    """A process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def among(self, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], "Ranks"]:
        """Groups of some of them, of which this rank is one. All ranks of the world call it together."""
        world = dist.get_process_group_ranks(self.group)
        named = {members: tuple(world[r] for r in members) for members in wanted}
        made = groups(named.values())
        return {members: self if len(members) == self.size else Ranks(made[ranks]) for members, ranks in named.items()}

    def sum(self, x: Tensor) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        current().moved("all_reduce", x.nbytes)
        with current().waiting("meet"):
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        current().moved("all_reduce", x.nbytes)
        with current().waiting("meet"):
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def scatter(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        own = torch.empty_like(x[0])
        current().moved("reduce_scatter", x.nbytes)
        with current().waiting("meet"):
            reduce_scatter_single(own.view(-1), x.view(-1), group=self.group)
        return own

    def parts(self, x: Tensor) -> list[Tensor]:
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        current().moved("all_gather", x.nbytes * self.size)
        with current().waiting("meet"):
            dist.all_gather(parts, x, group=self.group)
        return parts


PATIENCE = 120.0
"""Seconds after which a thread that waits for the others gives up: they took another way through the code."""


class Meeting:
    """Where the threads of a check meet."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.slots: list[Any] = [None] * size

    def run(self, work: Callable[[int], R]) -> list[R]:
        """``work(rank)`` of all ranks at once. Raises what stopped the first, not that others missed it."""
        made: list[Any] = [None] * len(self.slots)
        raised: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                made[rank] = work(rank)
            except BaseException as error:
                raised.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise min(raised, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return made


class Threads(Group):
    """One rank of a group of threads."""

    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.slots)
        self.log: list[Traffic] = []

    def all(self, mine: Any) -> list[Any]:
        self.meeting.slots[self.rank] = mine
        self.meeting.barrier.wait()
        every = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return every

    def parts(self, x: Tensor) -> list[Tensor]:
        self.log.append(Traffic("all_gather", in_backward(), x.numel() * self.size, tuple(x.shape)))
        return self._parts(x)

    def sum(self, x: Tensor) -> Tensor:
        self.log.append(Traffic("all_reduce", in_backward(), x.numel(), tuple(x.shape)))
        return torch.stack(self._parts(x)).sum(0)

    def max(self, x: Tensor) -> Tensor:
        self.log.append(Traffic("all_reduce", in_backward(), x.numel(), tuple(x.shape)))
        return torch.stack(self._parts(x)).amax(0)

    def scatter(self, x: Tensor) -> Tensor:
        self.log.append(Traffic("reduce_scatter", in_backward(), x.numel(), tuple(x.shape)))
        return torch.stack([part[self.rank] for part in self._parts(x)]).sum(0)

    def _parts(self, x: Tensor) -> list[Tensor]:
        every = self.all(x.detach())
        if len({(part.shape, part.dtype) for part in every}) > 1:
            raise RuntimeError(f"ranks gather tensors of different shapes: {[tuple(part.shape) for part in every]}")
        return every


class Alone(Group):
    """A group of one, which counts what it would say to others."""

    rank, size = 0, 1

    def __init__(self, degree: int = 1) -> None:
        self.log: list[Traffic] = []
        self.stands_for = degree

    @property
    def degree(self) -> int:
        return self.stands_for

    def _noted(self, op: str, x: Tensor) -> Tensor:
        self.log.append(Traffic(op, in_backward(), x.numel(), tuple(x.shape)))
        return x.detach()

    def sum(self, x: Tensor) -> Tensor:
        return self._noted("all_reduce", x)

    def max(self, x: Tensor) -> Tensor:
        return self._noted("all_reduce", x)

    def scatter(self, x: Tensor) -> Tensor:
        return self._noted("reduce_scatter", x)[0]

    def parts(self, x: Tensor) -> list[Tensor]:
        return [self._noted("all_gather", x)]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return leave(grad, ctx.group), None  # itself differentiable, as a penalty on gradients needs it


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return enter(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(group.parts(x), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Own.apply(grad, ctx.dim, ctx.group), None, None  # type: ignore[return-value]


class _Own(torch.autograd.Function):
    """The rank's own part of a dim: what undoes ``gather``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        part = x.shape[dim] // group.size
        return x.narrow(dim, group.rank * part, part).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gather(grad, ctx.dim, ctx.group), None, None


def enter(x: Tensor, group: Group) -> Tensor:
    return _Enter.apply(x, group)  # type: ignore[return-value]


def leave(x: Tensor, group: Group) -> Tensor:
    return _Leave.apply(x, group)  # type: ignore[return-value]


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    return _Gather.apply(x, dim, group)  # type: ignore[return-value]


def draw_own(rank: int, device: torch.device | None) -> Callable[[], None]:
    """From here on random numbers are the rank's own; they follow from the common ones, of which one is taken. Returns
    what goes on with those: call it when the own ones are done with."""
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) + rank
    gpu = device if device is not None and device.type == "cuda" else None
    kept, of_gpu = torch.get_rng_state(), None if gpu is None else torch.cuda.get_rng_state(gpu)
    torch.default_generator.manual_seed(seed)
    if gpu is not None:
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(seed)

    def common() -> None:
        torch.set_rng_state(kept)
        if gpu is not None and of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, gpu)

    return common


class Stream:
    """Random numbers: those of the group, the same on every rank, or inside regions those of the rank alone.

    The rank's own stream is seeded by a draw from the group's, which goes on where it stood when the last open region
    is left. Both states belong to the generators of the process: what is computed again draws the same again.
    """

    def __init__(self, group: Group):
        self.group = group
        self._open: set[object] = set()
        self._common: Callable[[], None] | None = None

    @property
    def inside(self) -> bool:
        return bool(self._open)

    def own(self, region: object, device: torch.device | None) -> None:
        """From here on each rank draws its own numbers."""
        first = not self._open
        self._open.add(region)
        if not first or not isinstance(self.group, Ranks):
            return
        self._common = draw_own(self.group.rank, device)

    def common(self, region: object) -> None:
        """From here on all ranks draw the same numbers again, if no other region is open."""
        self._open.discard(region)
        if self._open or self._common is None:
            return
        common, self._common = self._common, None
        common()
