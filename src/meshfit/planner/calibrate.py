"""Measures the machine at hand in seconds: products, copies, what a kernel costs to start, collectives of real ranks.

The result is a cluster, kept as a file in the user's cache folder, which ``Cluster.detect`` reads from then on. All
ranks measure at once, as they compute at once in a training, and every figure is a mean: what ranks get of a machine
that others use, too.

    products      on CPUs the rate at which the cost model gives what shapes of small models took, with the threads that
                  a rank has; on GPUs the best rate of large ones (``reached``)
    copies        bytes read and written a second
    launch        seconds of an operation on a few numbers
    collectives   all-reduce of a small and of a large message over gloo or NCCL, in as many ranks as there are devices
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshfit.anatomy.operations import MatrixProduct
from meshfit.launch.channel import Channel
from meshfit.launch.devices import Devices
from meshfit.launch.world import World
from meshfit.planner.cluster import Cluster, Link
from meshfit.planner.collectives import REACHED, START
from meshfit.planner.detect import guessed, on_gpus
from meshfit.planner.operations import Timing

SHAPES = ((64, 1024, 256), (64, 512, 2048), (512, 512, 512))
"""Rows, outputs and inputs of layers, whose three products are measured on CPUs: forward, and both of backward."""
LARGE = ((4096, 4096, 4096), (8192, 8192, 4096))
SMALL, BIG = 1 << 10, 1 << 22
"""Elements of the two messages."""

LONG = 0.1
"""Seconds of one measurement."""
ROUNDS = 10
"""All-reduces of each message."""


def calibrated(ranks: int | None = None, threads: int | None = None, kind: str | None = None) -> Cluster:
    """The machine at hand, measured; ``ranks`` of it (all GPUs, or a CPU rank a core), each with ``threads`` (those
    that its share of the cores gives it). ``kind``: "cpu" or "cuda", if not what is there."""
    from meshfit.launch.local import LocalRanks  # of systems that fork alone

    base = guessed(ranks, kind)
    on = "cuda" if on_gpus(kind) else "cpu"
    with LocalRanks(
        Measurement(threads or base.accelerator.units),
        size=base.devices,
        devices=Devices(on, tuple(range(base.devices))),
    ) as started:
        for _ in started.messages():
            pass
        every: list[dict[str, list[float]]] = started.results
    return fitted(base, every)


def fitted(base: Cluster, every: Sequence[Mapping[str, Sequence[float]]]) -> Cluster:
    """``base`` with what its ranks have measured."""
    took = {name: [max(each) for each in zip(*(one[name] for one in every), strict=True)] for name in every[0]}
    accelerator = base.accelerator
    bandwidth, launch = took["copy"][0], took["launch"][0]
    if accelerator.name == "cpu":
        one = {"reached": {"fp32": 1.0}, "rates": {"fp32": 1e9}, "fastest": 1.0, "units": 1}
        timing = Timing(replace(accelerator, **one, bandwidth=1e18, launch=0.0))
        slower = [
            sum(timing(MatrixProduct(*each, precision="fp32")) for each in products(*shape)) / own
            for shape, own in zip(SHAPES, took["fp32"], strict=True)
        ]
        one |= {"rates": {"fp32": 1e9 * median(slower)}, "bandwidth": COPIED / bandwidth, "streamed": 1.0}
        accelerator = replace(accelerator, **one, launch=launch)
    else:
        rate = {
            word: max(2.0 * m * n * k / own for (m, n, k), own in zip(LARGE, took[word], strict=True)) for word in GPU
        }
        reached = {word: min(1.0, rate[word] / accelerator.rate(word)) for word in rate}
        accelerator = replace(accelerator, reached={**accelerator.reached, **reached}, launch=launch)
        accelerator = replace(accelerator, streamed=min(1.0, 16 * COPIED / bandwidth / accelerator.bandwidth))
    found = replace(base, accelerator=accelerator, name=f"{base.name}, measured")
    if base.nodes > 1 or base.devices == 1:  # one figure for two kinds of links says neither
        return found
    link = _link(base, *took["sums"])
    return replace(found, inside=link, network=link)


def slowed(cluster: Cluster, times: float) -> Cluster:
    """``cluster`` with devices on which all that is computed takes ``times`` as long."""
    device = cluster.accelerator
    if device.name == "cpu":
        rates = {word: rate / times for word, rate in device.rates.items()}
        device = replace(device, rates=rates, bandwidth=device.bandwidth / times)
    else:
        reached = {word: min(1.0, device.reached.get(word, 0.75) / times) for word in device.rates}
        device = replace(device, reached=reached, streamed=min(1.0, device.streamed / times))
    return replace(cluster, accelerator=replace(device, launch=device.launch * times))


def products(rows: int, outputs: int, inputs: int) -> tuple[tuple[int, int, int], ...]:
    """m, n and k of a layer's three products."""
    return (rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows)


GPU = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPIED = 2.0 * (1 << 24)
"""Bytes read and written by a copy; 16 times as many on GPUs."""


@dataclass(frozen=True)
class Measurement:
    """What each rank does: the seconds of everything, by name."""

    threads: int = 0
    """0: as many as it has."""

    def __call__(self, world: World, channel: Channel | None = None) -> dict[str, list[float]]:
        device = world.device
        gpu = device.type == "cuda"
        if not gpu and self.threads:
            torch.set_num_threads(self.threads)
        kinds, shapes = (GPU, LARGE) if gpu else ({"fp32": torch.float32}, SHAPES)
        found: dict[str, list[float]] = {}
        for word, dtype in kinds.items():
            found[word] = []
            for m, n, k in shapes:
                a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
                back = torch.randn(m, n, device=device, dtype=dtype)
                work = (lambda a=a, b=b: a @ b.T) if gpu else (lambda a=a, b=b, c=back: (a @ b.T, c @ b, c.T @ a))
                found[word].append(_mean(world, work))
        source = torch.zeros(int(COPIED / 2) * (16 if gpu else 1), dtype=torch.uint8, device=device)
        target, few = torch.empty_like(source), torch.zeros(8, device=device)
        found["copy"] = [_mean(world, lambda: target.copy_(source))]
        found["launch"] = [_mean(world, lambda: [few.add_(1.0) for _ in range(100)]) / 100]
        found["sums"] = [_sum(world, elements) for elements in (SMALL, BIG)] if world.size > 1 else []
        return found


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _mean(world: World, work: Callable[[], Any]) -> float:
    """Seconds of one call, while all ranks do the same."""
    work()
    _wait(world)
    if world.size > 1:
        dist.barrier()
    count, began = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < LONG:
        work()
        _wait(world)
        count += 1
    return (time.perf_counter() - began) / count


def _sum(world: World, elements: int) -> float:
    tensor = torch.zeros(elements, device=world.device)
    dist.all_reduce(tensor)
    dist.barrier()
    _wait(world)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(tensor)
        _wait(world)
    return (time.perf_counter() - began) / ROUNDS


def _link(base: Cluster, small: float, big: float) -> Link:
    """By two messages: what bytes add, and what is left of the small one."""
    moved = lambda elements: 2.0 * 4 * elements * (base.devices - 1) / base.devices
    kind = base.inside.kind
    share = REACHED.get(kind, REACHED["pcie"])["all_reduce"]
    rate = (moved(BIG) - moved(SMALL)) / max(1e-9, big - small)
    steps = 2 * (base.devices - 1)
    latency = max(1e-7, (small - START - moved(SMALL) / rate) / steps)
    return replace(base.inside, bandwidth=rate / share, latency=latency)


def save(cluster: Cluster, path: Path) -> None:
    """As JSON, which ``Cluster.of`` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cluster.to_dict(), indent=1))
