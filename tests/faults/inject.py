"""Faults, injected where a run says that it is: in a rank, in a step, in a phase of it.

    fault = Fault("kill", rank=1, step=23, phase="exchange")
    fit(..., optimizer=lambda params: fault.install(torch.optim.AdamW(params)))

A run tells the phases of its steps to events.py; there a fault waits. Each happens for real: a signal, a segmentation
fault, a limit of the kernel. With ``mark``, a path, it happens once, however often the run is started again.
"""

import ctypes
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshfit.events import Events

PHASES = ("data", "forward_backward", "exchange", "update")
"""Of every step; "evaluate" and "checkpoint" of some."""


@dataclass(frozen=True)
class Fault:
    kind: str
    """One of KINDS."""
    rank: int
    step: int
    phase: str = "forward_backward"
    mark: str = ""
    """A file that is made when it happens: then it does not happen again."""
    steps: int = 1
    """In how many steps, from ``step`` on, where it happens each time."""
    seconds: float = 0.0

    def install(self, passed: Any) -> Any:
        """In this process, from now on; returns ``passed``, the optimizer."""
        span, fault = Events.span, self

        @contextmanager
        def faulty(events: Events, name: str, **about: Any) -> Iterator[Any]:
            with span(events, name, **about) as entered:
                due = fault.step <= events.step < fault.step + fault.steps
                if due and name == fault.phase and events.rank == fault.rank and fault._first():
                    KINDS[fault.kind](fault, passed)
                yield entered

        Events.span = faulty  # type: ignore[method-assign]
        return passed

    def _first(self) -> bool:
        if not self.mark:
            return True
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Injected(Exception):
    """Raised in a rank."""


def _kill(fault: Fault, optimizer: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault, optimizer: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _segfault(fault: Fault, optimizer: Any) -> None:
    ctypes.string_at(0)


def _raise(fault: Fault, optimizer: Any) -> None:
    raise Injected(f"in step {fault.step}, {fault.phase}")


def _exit(fault: Fault, optimizer: Any) -> None:
    sys.exit(0)


def _sleep(fault: Fault, optimizer: Any) -> None:
    time.sleep(fault.seconds)


def _gil(fault: Fault, optimizer: Any) -> None:
    """Held in C: no other thread of the process runs Python. Not by sleep(), which a signal would end."""
    sum(itertools.repeat(0, 10**12))


def _loop(fault: Fault, optimizer: Any) -> None:
    while True:
        pass


def _terminate(fault: Fault, optimizer: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _memory(fault: Fault, optimizer: Any) -> None:
    """What is there, and 64 MB; then more is asked for."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(bytearray(2**24))


def _descriptors(fault: Fault, optimizer: Any) -> None:
    """None left, from now on."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def _collective(fault: Fault, optimizer: Any) -> None:
    """That no other rank calls."""
    dist.broadcast(torch.ones(3, device=optimizer.param_groups[0]["params"][0].device), 0)


def _nan(fault: Fault, optimizer: Any) -> None:
    """In this rank's gradient of the first weight."""
    weight = optimizer.param_groups[0]["params"][0]
    handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * torch.nan)[1])


def _flip(fault: Fault, optimizer: Any) -> None:
    """A bit of the first weight."""
    weight = optimizer.param_groups[0]["params"][0]
    weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


KINDS = {
    "kill": _kill,
    "stop": _stop,
    "segfault": _segfault,
    "raise": _raise,
    "exit": _exit,
    "sleep": _sleep,
    "gil": _gil,
    "loop": _loop,
    "terminate": _terminate,
    "memory": _memory,
    "descriptors": _descriptors,
    "collective": _collective,
    "nan": _nan,
    "flip": _flip,
}
