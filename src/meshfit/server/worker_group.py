"""A worker of model servers that is several ranks: each holds a part of the model, by whatever layout.

To the servers the group is one worker. Its first rank has the connections, and a stand-in for the whole model whose
gradients and weights are in memory that all ranks of the group map: each rank copies its parts of the gradients there,
and of the weights from there. Nothing is gathered. What several ranks replicate, the first of them sends.

Within the group gradients are reduced as without servers (``inner``). ``finish``, ``step`` and ``pull`` are collective,
so all ranks have the same batch, the same weights, and repeat a batch together.

    memory    of a group 2P on the host, beside what each rank holds
    traffic   of a rank its part of the gradients up, of the weights down; one small all_reduce and two broadcasts
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import running_statistics
from meshfit.axes.place import Placed
from meshfit.checkpoint.box import Box, volume
from meshfit.checkpoint.pieces import layout_of
from meshfit.comm.objects import all_gather_object, broadcast_object
from meshfit.cost import Cost
from meshfit.errors import RankError
from meshfit.events import current
from meshfit.exchange.parcel import Parcel
from meshfit.exchange.protocol import RepeatBatch, StepScalars
from meshfit.exchange.server_cost import BROADCAST, Payload, worker_group
from meshfit.exchange.update import Updated
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.server.shared_memory import SharedMemory
from meshfit.server.shared_model import SharedPart, hand_out, receive
from meshfit.server.snapshot import put_down
from meshfit.server.worker import Worker
from meshfit.torch_private.groups import become_world

Group = dist.ProcessGroup | None
WAITS = -1.0
"""In place of an answer: the first rank waits for its servers, which wait for other workers."""


class WorkerGroup:
    """An exchange like ``Worker``. All ranks of the worker's world make it together; ``reach`` makes the worker itself,
    in the first of them, of the ``model`` that stands in for the whole there. They meet at ``address``, a path."""

    summed = True

    def __init__(
        self,
        inner: Any,
        placed: Placed,
        whole: Payload,
        *,
        workers: int,
        shares: int,
        model: nn.Module | None,
        reach: Callable[[nn.Module], Worker],
        address: str,
    ):
        """``shares``: parts into which the group splits its share of a batch; ``workers``: how many have a flag for a
        loss that is not finite."""
        self.inner, self.placed, self.whole, self.workers, self.shares = inner, placed, whole, workers, shares
        self.size = dist.get_world_size()
        self.parameters = inner.parameters
        self.named = dict(placed.model.named_parameters())
        self.worker: Worker | None = None
        self.samples, self.values = 0.0, 0
        """Of this rank in the batch under way; how many numbers are summed beside the loss."""
        self.epoch, self.last = 0, False
        """Of that batch, and whether it ends one."""
        self.norm: Tensor | None = None
        """Of the gradients of all workers, as summed, after ``finish``."""
        self.parts = self._parts(*self._share(model, reach, address))
        self._up_bytes = sum(part.nbytes for part in self.parts if part.sends)
        self._down_bytes = sum(part.nbytes for part in self.parts)
        self._first()
        self._take()

    # What its ranks share

    def _share(
        self, model: nn.Module | None, reach: Callable[[nn.Module], Worker], address: str
    ) -> tuple[list[SharedMemory], list[SharedMemory]]:
        """The memory of the connections, and what there is beside: for statistics, and for gradients before they are
        compressed."""
        whole, sizes = self.whole, self.whole.sizes
        more = [(whole.running.bytes, 0), *((parcel.bytes, 0) for parcel in whole.parcels if whole.compressed)]
        if model is None:
            fds = receive(address, len(sizes) + len(more))
            made = [SharedMemory.map(fd, *size) for fd, size in zip(fds, [*sizes, *more], strict=True)]
            return made[: len(sizes)], made[len(sizes) :]
        beside = [SharedMemory.make(*size) for size in more]
        views = self.whole.running.views(beside[0].up)
        for name, buffer in running_statistics(model).items():
            views[name].copy_(buffer)
            buffer.data = views[name]
        self.worker = reach(model)
        for connection in self.worker.connections:
            connection.counts = False
        connections = [connection.memory for connection in self.worker.connections]
        hand_out(address, [memory.fd for memory in (*connections, *beside) if memory.fd is not None], self.size - 1)
        return connections, beside

    def _parts(self, connections: list[SharedMemory], beside: list[SharedMemory]) -> list[SharedPart]:
        """What this rank holds of the trained parameters and of the statistics, and where they are shared."""
        whole, downs = self.whole, {}
        self._gradients = [memory.up for memory in (beside[1:] if whole.compressed else connections)]
        self._ups: dict[str, Tensor] = {}
        for parcel, up, memory in zip(whole.parcels, self._gradients, connections, strict=True):
            self._ups |= parcel.views(up[: parcel.bytes])
            downs |= parcel.views(memory.down[: parcel.bytes])
        running = whole.running.views(beside[0].up)
        ups, downs = self._ups | running, downs | running
        held: dict[str, Tensor] = {name: p for name, p in self.named.items() if p.requires_grad}
        held |= running_statistics(self.placed.model)
        pieces = [
            (name, tensor, piece)
            for name, tensor in held.items()
            for piece in layout_of(self.placed, tensor).pieces
            if volume(piece.box)
        ]
        every = all_gather_object([(name, piece.box) for name, _, piece in pieces])
        first: dict[tuple[str, Box], int] = {}
        for rank, boxes in enumerate(every):
            for each in boxes:
                first.setdefault(each, rank)
        self._check(first)
        return [
            SharedPart(name, tensor, piece, ups[name][at], downs[name][at], first[name, piece.box] == dist.get_rank())
            for name, tensor, piece in pieces
            for at in [tuple(slice(*ends) for ends in piece.box)]
        ]

    def _check(self, first: dict[tuple[str, Box], int]) -> None:
        """Every element of a parameter is sent by one rank."""
        for name, tensor in self._ups.items():
            sent = sum(volume(box) for each, box in first if each == name)
            if sent != tensor.numel():
                raise RankError(f"of {name} the ranks of a worker hold {sent} elements, and it has {tensor.numel()}")

    @torch.no_grad()
    def _give(self) -> set[str]:
        """Copy what this rank sends to shared memory. Returns the names of what it has gradients, or statistics, of."""
        given = [(part, part.sent) for part in self.parts]
        for part, sent in given:
            if sent is not None and part.sends:
                part.up.copy_(part.piece.of(sent))
        current().moved("push", self._up_bytes)
        return {part.name for part, sent in given if sent is not None}

    @torch.no_grad()
    def _take(self) -> None:
        """Have the weights, and the statistics, that have come."""
        for part in self.parts:
            part.piece.of(part.tensor.detach()).copy_(part.down)
        self.placed.changed()
        current().moved("pull", self._down_bytes)

    # What the first rank does, broadcast to all

    def _first(self, act: Callable[[Worker], Sequence[float] | None] = lambda worker: None) -> list[float]:
        """What ``act`` returns in the first rank, on all; ``RepeatBatch`` too: weights and place are then new."""
        said = torch.zeros(BROADCAST + self.workers + self.values, dtype=torch.float64)
        if (worker := self.worker) is not None:
            again, found = 0.0, None
            worker.waits = lambda: self._broadcast(torch.full_like(said, WAITS))
            try:
                found = act(worker)
            except RepeatBatch:
                again = 1.0
            finally:
                worker.waits = lambda: None
            place = [-1 if worker.ticket is None else worker.ticket, *worker.share, worker.version]
            facts = [again, *place, worker.taken, worker.seen, worker.staleness, worker.learning_rate, *(found or ())]
            said[: len(facts)] = torch.tensor(facts, dtype=torch.float64)
        while self._broadcast(said)[0] == WAITS:
            pass
        again, ticket, at, of, version, taken, self.seen, staleness, self.learning_rate, *found = said.tolist()
        self.ticket = None if ticket < 0 else int(ticket)
        """The batch to work on; None: all are done."""
        self.share = int(at), int(of)
        """Which part of the batch is this worker's."""
        self.version, self.taken, self.staleness = int(version), int(taken), int(staleness)
        if again:
            self.inner.clear()
            self._unstage()
            self._take()
            raise RepeatBatch
        return found

    def _broadcast(self, said: Tensor) -> Tensor:
        current().moved("broadcast", said.nbytes)
        dist.broadcast(said, 0)
        return said

    def begin(self) -> None:
        """Wait until all workers are at this batch: at the servers, and not within a collective of all workers, which
        has a limit, while one of them evaluates or saves."""
        self._first(lambda worker: [] if worker.meet("") else None)

    @property
    def parcels(self) -> Sequence[Parcel]:
        """What each server owns."""
        return self.whole.parcels

    @property
    def rank(self) -> int:
        """Of the worker, among those that share a batch."""
        return self.share[0]

    @property
    def degree(self) -> int:
        """Ranks that share a batch."""
        return self.share[1] * self.inner.degree

    def cost(self) -> Cost:
        """Of a step, beside what ``inner`` costs."""
        up, down = self._up_bytes, self._down_bytes
        return worker_group(self.whole, up, down, workers=self.workers, ranks=self.size)

    # A step, as the loop sees it

    def arm(self, own: StepScalars) -> None:
        self.values = len(own.values)
        self.inner.arm(own)

    def finish(self) -> StepScalars:
        """Send the gradients; the sums over all workers."""
        scalars = self.inner.finish()
        reached, names = self._give(), self.whole.names
        flags = torch.tensor([*(name in reached for name in names), 0.0], dtype=torch.float64)
        flags[-1] = self.samples * self.shares / self.size  # ranks of one share have the same samples
        current().moved("all_reduce", flags.nbytes)
        dist.all_reduce(flags)  # and all have put their parts in place
        broken = any(float(each) for each in scalars.broken)
        mixed_up = self.inner.norm is not None and bool(torch.as_tensor(self.inner.norm).isnan())

        def push(worker: Worker) -> list[float]:
            if mixed_up:  # see Scatter: then no step is to be taken
                next(iter(self._ups.values())).fill_(torch.nan)
            for name, view in self._ups.items() if self.whole.compressed else ():
                worker.named[name].grad = view
            worker.reach(name for name, flag in zip(names, flags.tolist(), strict=False) if flag)
            worker.samples, worker.epoch, worker.last = float(flags[-1]), self.epoch, self.last
            worker.arm(replace(scalars, broken=[broken]))
            sums = worker.finish()
            assert worker.norm is not None
            not_finite = [*sums.broken, *[0.0] * self.workers][: self.workers]
            said = (sums.loss, sums.count, sums.stop, worker.norm, *sums.values, *not_finite)
            return [float(each) for each in said]

        loss, count, stop, norm, *every = self._first(push)
        values, every = every[: self.values], every[self.values :]
        self.norm = torch.tensor(norm, dtype=torch.float64)
        return StepScalars(loss, count, stop, [flag for flag in every for _ in range(self.inner.degree)], values)

    def step(self, loss: float, correction: float, norm: float) -> Updated:
        """Have the servers step, and take their weights."""

        def step(worker: Worker) -> list[float]:
            updated = worker.step(loss, correction, norm)
            return [float(updated.norm), float(updated.taken)]

        found, taken, *_ = self._first(step)
        self._take()
        return Updated(found, bool(taken))

    @property
    def gradients(self) -> list[Tensor]:
        """None to scale here: the servers do."""
        return []

    def clear(self) -> None:
        """Forget the gradients. If they were sent, and no step followed, nobody steps, and the training ends."""
        self.inner.clear()
        if self.worker is not None:
            self.worker.clear()
        self._unstage()

    def _unstage(self) -> None:
        """Forget gradients that were to be compressed; those that were not, the worker does."""
        for gradient in self._gradients if self.worker is not None and self.whole.compressed else ():
            gradient.zero_()

    def remove(self) -> None:
        """Leave the servers, and the parameters as they were found."""
        self.inner.remove()
        if self.worker is not None:
            self.worker.remove()

    def pull(self, *, averaged: bool = False) -> None:
        """Take the weights as they are now."""
        dist.barrier()  # all have read what came last
        self._first(lambda worker: worker.pull(averaged=averaged))
        self._take()

    def state(self) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """What each server keeps, whole: see ``mine``."""
        every = put_down(broadcast_object([] if self.worker is None else list(self.worker.kept())))
        dist.barrier()  # nothing is put there anew before all have read it
        return every

    def stop(self) -> None:
        """Let the training end here, for all workers."""
        self._first(lambda worker: worker.stop())


def own_world(plan: Plan, world: World, *, timeout: float) -> tuple[World, Group, Group]:
    """The world of this rank's worker, which may wait for others ``timeout`` seconds; the ranks in its place in all
    workers, and those with which it shares a batch where that reaches beyond its own. All ranks call it together, once.

    Worker i of groups of n is ranks i·n to i·n + n - 1. They talk to other workers where BatchNorm is over the whole
    batch, and where gradients are compared; for all else the worker group is the world.
    """
    size = plan.worker_size
    own = World(world.rank % size, size, world.device, world.folder)
    if plan.data == 1 or not dist.is_initialized():
        return own, None, None
    if size == 1:
        return own, dist.group.WORLD, dist.group.WORLD if plan.joins_batchnorms else None

    limit = timedelta(seconds=timeout)

    def line(key: Callable[[int], object]) -> dist.ProcessGroup:
        """Ranks with the same key; all ranks make all such groups."""
        lines: dict[object, list[int]] = {}
        for rank in range(world.size):
            lines.setdefault(key(rank), []).append(rank)
        made = {each: dist.new_group(ranks, timeout=limit) for each, ranks in lines.items()}
        return made[key(world.rank)]  # type: ignore[return-value]

    peers = line(lambda rank: rank % size)
    batch: Group = peers if plan.in_step else None
    if plan.in_step and plan.shares > plan.data:
        places = plan.worker.places
        same = lambda place: tuple(at for axis, at in place.items() if axis not in ("shard", "expert"))
        batch = line(lambda rank: same(places[rank % size]))
    own_group = line(lambda rank: rank // size)
    become_world(own_group, peers, *([batch] if batch not in (None, peers) else []))
    return own, peers, batch
