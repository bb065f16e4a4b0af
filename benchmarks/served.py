"""A training with model servers, put together by hand from the parts of meshfit.exchange."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.data import batchnorm
from meshfit.axes.precision import Precision
from meshfit.comm.group import RankGroup
from meshfit.data.datasets import open_source
from meshfit.data.loader import Batch, Loader
from meshfit.exchange.protocol import RepeatBatch
from meshfit.loss.objective import Objective
from meshfit.loss.probe import find_denominator
from meshfit.passes.loss_sum import LossSum
from meshfit.passes.whole import Passes
from meshfit.server.keeper import Keeper
from meshfit.server.server import Server
from meshfit.server.settings import ServerSettings
from meshfit.server.worker import ServerUpdate, Worker

CPU = torch.device("cpu")
SECRET = b"a secret of tests and benchmarks"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how the servers step."""

    build: Callable[[], nn.Module]
    data: Any
    loss: Any = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    )
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    batch_size: int = 8
    microbatches: int = 1
    shuffle: bool = False
    seed: int = 0
    clip: float | None = None
    ema: float | None = None
    late: str = "none"

    def server(self, terms: ServerSettings, *, servers: int, address: str, secret: bytes = SECRET) -> Server:
        """One of ``servers``, listening at ``address``."""
        model = self.build()
        optimizer = self.optimizer(list(model.parameters()))
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        how: dict[str, Any] = {"clip": self.clip, "ema": self.ema, "late": self.late}
        keeper = Keeper(model, optimizer, scheduler, index=terms.index, servers=servers, **how)
        return Server(keeper, terms, address=address, secret=secret)

    def loader(self, share: tuple[int, int], batch_size: int | None = None) -> Loader:
        return Loader(
            source=open_source(self.data),
            batch_size=batch_size or self.batch_size,
            rank=share[0],
            ranks=share[1],
            device=CPU,
            microbatches=self.microbatches,
            seed=self.seed,
            shuffle=self.shuffle,
        )


@dataclass
class Work:
    """One worker's part of a training."""

    training: Training
    worker: Worker
    model: nn.Module
    batch_size: int | None = None
    """Of a step of one worker, where they step apart."""
    slow: int = 1
    """Times that each gradient is computed; all but the last are thrown away."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        objective = Objective(self.training.loss, None)
        source = self.training.loader((0, 1)).source
        with torch.random.fork_rng(devices=[]):
            over = find_denominator(objective, self.model, source.few(), CPU)
        self.schedule = Passes(self.model, objective, LossSum(over, self.worker), Precision("fp32"), CPU)  # type: ignore[arg-type]
        self.update = ServerUpdate(self.worker, ema=self.training.ema is not None)
        self._loader = functools.cache(lambda share: self.training.loader(share, self.batch_size))

    def batch(self) -> Batch:
        """That of the worker's ticket, as it is shared now."""
        assert self.worker.ticket is not None
        loader = self._loader(self.worker.share)
        epoch, index = divmod(self.worker.ticket, loader.batches_per_epoch or 1)
        return next(iter(loader.epoch(epoch, index)))

    def steps(self, stop: Callable[[], bool] = lambda: False) -> Iterator[float]:
        """Train until no batch is left, yielding each step's loss."""
        worker = self.worker
        while (ticket := worker.ticket) is not None:
            batch = self.batch()
            worker.samples = sum(part.samples for part in batch.microbatches)
            for part in batch.microbatches * (self.slow - 1):
                self.schedule.objective(self.model, part.content).backward()
            if self.slow > 1:
                worker.forget()
            try:
                self.schedule(batch, stop)
                scalars = worker.finish()
                if scalars.stop:
                    worker.clear()
                    return
                correction = self.correction(batch, scalars.count)
                updated = self.update(worker.gradients, scalars.loss * correction, correction, worker.norm)
            except RepeatBatch:
                continue
            worker.clear()
            self.losses.append(float(scalars.loss * correction))
            self.norms.append(float(updated.norm))
            self.taken.append(bool(updated.taken))
            self.tickets.append(ticket)
            self.late.append(worker.staleness)
            yield self.losses[-1]

    def correction(self, batch: Batch, count: Tensor | float) -> float:
        """As ``LossSum`` says; where a worker is missing, a mean over samples is over those that are left."""
        if self.schedule.loss.over.kind == "samples" and self.worker.degree > 1:
            return batch.size / float(count) if count else float("nan")
        return float(self.schedule.loss.correction(batch, count))


def join_batchnorms(model: nn.Module, workers: int) -> None:
    """BatchNorm over all workers, in a world whose first ranks they are. All ranks call it together."""
    group = dist.new_group(list(range(workers)))
    if dist.get_rank() < workers:
        assert isinstance(group, dist.ProcessGroup)
        batchnorm.apply(model, RankGroup(group))
