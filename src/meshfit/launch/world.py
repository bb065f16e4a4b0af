"""Who a rank is among all ranks, and the process group that joins them.

Ranks started on this machine meet over a file in a private folder and talk over the loopback interface
alone: nothing listens where others could reach it. Under torchrun its own rendezvous is used. A world of
one has no process group at all.
"""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from meshfit.errors import JobError
from meshfit.launch import heap, twins
from meshfit.launch.system import cores


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place: which of how many, and the device it works on."""

    rank: int
    size: int
    device: torch.device
    folder: str = field(default="", compare=False)
    """Where the processes of a run on this machine meet; nobody else can read it."""


RANKS_PER_GPU = "MESHFIT_RANKS_PER_GPU"
"""So many ranks of a host share each of its GPUs, where that is wanted: NCCL must be told to let them."""


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def from_environment(asked: object = "auto") -> World | None:
    """This process's place if torchrun started it, or who did has set what torchrun sets; else None. ``asked``: the
    devices that the user wants, of which "cpu" alone counts here."""
    if not set(twins.WORLD) <= os.environ.keys():
        return None
    rank, size = (twins.number(os.environ, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or size is None or rank >= size:
        said = ", ".join(f"{name}={os.environ[name]!r}" for name in ("RANK", "WORLD_SIZE"))
        raise JobError(f"{said} is no place in a world", "RANK counts from 0 to WORLD_SIZE - 1")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus or str(asked).partition(":")[0] == "cpu" or getattr(asked, "kind", "") == "cpu":
        return World(rank, size, torch.device("cpu"))
    return World(rank, size, torch.device("cuda", own_gpu(size, gpus, os.environ)))


def own_gpu(size: int, gpus: int, environ: Mapping[str, str]) -> int:
    """Which of the ``gpus`` that this rank sees is its own: not guessed where ranks would then share one."""
    local, sharing = twins.local_rank(environ), twins.number(environ, RANKS_PER_GPU) or 1
    if gpus == 1:
        return 0  # each rank is shown its own; NCCL refuses two of them on one
    if local is None and size > 1:
        raise JobError(
            f"LOCAL_RANK is not set, and this rank sees {gpus} GPUs: it cannot tell which one is its own",
            "torchrun sets it; where ranks are started otherwise, export LOCAL_RANK, or show each rank one GPU",
        )
    if (own := (local or 0) // sharing) >= gpus:
        raise JobError(
            f"this is rank {local} of its host, counted from 0, and it sees {gpus} GPUs",
            f"torchrun --nproc-per-node={gpus} starts one rank for each",
            f"{RANKS_PER_GPU}={-(-((local or 0) + 1) // gpus)} lets several share one, where NCCL is told to as well",
        )
    return own


def connect(world: World, *, folder: str | None = None, timeout: float = 600.0) -> None:
    """Take the device, and join the other ranks; blocks until all have come.

    They meet in ``folder``, which only ranks of this run share; without one, through torchrun's
    environment, unless the group exists already. A collective that waits longer than ``timeout`` seconds
    is an error.
    """
    heap.keep()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    else:
        here = world.size if folder else int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        torch.set_num_threads(max(1, cores() // here))
    if world.size > 1 and dist.is_initialized():
        _check_group(world)
    if world.size == 1 or dist.is_initialized():
        return
    store, loopback = None, "lo" if sys.platform == "linux" else "lo0"
    if folder is None and os.environ.get("LOCAL_WORLD_SIZE") == str(world.size):  # torchrun, on this machine alone
        for name in INTERFACES:
            os.environ.setdefault(name, loopback)
    if folder is not None:
        os.environ |= dict.fromkeys(INTERFACES, loopback)
        store = dist.FileStore(os.path.join(folder, "store"), world.size)
    gpu = world.device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        device_id=world.device if gpu else None,  # communicators are made with their groups, not in the first step
        init_method="env://" if store is None else None,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )
    if folder is None:
        atexit.register(_leave)


def ranks_here(world: World) -> int:
    """How many of the ranks that torchrun started are on this machine."""
    return twins.number(os.environ, "LOCAL_WORLD_SIZE") or world.size


def _check_group(world: World) -> None:
    """Refuse a process group of the script's own in which the ranks cannot exchange what is in host memory."""
    backends = str(dist.get_backend_config())
    if "cpu:" not in backends or dist.get_world_size() != world.size:
        raise JobError(
            f"the process group that was made before fit has {dist.get_world_size()} ranks and backends {backends}",
            f"fit needs one of {world.size} ranks, for tensors on the CPU too",
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), or let fit make it',
        )


LAST_WORDS = 0.2
"""Seconds in which gloo's threads let go of the tensors of the last collective. One that does so while Python goes down
is ended for asking for its lock, and the process aborts: twice in 60 runs on a busy machine (torch 2.13)."""


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave() -> None:
    """At the end of a script under torchrun. Where it ended by an error others may be in the middle of something, and
    torchrun is about to end them."""
    if getattr(sys, "last_exc", None) is None:
        disconnect()
    time.sleep(LAST_WORDS)
