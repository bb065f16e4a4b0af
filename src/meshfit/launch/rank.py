"""What a rank does, from the fork to its last breath.

It takes over the caller's surroundings (sys.path, folder, environment, what it set in torch), joins the others,
works, and sends what the work returned, or how it failed. Then it waits until the caller lets go of it: ranks leave
together, so none sees a connection close while it still works.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from meshfit.errors import MeshfitError, out_of_memory
from meshfit.launch.channel import Channel, encode
from meshfit.launch.heartbeat import SILENCE, Heart, SharedBoard, step_under_way
from meshfit.launch.importing import importing_job
from meshfit.launch.logging_settings import LoggingSettings
from meshfit.launch.stalls import timed_out
from meshfit.launch.world import World, connect, disconnect

# How gloo and NCCL say that another rank is gone: rarely the first cause of anything.
MISMATCH = "collective mismatch"  # what gloo says where ranks call different ones
PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote process exited")

LIBC = ctypes.CDLL(None)
LINE_BUFFERED = 1

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

Work = Callable[[World, Channel], Any]


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """What a script sets in torch for its whole process, and numbers depend on."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """Of tensors made without one."""
    matmul: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: int = field(default_factory=torch.get_deterministic_debug_mode)

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        if self.matmul != torch.get_float32_matmul_precision():
            torch.set_float32_matmul_precision(self.matmul)
        if self.deterministic != torch.get_deterministic_debug_mode():
            torch.set_deterministic_debug_mode(self.deterministic)


@dataclass(frozen=True, slots=True)
class Start:
    """The caller's surroundings, and the rank's place in the world."""

    world: World
    timeout: float
    joined: bool = True
    """Whether it is in a process group with the others."""
    silence: float = SILENCE
    """Seconds after which it would be reported as stalled."""
    path: list[str] = field(default_factory=lambda: list(sys.path))
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    folder: str = field(default_factory=os.getcwd)
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    settings: TorchSettings = field(default_factory=TorchSettings)


@dataclass(frozen=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, as text; a ``MeshfitError`` also as itself."""

    headline: str
    trace: str
    error: MeshfitError | None
    peer_gone: bool
    """It has lost a connection, or waited too long: probably another rank is the cause."""
    step: int = 0
    """In which it was; 0: in none."""
    out_of_memory: bool = False
    held: dict[str, int] = field(default_factory=dict)
    """Bytes by kind that it then had."""

    @property
    def did(self) -> str:
        """What its rank did, in words."""
        return f"ran out of memory: {self.headline}" if self.out_of_memory else f"raised {self.headline}"

    @classmethod
    def of(cls, error: BaseException) -> Self:
        trace = "".join(traceback.format_exception(type(error), error, _outside(error.__traceback__)))
        headline = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        gone = isinstance(error, RuntimeError) and any(words in str(error) for words in (*PEER_GONE, MISMATCH))
        own = error if isinstance(error, MeshfitError) else None
        held = dict(getattr(error, "held", {}))
        return cls(headline, trace, own, gone or timed_out(error), step_under_way(), out_of_memory(error), held)


@dataclass(frozen=True, slots=True)
class Left:
    """Said by one that leaves by ``sys.exit``."""

    step: int


def main(end: socket.socket, folder: str) -> NoReturn:
    """Be a rank. ``folder`` is where the ranks of this run meet."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _open_many()
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    with suppress(Exception):  # so does what C prints
        LIBC.setvbuf(ctypes.c_void_p.in_dll(LIBC, "stdout"), None, LINE_BUFFERED, 0)
    if random := sys.modules.get("numpy.random"):
        random.seed()  # else every rank forked from one template draws the same
    channel = Channel(end)
    try:
        *streams, board = channel.recv_fds(3)
        for fd, ours in zip(streams, (1, 2), strict=True):
            os.dup2(fd, ours)
            os.close(fd)
        start: Start = channel.recv()
        heart = Heart(SharedBoard(board), start.world.rank, silence=start.silence)
        heart.start()
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environ)
        sys.path[:], sys.argv[:] = start.path, start.argv
        start.logging.apply()
        start.settings.apply()
        with importing_job():
            work: Work = channel.recv()
        world = replace(start.world, folder=start.world.folder or folder)
        connect(world if start.joined else replace(world, size=1), folder=folder, timeout=start.timeout)
        value = work(world, channel)
        heart.stop()
        _flush()
        with encode(Returned(value), what="the result", remedy="return numbers, arrays or tensors") as result:
            channel.send_encoded(result)
    except SystemExit as leave:
        _flush()
        with suppress(OSError):
            channel.send(Left(step_under_way()))
        os._exit(leave.code if isinstance(leave.code, int) else int(leave.code is not None))
    except BaseException as error:
        _flush()
        channel.send(Raised.of(error))
        channel.until_finished()  # nothing is torn down before the caller knows
        os._exit(1)
    channel.until_finished()
    disconnect()
    _flush()
    os._exit(0)


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` from the user's first frame, or from the library's that raised; all of it if all is meshfit's own."""
    first, inner = None, trace
    while inner:
        path = inner.tb_frame.f_code.co_filename
        if path.startswith(OURS):
            first = None  # what came before was a library's, between frames of ours
        else:
            first = first or inner
            if not path.startswith(LIBRARIES):
                break
        inner = inner.tb_next
    return first or trace


def _open_many() -> None:
    """As many files and connections as this process may open: each that somebody leaves open costs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    LIBC.fflush(None)
