"""Local steps: every rank steps its own optimizer on its own gradients, and now and then weights are averaged.

    local     every ``h`` steps all ranks take the mean of their weights
    diloco    ... and step with it: what the mean has changed since the last time is a gradient for an outer optimizer,
              SGD with Nesterov momentum. The state of the inner optimizers stays where it is

Ranks weigh in the mean by what they have counted since the last one (samples, or what the loss is a mean over): after
one step of plain SGD the mean is the step of all-reduce, whatever the shares.

With ``overlap=d`` the mean is taken while the next ``d`` steps run: what it would have changed is then added to where
each rank has come to since.

    memory    gradients, optimizer state whole on every rank; diloco two more copies of the weights (the last common
              ones, and momentum), overlap one or two while a mean is under way
    traffic   2P(n-1)/n bytes every h steps for P bytes of weights (all-reduce: every step)
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import running_statistics
from meshfit.comm.flat import FlatLayout, aligned
from meshfit.comm.objects import all_gather_object
from meshfit.cost import CollectiveCall, Cost
from meshfit.errors import PlanError
from meshfit.events import current
from meshfit.exchange.allreduce import split_buckets
from meshfit.exchange.update import StepScalars
from meshfit.torch_private.kernels import foreach_copy_

NUMBERS = 2  # count, stop: at the end of the last bucket
OUTER_LEARNING_RATE, OUTER_MOMENTUM = 1.0, 0.5  # DiLoCo's own, 0.7 and 0.9, need hundreds of rounds: docs/LOG.md


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """SGD with Nesterov momentum on what a round of local steps has changed."""

    lr: float = OUTER_LEARNING_RATE
    momentum: float = OUTER_MOMENTUM


@dataclass(slots=True)
class _AveragedBucket:
    tensors: list[Tensor]
    layout: FlatLayout
    flat: Tensor
    common: Tensor | None = None
    """The weights all ranks had last."""
    momentum: Tensor | None = None
    sent: Tensor | None = None
    """What this rank had when the mean under way was begun."""
    work: Any = None
    began: float = 0.0
    """When it was handed over."""

    def read(self) -> Tensor:
        """The tensors of this rank as they are now."""
        values = self.flat.new_zeros(self.layout.size)
        if self.tensors:
            foreach_copy_(self.layout.views(values), [t.detach() for t in self.tensors])
        return values

    def write(self, values: Tensor) -> None:
        if self.tensors:
            foreach_copy_([t.detach() for t in self.tensors], self.layout.views(values))


class Local:
    """Has the form of the other exchanges; ``clear``, after the update, is where ranks meet."""

    summed = False

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        every: int,
        outer: Outer | None = None,
        overlap: int = 0,
    ):
        if every < 1 or not 0 <= overlap < every + (every == 1):
            raise PlanError(
                f"every={every} overlap={overlap} makes no sense", "every counts steps from 1, overlap is below it"
            )
        self.group, self.every, self.outer, self.overlap = group, every, outer, overlap
        self.degree = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.norm: Tensor | None = None
        """Each rank has its own gradients, and sees for itself."""
        self.step = 0
        self.rounds = 0
        """How often weights were averaged."""
        self._device = device
        self._count = 0.0
        self._stop = self._stopping = 0.0
        self._own = StepScalars()
        for p in self.parameters:
            p.grad = None
        self._running = [b for b in running_statistics(model).values() if b.is_floating_point()]
        self._buckets = [] if group is None else _buckets(self.parameters, self._running, device)
        self.begin()

    def begin(self) -> None:
        """All ranks have the same weights, and begin from there."""
        for bucket in self._buckets if self.outer is not None else ():
            bucket.common = bucket.read()
            bucket.momentum = torch.zeros_like(bucket.common)

    def halt(self) -> None:
        """Let all ranks stop, when they meet next."""
        self._stop = 1.0

    def agree(self, error: Exception | None) -> None:
        """Raise what any rank has met, on all of them; the weights are those of all. All ranks call it together."""
        every = [error] if self.group is None else all_gather_object(error, self.group)
        if (first := next((each for each in every if each is not None), None)) is not None:
            self.settle()
            raise first

    # A step, as the loop sees it

    def arm(self, own: StepScalars) -> None:
        """The next backward is the last of this step."""
        self._own = own

    def finish(self) -> StepScalars:
        """This rank's own words. Only whether to stop is agreed on, when weights are averaged: it then shows here, in
        the next step. A rank without samples has no gradient: its step changes nothing."""
        own, loss, stop = self._own, self._own.loss, float(self._own.stop)
        count = float(own.count)  # the host waits: a rank whose targets are all left out must not step
        self._count += count
        self._stop = max(self._stop, stop)
        if not count:
            for p in self.parameters:
                p.grad = None
            loss, count = 0.0, 1.0
        stop = stop if self.group is None else self._stopping
        return replace(own.of_rank(self.rank, self.degree), loss=loss, count=count, stop=stop)

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def clear(self) -> None:
        """Forget the gradients; average, if it is time."""
        for p in self.parameters:
            p.grad = None
        if self.group is None:
            return
        self.step += 1
        if self.overlap and self._under_way and self.step % self.every == self.overlap % self.every:
            self._land()
        if self.step % self.every == 0:
            self._begin()
            if not self.overlap:
                self._land()

    def remove(self) -> None:
        for p in self.parameters:
            p.grad = None

    # Averaging

    @property
    def _under_way(self) -> bool:
        return any(bucket.work is not None for bucket in self._buckets)

    @torch.no_grad()
    def _begin(self) -> None:
        for bucket in self._buckets:
            values = bucket.read()
            if self.overlap:
                bucket.sent = values.clone()
            bucket.flat[: bucket.layout.size] = values.mul_(self._count)
        for at, number in ((-NUMBERS, self._count), (-NUMBERS + 1, self._stop)):
            self._buckets[-1].flat[at].fill_(number)  # an assignment of a number would be waited for
        for bucket in self._buckets:
            current().moved("all_reduce", bucket.flat.nbytes)
            bucket.began = time.perf_counter()
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        self._count = 0.0

    @torch.no_grad()
    def _land(self) -> None:
        for bucket in self._buckets:
            with current().waiting("average"):
                bucket.work.wait()
            bucket.work = None
            current().arrived(bucket.began)
        count, self._stopping = self._buckets[-1].flat[-NUMBERS:].tolist()
        self.rounds += 1
        if not count:  # no rank has seen a sample
            return
        for bucket in self._buckets:
            target = self._outer_step(bucket, bucket.flat[: bucket.layout.size] / count)
            if bucket.sent is not None:
                target = bucket.read().add_(target).sub_(bucket.sent)
                bucket.sent = None
            bucket.write(target)

    def _outer_step(self, bucket: _AveragedBucket, mean: Tensor) -> Tensor:
        if self.outer is None or bucket.common is None or bucket.momentum is None:
            return mean
        change = bucket.common - mean
        bucket.momentum.mul_(self.outer.momentum).add_(change)
        bucket.common.sub_(change.add_(bucket.momentum, alpha=self.outer.momentum), alpha=self.outer.lr)
        return bucket.common

    @torch.no_grad()
    def settle(self) -> None:
        """At the end: the same weights on all ranks, with all that they have learned. All ranks call it together."""
        if self.group is None:
            return
        if self._under_way:
            self._land()
        if self.step % self.every:
            overlap, self.overlap = self.overlap, 0
            self._begin()
            self._land()
            self.overlap = overlap

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Within it all ranks have the mean of their weights, to be evaluated; after it their own again."""
        if self.group is None:
            yield
            return
        with torch.no_grad():
            kept = [bucket.read() for bucket in self._buckets]
            for bucket, own in zip(self._buckets, kept, strict=True):
                mean = own / self.degree
                dist.all_reduce(mean, group=self.group)
                bucket.write(mean)
        try:
            yield
        finally:
            for bucket, own in zip(self._buckets, kept, strict=True):
                bucket.write(own)

    def cost(self) -> Cost:
        running = [b.numel() for b in self._running]
        return cost(self.parameters, self.degree, outer=self.outer is not None, overlap=self.overlap, running=running)


def cost(
    parameters: list[nn.Parameter], degree: int, *, outer: bool = False, overlap: int = 0, running: Iterable[int] = ()
) -> Cost:
    """Of one rank of ``degree``. What is moved is moved once every h steps; ``running``: sizes of statistics."""
    gradients = sum(p.numel() * p.element_size() for p in parameters)
    if degree == 1:
        return Cost(held={"gradients": gradients})
    last = _wide(parameters[0].dtype if parameters else torch.float32).itemsize
    averaged = sum(aligned(p.numel() * _wide(p.dtype).itemsize) for p in parameters)
    averaged += sum(aligned(size * last) for size in running)
    moved, buckets = averaged + NUMBERS * last, len(split_buckets(parameters)) or 1
    held = {"gradients": gradients, "averaging": moved + averaged * (2 * outer + bool(overlap))}
    hidden = "steps" if overlap else ""
    said = CollectiveCall(
        *("all_reduce", moved / buckets, degree),
        count=buckets,
        axis="data",
        dtype="float32",
        phase="step",
        hidden=hidden,
        once=True,
    )
    return Cost(held=held, collectives=(said,))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which weights are averaged."""
    return torch.promote_types(dtype, torch.float32)


def _buckets(parameters: list[nn.Parameter], running: list[Tensor], device: torch.device) -> list[_AveragedBucket]:
    """As all-reduce groups gradients; statistics, and the numbers, go with the last."""
    groups: list[list[Tensor]] = [list(group) for group in split_buckets(parameters)] or [[]]
    groups[-1] += running
    made = []
    for group in groups:
        dtype = _wide(group[0].dtype) if group else torch.float32
        extra = NUMBERS if group is groups[-1] else 0
        layout = FlatLayout(group, dtype)
        made.append(_AveragedBucket(group, layout, torch.zeros(layout.size + extra, dtype=dtype, device=device)))
    return made
