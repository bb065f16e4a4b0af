"""Gradients summed over ranks while backward still runs.

Gradients live in flat buckets, filled in the order in which backward makes them. A hook on each parameter
counts; a full bucket is summed at once, in the background, buckets always in the same order on every rank.
The scalars of the step are in the last bucket: the loss, what it is a mean over, whether to stop, whose loss was
not finite. So no step needs a collective of its own for them.

    memory    the buckets are the gradients: nothing beside them
    traffic   2P(n-1)/n bytes a step for P bytes of gradients, in ceil(P / 25 MiB) calls or a few more; on GPUs over two
              communicators in turn, in the same order on all ranks

Why not torch's DDP: it wraps the forward, so a step function that calls parts of the model, or calls it twice,
escapes it; it rebuilds its buckets after the first step, so a restarted run sums in another order; it must be told
of unused parameters. Hooks on parameters need none of it.

[Note: unused parameters]
One device leaves the gradient of a parameter that took no part at None, and optimizers then skip it. Here a
parameter has a gradient if any rank reached it. Whether each was reached is in the last bucket too. A rank that reached
all of them need not look: what it reached was reached somewhere. A rank that did not waits for the sums (its
last bucket cannot have gone before it knows) and drops the gradients that nobody made.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.comm.flat import FlatLayout, aligned
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.errors import JobError
from meshfit.events import current
from meshfit.exchange.update import STEP_SCALARS, StepScalars
from meshfit.torch_private.tensors import grad_dtype
from meshfit.transfer import together, upload

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # small, so that the first sum starts early


@dataclass(slots=True)
class _Bucket:
    flat: Tensor
    size: int  # elements of gradients, in front of the step scalars
    parameters: list[nn.Parameter]
    gradients: list[Tensor]  # views of flat, shaped like the parameters
    waiting: int = 0
    work: dist.Work | None = None
    began: float = 0.0
    """When it was handed over."""


class AllReduce:
    """Sums the gradients of ``parameters`` over ``group``. Without a group it leaves them as they are. ``second``: the
    same ranks again, for every other bucket: two communicators keep a network busy that one waits for. ``values``:
    numbers to be summed beside the loss."""

    summed = True
    """Whether what ``finish`` tells, and the gradients, are of all ranks."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        device: torch.device,
        second: dist.ProcessGroup | None = None,
        values: int = 0,
    ):
        self.group, self._turns = group, (group, second or group)
        self.degree = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad or group is None]
        """Alone also those that a forward, or the caller, may let train later."""
        self.norm: Tensor | None = None
        """Every rank holds all gradients, and can see for itself."""
        self.numbers = torch.zeros(STEP_SCALARS + self.degree + values, device=device)
        self._alone = StepScalars()
        self._buckets: list[_Bucket] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reached: set[int] = set()
        self._armed = False
        self._next = 0
        for parameter in self.parameters:
            parameter.grad = None  # what the user left there is not part of the first step
        if group is not None:
            self._build(device)

    def _build(self, device: torch.device) -> None:
        scalars = self.numbers.numel() + len(self.parameters)
        grouped = _grouped(self.parameters)
        for group in grouped:
            dtype = _dtype(group, self.parameters)
            extra = scalars if group is grouped[-1] else 0
            layout = FlatLayout(group, dtype)
            flat = torch.zeros(layout.size + extra, dtype=dtype, device=device)
            self._buckets.append(_Bucket(flat, layout.size, group, layout.views(flat)))
        last = self._buckets[-1].flat
        self.numbers, self._reached_flags = last[-scalars:].split([self.numbers.numel(), len(self.parameters)])
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                parameter.grad = gradient
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._counter(bucket)))

    def _counter(self, bucket: _Bucket):
        def count(parameter: nn.Parameter) -> None:
            self._reached.add(id(parameter))
            if not self._armed:
                return
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch()
            elif bucket.waiting < 0:
                raise JobError(
                    "a gradient was added to after it had been summed over ranks",
                    "reentrant checkpointing does that: checkpoint(..., use_reentrant=False) does not",
                )

        return count

    def arm(self, own: StepScalars) -> None:
        """The next backward is the last of this step: gradients that it completes may go."""
        if self.group is None:
            self._alone = own
            return
        numbers = own.of_rank(self.rank, self.degree).numbers
        self.numbers.copy_(together(numbers, self.numbers.device, torch.float64))
        self._next, self._armed = 0, True
        for bucket in self._buckets:
            bucket.waiting, bucket.work = len(bucket.parameters), None
        self._reached_flags.fill_(1.0)

    def _launch(self) -> None:
        """Start the sums of all buckets that are complete, in order."""
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            bucket = self._buckets[self._next]
            current().moved("all_reduce", bucket.flat.nbytes)
            bucket.began = time.perf_counter()
            bucket.work = dist.all_reduce(bucket.flat, group=self._turns[self._next % 2], async_op=True)
            self._next += 1

    def finish(self) -> StepScalars:
        """Wait until every gradient is summed. Call after the backward that ``arm`` announced."""
        self._armed = False
        if self.group is None:
            return self._alone
        unreached = []
        if len(self._reached) < len(self.parameters):
            unreached = [i for i, p in enumerate(self.parameters) if id(p) not in self._reached]
        if unreached:
            self._reached_flags.index_fill_(0, upload(unreached, self._reached_flags.device), 0.0)
        asks = any(self.parameters[i].numel() for i in unreached)  # of others' experts there is nothing here
        for bucket in self._buckets[self._next :]:
            bucket.waiting = 0  # what it still waits for was reached in an earlier pass, or not at all
        self._launch()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            current().arrived(bucket.began)
        reached = self._reached_flags.tolist() if asks else []  # the host waits: see [Note: unused parameters]
        for i in unreached:
            if not (self.parameters[i].numel() and reached[i]):
                self.parameters[i].grad = None
        return StepScalars.from_numbers(self.numbers, self.degree)

    @property
    def gradients(self) -> list[Tensor]:
        """Tensors that together hold every gradient once; they may be scaled in place."""
        if self.group is None:
            return [p.grad for p in self.parameters if p.grad is not None]
        return [bucket.flat[: bucket.size] for bucket in self._buckets if bucket.size]

    def clear(self) -> None:
        """Forget the gradients, ready for the next step."""
        self._reached.clear()
        if self.group is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        for bucket in self._buckets:
            bucket.flat.zero_()
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                if parameter.grad is not gradient:
                    parameter.grad = gradient

    def remove(self) -> None:
        """Leave the parameters as they were found."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None

    def cost(self) -> Cost:
        return cost([p for p in self.parameters if p.requires_grad], self.degree)


def cost(parameters: list[nn.Parameter], degree: int) -> Cost:
    """Of summing the gradients of ``parameters``, a step, on one of ``degree`` ranks."""
    if degree == 1:
        return Cost(held={"gradients": sum(_bytes(p) for p in parameters)})
    buckets = _grouped(parameters)
    calls = []
    for bucket in buckets:
        last, dtype = bucket is buckets[-1], _dtype(bucket, parameters)
        size = sum(aligned(_bytes(p)) for p in bucket)
        size += (STEP_SCALARS + degree + len(parameters)) * dtype.itemsize if last else 0
        how = {"axis": "data", "dtype": str(dtype).removeprefix("torch."), "phase": "backward", "once": True}
        calls.append(CollectiveCall("all_reduce", size, degree, hidden="" if last else "backward", **how))
    moved = sum(call.bytes for call in calls)
    return Cost(held={"gradients": moved}, collectives=tallied(calls))


def _bytes(parameter: nn.Parameter) -> int:
    """Of its gradient."""
    return parameter.numel() * grad_dtype(parameter).itemsize


def _dtype(bucket: list[nn.Parameter], parameters: list[nn.Parameter]) -> torch.dtype:
    """Of a bucket among those of ``parameters``; of one that has the scalars alone, as exact as the others are."""
    if bucket:
        return grad_dtype(bucket[0])
    double = any(grad_dtype(p) in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if double else torch.float32


def _grouped(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by bucket; the last has room for the scalars, or is theirs alone."""
    grouped = split_buckets(parameters)
    if not grouped or grad_dtype(grouped[-1][0]) not in (torch.float32, torch.float64):
        grouped.append([])
    return grouped


def split_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped for summing: in reverse, as backward reaches them, one dtype a bucket."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        bucket, size = filling.get(grad_dtype(parameter), ([], 0))
        limit = BUCKET_BYTES if buckets and bucket is not buckets[0] else FIRST_BUCKET_BYTES
        if not bucket or size >= limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[grad_dtype(parameter)] = (bucket, size + _bytes(parameter))
    return buckets
