"""Ranks that share one GPU over real NCCL, or CPU ranks over gloo, and wait for work: the rig of several benchmarks.

NCCL takes each rank for a host of its own (NCCL_HOSTID), so several may share a GPU. They talk over sockets, and their
kernels take turns: times mean something in ratios alone. Traffic is slow, so who hides it better shows.

    in the caller       world = World(__file__, 2, "nccl"); world.ready(); world.run({"row": "a"}, seconds=60)
    in each rank        with at_work() as (world, asked): asked(lambda said: {"took": ...})

A rank is the same script with ``--rank``.
"""

import contextlib
import faulthandler
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_SECONDS, GRACE_SECONDS = 120.0, 10.0
NOT_RUN = 4
"""Exit code: there is no GPU."""
RIG = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "2",
}
SMALL_BUFFERS = {"NCCL_BUFFSIZE": str(2**19)}
"""Memory for many communicators, and no room for a message whose receiver has not come; sockets are 4 times slower."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# In a rank


@contextlib.contextmanager
def at_work() -> Iterator[tuple[Any, Callable[[Answer], None]]]:
    """This rank's world, connected, and a function that answers all that is asked of it by standard input."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print goes with the errors
    import torch

    from meshfit.launch.world import connect, from_environment

    world = from_environment()
    assert world is not None
    connect(world)

    def asked(answer: Answer) -> None:
        print(json.dumps({"ready": world.rank}), file=answers, flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            try:
                said = answer(json.loads(line))
            except BaseException as error:
                lines = f"{type(error).__name__}: {error}".strip().splitlines()
                said = {"error": " | ".join(lines[:6]), "trace": _where(error)}
                traceback.print_exc()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            print(json.dumps({"seconds": time.perf_counter() - start, **said}), file=answers, flush=True)

    yield world, asked


def _where(error: BaseException) -> list[str]:
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)][-6:]


# In the caller


class World:
    """Ranks of ``script`` that wait for work."""

    def __init__(self, script: str, size: int, backend: str, *, one_queue: bool = False, fast: bool = False):
        """``one_queue``: CUDA_DEVICE_MAX_CONNECTIONS=1. ``fast``: NCCL's own buffers, where times are taken."""
        self.size, self.folder = size, Path(tempfile.mkdtemp(prefix="nccl-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.answers: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self.ranks: list[subprocess.Popen[str]] = []
        for r in range(size):
            place = {"RANK": str(r), "WORLD_SIZE": str(size), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(size)}
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            rig = {"NCCL_HOSTID": f"host{r}", **RIG} if backend == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
            rig |= {} if fast else SMALL_BUFFERS
            if one_queue:
                rig["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
            process = subprocess.Popen(
                [sys.executable, "-u", script, "--rank"],
                env={**os.environ, **place, **meet, **rig, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=open(self.folder / f"rank{r}.txt", "w"),  # noqa: SIM115
                text=True,
            )
            self.ranks.append(process)
            threading.Thread(target=self._listen, args=(r, process), daemon=True).start()

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.answers.put((rank, line))
        self.answers.put((rank, None))

    def ready(self) -> tuple[list[dict[str, Any]], bool]:
        """Wait until all ranks are connected."""
        return self._heard(START_SECONDS)

    def run(self, asked: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """What each rank answers, and whether the ranks can take more. Where one has failed: what is known of it."""
        for process in self.ranks:
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(asked) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        return self._heard(seconds)

    def new_folder(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)

    def _heard(self, seconds: float) -> tuple[list[dict[str, Any]], bool]:
        heard: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + seconds
        while len(heard) < self.size:
            try:
                rank, line = self.answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return [self._cut(heard, f"cut after {seconds:.0f} s")], False
            if line is None:
                return [self._cut(heard, f"rank {rank} is gone")], False
            heard[rank] = json.loads(line)
            if "error" in heard[rank]:  # the others may wait for it
                until = min(until, time.monotonic() + GRACE_SECONDS)
        errors = {rank: answer for rank, answer in heard.items() if "error" in answer}
        if errors:
            return [next(iter(errors.values()))], len(errors) == self.size
        return [heard[rank] for rank in range(self.size)], True

    def _cut(self, heard: dict[int, dict[str, Any]], why: str) -> dict[str, Any]:
        at = {}
        for rank, process in enumerate(self.ranks):
            if rank in heard:
                said = heard[rank]
                at[rank] = [said["error"], *said["trace"][-3:]] if "error" in said else ["done"]
                continue
            log = self.folder / f"rank{rank}.txt"
            before = log.stat().st_size
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
                at[rank] = _stood(log.read_text(errors="replace")[before:])
            else:
                at[rank] = _stood(log.read_text(errors="replace")[-2000:])
        errors = [said["error"] for said in heard.values() if "error" in said]
        return {"error": "; ".join([*errors[:1], why]), "stood": at}

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


def _stood(stack: str) -> list[str]:
    """The innermost frames of the main thread, which is the last that faulthandler writes."""
    lines = [line.strip() for line in stack.splitlines() if line.strip()]
    if not any(line.startswith("File") for line in lines):
        return lines[-4:]
    last = max((i for i, line in enumerate(lines) if "most recent call first" in line), default=-1)
    frames = [line for line in lines[last + 1 :] if line.startswith("File")]
    return [frame.replace(str(Path(__file__).parents[1]) + "/", "") for frame in frames][:5]


def failure(row: dict[str, Any]) -> str:
    """What went wrong, and where each rank stood."""
    stood = [f"\n    rank {rank}: {' < '.join(lines)}" for rank, lines in row.get("stood", {}).items()]
    trace = [f"\n    {' < '.join(row['trace'][::-1])}"] if row.get("trace") else []
    return f"{row['error']}{''.join(stood)}{''.join(trace)}"
