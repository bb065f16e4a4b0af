"""Rank 0 of n, alone: a process group like torch's ``fake`` one, whose collectives take the time of their bytes.

    connect(ranks=8)
    LINK.bandwidth = 400e9

A collective gives this rank what it would have if all ranks were like it: a gather its own part n times, a sum its own
term. It runs on a stream of its group's own, after what is queued on the current one, as NCCL's do: the copy that fills
the result, then a kernel of one thread that sleeps for

    all_gather, reduce_scatter, all_to_all   (n - 1) / n of the larger side
    all_reduce                               twice that
    broadcast, send, receive                 all of it

over ``LINK.bandwidth``, and ``LINK.latency`` beside. Whoever waits for it lets the current stream wait. On CPUs nothing
is delayed.
"""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

import os
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "delayed_nccl" if torch.cuda.is_available() else "delayed"


@dataclass
class Link:
    bandwidth: float = float("inf")
    """Bytes a second, of one rank in one direction."""
    latency: float = 0.0
    """Seconds that every collective takes beside."""
    cycles: float = 0.0
    """Of the GPU's clock, a second."""
    bytes: float = 0.0
    """Sent since this was last set to 0."""
    calls: int = 0

    def calibrate(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
        self.cycles = 100_000_000 / (start.elapsed_time(end) / 1e3)

    def count(self, sent: float) -> None:
        self.bytes, self.calls = self.bytes + sent, self.calls + 1

    def sleep(self, sent: float) -> None:
        seconds = sent / self.bandwidth + self.latency
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self.cycles))


LINK = Link()


class DelayedWork(dist._Work):
    """Holds on to its tensors until somebody has waited for it, as NCCL's work does."""

    def __init__(self, event: torch.cuda.Event | None, tensors: Any):
        super().__init__()
        self.event, self.tensors = event, tensors
        self.future = torch.futures.Future()
        self.future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.tensors = None
        return True

    def is_completed(self) -> bool:
        return self.event is None or self.event.query()

    def get_future(self) -> Any:
        return self.future

    def _get_op_type(self) -> Any:
        return None


class DelayedGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._stream: torch.cuda.Stream | None = None
        self._name = ""

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _get_backend(self, device: torch.device) -> "DelayedGroup":
        return self

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=timedelta(minutes=10))

    def _issue(self, sent: float, tensors: Any, fill: Any = None) -> DelayedWork:
        """``fill`` now, and as long as ``sent`` bytes take."""
        LINK.count(sent)
        first = next((t for t in _flat(tensors) if isinstance(t, Tensor)), None)
        if first is None or not first.is_cuda:
            if fill is not None:
                fill()
            return DelayedWork(None, tensors)
        self._stream = self._stream or torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if fill is not None:
                fill()
            LINK.sleep(sent)
            event = torch.cuda.Event()
            event.record()
        return DelayedWork(event, tensors)

    @property
    def _others(self) -> float:
        return (self._size - 1) / self._size

    # Collectives, by the names of torch 2.11 and of 2.13

    def allreduce(self, tensors: Any, opts: Any = None) -> DelayedWork:
        return self._issue(2 * self._others * sum(t.nbytes for t in tensors), tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> DelayedWork:
        return self.allreduce(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> DelayedWork:
        return self._issue(sum(t.nbytes for t in tensors), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> DelayedWork:
        def fill() -> None:
            for every, own in zip(outputs, inputs, strict=True):
                for each in every:
                    each.copy_(own)

        sent = self._others * sum(each.nbytes for every in outputs for each in every)
        return self._issue(sent, (outputs, inputs), fill)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> DelayedWork:
        def fill() -> None:
            whole, own = output.view(-1), given.reshape(-1)
            if all(t.data_ptr() % 8 == 0 and t.nbytes % 8 == 0 for t in (whole, own)):
                whole, own = whole.view(torch.int64), own.view(torch.int64)  # single bytes are copied slowly
            whole.view(self._size, -1).copy_(own.expand(self._size, -1))

        return self._issue(self._others * output.nbytes, (output, given), fill)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> DelayedWork:
        def fill() -> None:
            output.view(-1).copy_(given.reshape(self._size, -1)[self._rank])

        return self._issue(self._others * given.nbytes, (output, given), fill)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> DelayedWork:
        def fill() -> None:
            for output, every in zip(outputs, inputs, strict=True):
                output.copy_(every[self._rank])

        sent = self._others * sum(each.nbytes for every in inputs for each in every)
        return self._issue(sent, (outputs, inputs), fill)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DelayedWork:
        works = [self._allgather_base(output, given) for output, given in zip(outputs, inputs, strict=True)]
        return works[-1]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DelayedWork:
        works = [self._reduce_scatter_base(output, given) for output, given in zip(outputs, inputs, strict=True)]
        return works[-1]

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> DelayedWork:
        def fill() -> None:
            for output, every in zip(outputs, inputs, strict=False):
                output.copy_(every[self._rank])

        return self._issue(self._others * self._size * sum(t.nbytes for t in outputs), (outputs, inputs), fill)

    def alltoall_base(
        self, output: Tensor, given: Tensor, taken: Any = None, sent: Any = None, opts: Any = None
    ) -> DelayedWork:
        def fill() -> None:
            rows = min(len(output), len(given))
            output[:rows].copy_(given[:rows])
            output[rows:].zero_()

        return self._issue(self._others * given.nbytes, (output, given), fill)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> DelayedWork:
        def fill() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                output.copy_(given) if output.shape == given.shape else output.zero_()

        return self._issue(self._others * sum(t.nbytes for t in inputs), (outputs, inputs), fill)

    def barrier(self, opts: Any = None) -> DelayedWork:
        return DelayedWork(None, None)

    def send(self, tensors: Any, target: int, tag: int = 0) -> DelayedWork:
        return self._issue(sum(t.nbytes for t in tensors), tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> DelayedWork:
        """Zeros; eight numbers are a greeting, which says who the other is."""

        def fill() -> None:
            for tensor in tensors:
                greeting = tensor.numel() == 8 and tensor.is_floating_point()
                tensor.fill_(float(dist.get_global_rank(self, source)) if greeting else 0)

        return self._issue(sum(t.nbytes for t in tensors), tensors, fill)

    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _flat(tensors: Any) -> Any:
    if isinstance(tensors, list | tuple):
        for each in tensors:
            yield from _flat(each)
    else:
        yield tensors


def connect(ranks: int) -> None:
    """Make this process rank 0 of ``ranks``, for torch and for meshfit."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {key: str(value) for key, value in place.items()}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}  # for heartbeats
    make = lambda store, rank, size, timeout: DelayedGroup(rank, size)
    dist.Backend.register_backend(NAME, make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, rank=0, world_size=ranks, store=store)
    made = dist.new_group
    dist.new_group = lambda *args, backend=None, **kwargs: made(*args, **kwargs)  # there is nobody to meet over gloo
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        LINK.calibrate()
