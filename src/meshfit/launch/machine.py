"""What this machine has for a training, and what is wrong with it: for ``meshfit doctor``."""

import importlib.metadata
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from meshfit.errors import MeshfitError
from meshfit.launch.devices import Devices
from meshfit.launch.folders import cache_folder
from meshfit.launch.limits import largest_picture, largest_unfolded
from meshfit.launch.system import cores, starts_processes
from meshfit.launch.world import World
from meshfit.units import size
from meshfit.version import VERSION

OPTIONAL = [
    "numpy",
    "safetensors",
    "pyarrow",
    "pillow",
    "simplejpeg",
    "obstore",
    "fsspec",
    "transformers",
    "torchmetrics",
    "lightning",
    "peft",
]
BYTES, TIMES, SMALL = 16 * 2**20, 5, 200
PATIENCE = 60.0
SHARED = "/dev/shm"
SHARED_BYTES, DESCRIPTORS, DISK_BYTES = 64 * 2**20, 1024, 2**30


@dataclass(frozen=True)
class Complaint:
    what: str
    fix: str
    broken: bool = True
    """False: it works, slower or with less."""


@dataclass(frozen=True)
class AllReduceSpeed:
    """Of an all-reduce over ranks of this machine."""

    backend: str
    ranks: int
    bytes_a_second: float
    """Of the tensor, 16 MiB."""
    seconds: float
    """Of one of four bytes."""


def versions() -> dict[str, str]:
    found = {"meshfit": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, nccl.version()))
    for name in OPTIONAL:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def facts() -> dict[str, Any]:
    """Plain values."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": cores(),
        "memory": memory(),
        "shared_memory": _disk(SHARED),
        "temporary": {"path": tempfile.gettempdir(), **_disk(tempfile.gettempdir())},
        "cache": str(cache_folder() or "none"),
        "descriptors": _descriptors(),
        "gpus": gpus(),
        "links": links(),
    }


def _descriptors() -> dict[str, int]:
    try:
        import resource
    except ImportError:  # Windows
        return {"soft": -1, "hard": -1}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def memory() -> dict[str, int]:
    """Bytes; a container's limit counts."""
    found = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, limit - used)
    return {"total": total, "available": available}


def _disk(path: str) -> dict[str, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return {}
    return {"total": usage.total, "free": usage.free}


def gpus() -> list[dict[str, Any]]:
    found = []
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        capability = f"{about.major}.{about.minor}"
        found.append({"name": about.name, "memory": total, "free": free, "capability": capability})
    return found


def links() -> list[tuple[int, int]]:
    """Pairs of GPUs that can read each other's memory."""
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    return [(i, j) for i, j in pairs if torch.cuda.can_device_access_peer(i, j)]


# What is wrong


def problems(found: dict[str, Any]) -> Iterator[Complaint]:
    """Of what ``facts`` found, and of what can be tried at once."""
    if not starts_processes():
        yield Complaint(f"{sys.platform} has no fork: one device alone trains here", "use WSL 2, or torchrun", False)
    yield from _too_little(found)
    for check, complaint in CHECKS:
        try:
            check()
        except (OSError, MeshfitError) as error:
            yield Complaint(*complaint(error))
    if torch.version.cuda and not found["gpus"] and Path("/dev/nvidia0").exists():
        yield Complaint(
            "there are GPUs here that torch cannot use",
            "does nvidia-smi work? the driver may be too old for this torch",
        )
    if not torch.distributed.is_available() or not dist.is_gloo_available():
        yield Complaint("this torch has no gloo", "pip install torch, in another build")
    count = len(found["gpus"])
    if count > 1 and len(found["links"]) < count * (count - 1) // 2:
        yield Complaint(
            "not all GPUs can read each other's memory: NCCL goes through the host", "see nvidia-smi topo -m", False
        )


def _too_little(found: dict[str, Any]) -> Iterator[Complaint]:
    shared, soft = found["shared_memory"], found["descriptors"]["soft"]
    if shared and shared["free"] < SHARED_BYTES:
        yield Complaint(
            f"{SHARED} has {size(shared['free'])} free of {size(shared['total'])}: NCCL and DataLoaders need more",
            f"mount -o remount,size=8G {SHARED}; docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory",
            len(found["gpus"]) > 1,
        )
    if 0 <= soft < DESCRIPTORS:
        hard = found["descriptors"]["hard"]
        yield Complaint(f"a process may open {soft} files", f"ulimit -n {hard if hard > 0 else 65536}", soft < 128)
    if found["temporary"].get("free", DISK_BYTES) < DISK_BYTES:
        free = size(found["temporary"]["free"])
        yield Complaint(f"{found['temporary']['path']} has {free} free", "make room, or set TMPDIR", False)


def _loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held, socket.create_connection(held.getsockname(), timeout=5):
        pass


def _temporary() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
        file.flush()


def _limits() -> None:
    largest_unfolded(1)
    largest_picture()


CHECKS: tuple[tuple[Callable[[], None], Callable[[Any], tuple[str, str]]], ...] = (
    (_loopback, lambda error: (f"ranks cannot meet at 127.0.0.1: {error}", "ip link set lo up")),
    (_temporary, lambda error: (f"{tempfile.gettempdir()} cannot be written: {error}", "set TMPDIR to one that can")),
    (_limits, lambda error: (error.headline, error.facts[-1])),
)
"""What can be tried, and what is said of the error."""


# How fast ranks talk


def all_reduce_seconds(world: World, channel: Any) -> list[float]:
    """What each rank does: seconds of a large all-reduce, and of a small one."""
    tensor = torch.ones(BYTES // 4, device=world.device)
    found = []
    for part, times in ((tensor, TIMES), (tensor[:1], SMALL)):
        dist.all_reduce(part)
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(part)
        float(part[0])  # on a GPU, until all have run
        found.append((time.perf_counter() - began) / times)
    return found


def speed(kind: str, count: int) -> AllReduceSpeed | Complaint:
    """Measured with ranks that are started for it."""
    from meshfit.launch.local import LocalRanks  # of systems that fork alone

    devices = Devices(kind, tuple(range(count)) if kind == "cuda" else None)
    backend = "NCCL" if kind == "cuda" else "gloo"
    try:
        with LocalRanks(all_reduce_seconds, size=count, devices=devices, timeout=PATIENCE) as ranks:
            for _ in ranks.messages(timeout=2 * PATIENCE):
                pass
            large, small = ranks.results[0]
    except (MeshfitError, OSError, TimeoutError) as error:
        why = str(error).split("\n")[0]
        return Complaint(f"{count} ranks cannot talk over {backend}: {why}", "TORCH_DISTRIBUTED_DEBUG=DETAIL says more")
    return AllReduceSpeed(backend, count, BYTES / large, small)


def speeds(found: dict[str, Any]) -> list[AllReduceSpeed | Complaint]:
    measured = [speed("cpu", 2)] if starts_processes() else []
    count = len(found["gpus"])
    return [*measured, speed("cuda", count)] if count > 1 else measured
