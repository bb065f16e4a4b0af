"""A worker of model servers that is several ranks: each holds a part of the model, by whatever layout.

To the servers the group is one worker. Its first rank has the connections, and a stand-in for the whole model whose
gradients and weights are in memory that all ranks of the group map: each rank copies its parts of the gradients there,
and of the weights from there. Nothing is gathered. What several ranks replicate, the first of them sends.

Within the group gradients are reduced as without servers (``inner``). ``finish``, ``step`` and ``pull`` are collective,
so all ranks have the same batch, the same weights, and repeat a batch together.

    memory    of a group 2P on the host, beside what each rank holds
    traffic   of a rank its part of the gradients up, of the weights down; one small all_reduce and two broadcasts
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import running_statistics
from meshfit.axes.place import Placed
from meshfit.checkpoint.box import Box, volume
from meshfit.checkpoint.pieces import ShardLayout, lie
from meshfit.cost import Cost
from meshfit.errors import RankError
from meshfit.events import current
from meshfit.exchange.allreduce import StepScalars
from meshfit.exchange.protocol import RepeatBatch
from meshfit.exchange.server_cost import BROADCAST, Payload, worker_group
from meshfit.exchange.update import Updated
from meshfit.server.shared_memory import SharedMemory
from meshfit.server.shared_model import SharedPart, hand_out, receive
from meshfit.server.snapshot import put_down
from meshfit.server.worker import Worker

FACTS = 9
"""Numbers that are broadcast: whether the batch is to be done again, and what ``WorkerGroup._mirror`` reads. Up to 4
follow (loss, count, stop, norm), and a flag of each worker for a loss that is not finite."""


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
        self.samples = 0.0
        """Of this rank in the batch under way."""
        self.norm: Tensor | None = None
        """Of the gradients of all workers, as summed, after ``finish``."""
        self.moved = {"push": 0, "pull": 0}
        """Bytes that went up and came down, so far."""
        self.parts, self.statistics = self._parts(*self._share(model, reach, address))
        self._facts(lambda: [])
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
            connection.moved = None
        connections = [connection.memory for connection in self.worker.connections]
        hand_out(address, [memory.fd for memory in (*connections, *beside) if memory.fd is not None], self.size - 1)
        return connections, beside

    def _parts(
        self, connections: list[SharedMemory], beside: list[SharedMemory]
    ) -> tuple[list[SharedPart], list[SharedPart]]:
        whole, ups, downs = self.whole, {}, {}
        self._gradients = [memory.up for memory in (beside[1:] if whole.compressed else connections)]
        for parcel, up, memory in zip(whole.parcels, self._gradients, connections, strict=True):
            ups |= parcel.views(up[: parcel.bytes])
            downs |= parcel.views(memory.down[: parcel.bytes])
        self._ups = ups
        running = whole.running.views(beside[0].up)
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        held = [(name, tensor, lie(self.placed, tensor)) for name, tensor in trained.items()]
        norms = [
            (name, tensor, lie(self.placed, tensor)) for name, tensor in running_statistics(self.placed.model).items()
        ]
        mine = [(name, piece.box) for name, _, lies in (*held, *norms) for piece in lies.pieces if volume(piece.box)]
        every: list[list[tuple[str, Box]]] = [mine] * self.size
        dist.all_gather_object(every, mine)
        first: dict[tuple[str, Box], int] = {}
        for rank, boxes in enumerate(every):
            for each in boxes:
                first.setdefault(each, rank)
        self._check(first, ups)

        def parts(
            some: Sequence[tuple[str, Tensor, ShardLayout]], up: dict[str, Tensor], down: dict[str, Tensor]
        ) -> Iterator[SharedPart]:
            for name, tensor, lies in some:
                for piece in lies.pieces:
                    if volume(piece.box):
                        at = tuple(slice(*ends) for ends in piece.box)
                        sends = first[name, piece.box] == dist.get_rank()
                        yield SharedPart(name, tensor, piece, up[name][at], down[name][at], sends)

        return list(parts(held, ups, downs)), list(parts(norms, running, running))

    def _check(self, first: dict[tuple[str, Box], int], whole: dict[str, Tensor]) -> None:
        """Every element is some rank's to send, once."""
        sent = dict.fromkeys(whole, 0)
        for name, box in first:
            if name in sent:
                sent[name] += volume(box)
        wrong = [name for name, tensor in whole.items() if sent[name] != tensor.numel()]
        if wrong:
            raise RankError(
                f"of {wrong[0]} the ranks of a worker hold {sent[wrong[0]]} elements, and it has "
                f"{whole[wrong[0]].numel()}"
            )

    @torch.no_grad()
    def _give(self) -> list[str]:
        """Put what is this rank's to send where it is sent from. Names of the parameters it has gradients of."""
        reached, moved = [], 0
        for part in self.parts:
            gradient = part.tensor.grad
            if gradient is not None:
                reached.append(part.name)
                if part.sends:
                    part.up.copy_(part.piece.of(gradient))
            moved += part.nbytes * part.sends
        for part in self.statistics:
            if part.sends:
                part.up.copy_(part.piece.of(part.tensor))
                moved += part.nbytes
        self.moved["push"] += moved
        current().moved("push", moved)
        return reached

    @torch.no_grad()
    def _take(self) -> None:
        """Have the weights, and the statistics, that have come."""
        moved = 0
        for part in (*self.parts, *self.statistics):
            part.piece.of(part.tensor.detach()).copy_(part.down)
            moved += part.nbytes
        self.placed.changed()
        self.moved["pull"] += moved
        current().moved("pull", moved)

    # What the first rank does, broadcast to all

    def _facts(self, act: Callable[[], list[float]]) -> list[float]:
        """What ``act`` returns in the first rank, on all; ``RepeatBatch`` too: weights and place are then new."""
        said = torch.zeros(BROADCAST + self.workers, dtype=torch.float64)
        worker = self.worker
        if worker is not None:
            again, found = 0.0, []
            try:
                found = act()
            except RepeatBatch:
                again = 1.0
            place, ticket = worker.share, -1 if worker.ticket is None else worker.ticket
            facts = [again, ticket, *place, worker.version, worker.taken, worker.seen, worker.staleness]
            said[: FACTS + len(found)] = torch.tensor([*facts, worker.learning_rate, *found], dtype=torch.float64)
        current().moved("broadcast", said.nbytes)
        dist.broadcast(said, 0)
        again, *rest = said.tolist()
        self._mirror(*rest[: FACTS - 1])
        if again:
            self.inner.clear()
            self._unstage()
            self._take()
            raise RepeatBatch
        return rest[FACTS - 1 :]

    def _mirror(
        self,
        ticket: float,
        at: float,
        of: float,
        version: float,
        taken: float,
        seen: float,
        staleness: float,
        learning_rate: float,
    ) -> None:
        self.ticket = None if ticket < 0 else int(ticket)
        """The batch to work on; None: all are done."""
        self.share = int(at), int(of)
        """Which part of the batch is this worker's."""
        self.version, self.taken, self.seen, self.staleness = int(version), int(taken), seen, int(staleness)
        self.learning_rate = learning_rate

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
        parts = (*self.parts, *self.statistics)
        up, down = sum(part.nbytes for part in parts if part.sends), sum(part.nbytes for part in parts)
        return worker_group(self.whole, up, down, workers=self.workers, ranks=self.size)

    # A step, as the loop sees it

    def arm(self, loss: Tensor | float, count: Tensor | float, *, stop: bool, broken: Tensor | bool) -> None:
        self.inner.arm(loss, count, stop=stop, broken=broken)

    def finish(self) -> StepScalars:
        """Send the gradients; the sums over all workers."""
        scalars = self.inner.finish()
        reached, names = set(self._give()), self.whole.names
        flags = torch.tensor([*(name in reached for name in names), 0.0], dtype=torch.float64)
        flags[-1] = self.samples * self.shares / self.size  # ranks of one share have the same samples
        current().moved("all_reduce", flags.nbytes)
        dist.all_reduce(flags)  # and all have put their parts in place
        loss, count, stop = (float(each) for each in (scalars.loss, scalars.count, scalars.stop))
        broken = any(float(each) for each in scalars.broken)
        mixed_up = self.inner.norm is not None and bool(torch.as_tensor(self.inner.norm).isnan())

        def push() -> list[float]:
            worker = self.worker
            assert worker is not None
            if mixed_up:  # see Scatter: then no step is to be taken
                next(iter(self._ups.values())).fill_(torch.nan)
            for name, view in self._ups.items() if self.whole.compressed else ():
                worker.named[name].grad = view
            worker.reach(name for name, flag in zip(names, flags.tolist(), strict=False) if flag)
            worker.samples = float(flags[-1])
            worker.arm(loss, count, stop=bool(stop), broken=broken)
            sums = worker.finish()
            assert worker.norm is not None
            facts = [float(each) for each in sums.broken][: self.workers]
            return [float(sums.loss), float(sums.count), float(sums.stop), float(worker.norm), *facts]

        loss, count, stop, norm, *every = self._facts(push)
        self.norm = torch.tensor(norm, dtype=torch.float64)
        return StepScalars(loss, count, stop, [flag for flag in every for _ in range(self.inner.degree)])

    def step(self, loss: float, correction: float, norm: float) -> Updated:
        """Have the servers step, and take their weights."""

        def step() -> list[float]:
            assert self.worker is not None
            updated = self.worker.step(loss, correction, norm)
            return [float(updated.norm), float(updated.taken)]

        found, taken, *_ = self._facts(step)
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

        def pull() -> list[float]:
            assert self.worker is not None
            self.worker.pull(averaged=averaged)
            return []

        self._facts(pull)
        self._take()

    def state(self) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """What each server keeps, whole: see ``mine``."""
        found: list[Any] = [None if self.worker is None else [str(path) for path in self.worker.kept()]]
        dist.broadcast_object_list(found)
        every = put_down([Path(path) for path in found[0]])
        dist.barrier()  # nothing is put there anew before all have read it
        return every

    def stop(self) -> None:
        """Let the training end here, for all workers."""

        def stop() -> list[float]:
            assert self.worker is not None
            self.worker.stop()
            return []

        self._facts(stop)
