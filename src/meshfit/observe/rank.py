"""What a rank records about itself: its device and machine, their use while it trains, and an error that ends it."""

import json
import os
import platform
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.data import tree
from meshfit.data.loader import Batch
from meshfit.events import Events
from meshfit.launch.system import cores
from meshfit.observe.sampler import Sampler
from meshfit.torch_private.tensors import grad_dtype, local_part

if TYPE_CHECKING:
    from meshfit.run import Run


@contextmanager
def observed(run: "Run") -> Iterator[None]:
    """Around a rank's training: spans are timed on the device too, and a run with a folder gets samples and facts."""
    events, device = run.events, run.world.device
    events.on(device)
    if not events.kept:
        yield
        return
    with suppress(Exception):  # facts for the report must not end the training
        events.facts(**_facts(run))
    events.flush(between_steps=True)  # totals of training begin here
    sampler = Sampler(events, device, first=_first_here(events.folder))
    sampler.start()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, GeneratorExit):
            events.instant("error", what=type(error).__name__, said=str(error).splitlines()[:1])
        raise
    finally:
        with suppress(Exception):
            events.facts(memory=kept_memory(run), data=_data(run))
        sampler.stop()
        events.flush(between_steps=True)


def _first_here(folder: Path | None) -> bool:
    """Whether this rank is the first of its machine, which describes and samples the machine."""
    if folder is None:
        return False
    path = folder / f"machine-{re.sub(r'[^A-Za-z0-9_.-]', '_', socket.gethostname())}.json"
    try:
        with path.open("x") as file:
            json.dump(_machine(), file, indent=2)
    except FileExistsError:
        return False
    return True


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _facts(run: "Run") -> dict[str, Any]:
    device, plan = run.world.device, run.plan
    on_gpu = device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "batch": run.loader.batch_size,
        "microbatches": plan.microbatches,
        "batchnorms": len(batch_norms(run.model)),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "last_step": run.last_step,
        "data_workers": run.loader.reading.workers,
        "memory": kept_memory(run),
        **({"traffic": traffic} if (traffic := _traffic(run)) else {}),
    }


def kept_memory(run: "Run") -> dict[str, int]:
    """Bytes that stay between steps, by kind."""
    cut = _bytes(run.exchange.gradients) if run.placed.shards is not None else 0
    whole = sum(p.numel() * grad_dtype(p).itemsize for p in run.model.parameters() if p.requires_grad)
    held = {
        "weights": _bytes(run.model.parameters()) + _other_shards(run),
        "buffers": _bytes(run.model.buffers()),
        "gradients": cut or whole,
        "optimizer": _bytes(t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)),
    }
    return {kind: size for kind, size in held.items() if size}


def _other_shards(run: "Run") -> int:
    """Bytes of the other ranks' shards, where weights stay whole on a rank that updates its shard (zero=1 and 2)."""
    shards = run.placed.shards
    flats = [] if shards is None or shards.zero == 3 else [flat for unit in shards.units for flat in unit.flats]
    return sum(flat.whole.nbytes - flat.mine.nbytes for flat in flats if flat.whole is not None)


def _data(run: "Run") -> dict[str, float]:
    """Seconds that batches took, by stage of the data path, and that the training waited for them."""
    clock = run.loader.clock
    stages = {name: round(took, 4) for name, took in clock.seconds.items() if took}
    return {**stages, "waited": round(clock.waited, 4), "batches": clock.batches}


def _bytes(tensors: Any) -> int:
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = local_part(tensor)
        if isinstance(local, Tensor):
            storages[local.data_ptr() or id(local)] = local.numel() * local.element_size()
    return sum(storages.values())


def _traffic(run: "Run") -> dict[str, int]:
    """Bytes handed to collectives a step, by the cost of the exchange."""
    with suppress(Exception):
        return dict(run.exchange.cost().moved)  # type: ignore[union-attr]
    return {}


def tell_batch(events: Events, batch: Batch) -> None:
    """Record tokens a sample, from the first batch."""
    if events.kept and (tokens := tokens_of(batch.microbatches[0].content)):
        events.facts(tokens=tokens)


def tokens_of(content: Any) -> int:
    """Tokens a sample: elements of the first tensor, where it holds whole numbers in rows. Else 0."""
    first = next(iter(tree.tensors(content)), None)
    if first is None or first.is_floating_point() or first.dtype in (torch.bool, torch.uint8) or first.dim() != 2:
        return 0
    return first.shape[1]
