"""The machine at hand, as a cluster: its GPUs by what torch says of them, or CPU ranks.

Links are those of the device's data sheet, as far as ``nvidia-smi topo`` says that they are there. A CPU's rate is a
guess by its cores (32 operations a cycle at 2.5 GHz, 20 GB/s a core): for the order of plans, not for seconds, until
``meshfit calibrate`` has measured it.
"""

import platform
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from meshfit.errors import PlanError
from meshfit.launch.folders import cache_folder
from meshfit.planner.accelerators import ACCELERATORS, Accelerator
from meshfit.planner.cluster import Cluster, Link
from meshfit.planner.names import NETWORK_LATENCY, NVLINK_LATENCY, PCIE_LATENCY, cluster_of
from meshfit.planner.topology import Topology, topology


def on_gpus(kind: str | None) -> bool:
    """Whether ``kind`` of device means GPUs; None: where there are any."""
    return torch.cuda.is_available() if kind is None else kind == "cuda"


def profile_path(kind: str | None = None) -> Path | None:
    """Where ``meshfit calibrate`` keeps what it measured on this machine; None where nothing is kept."""
    folder = cache_folder()
    word = "gpu" if on_gpus(kind) else "cpu"
    return None if folder is None else folder / f"cluster-{platform.node()}-{word}.json"


def detected(devices: int | None = None, kind: str | None = None, here: int | None = None) -> Cluster:
    """See ``Cluster.detect``: as measured, where it was."""
    base, path = guessed(devices, kind, here), profile_path(kind)
    if path is None or not path.is_file():
        return base
    try:
        known = cluster_of(path)
    except PlanError:  # of another version: measured again, it is replaced
        return base
    if on_gpus(kind):
        device = replace(known.accelerator, memory=base.accelerator.memory)
        if base.nodes > 1:
            return replace(base, accelerator=device)
        return replace(base, accelerator=device, inside=replace(known.inside, domain=base.inside.domain))
    more = known.devices_per_node / base.devices_per_node  # of the cores, for each rank
    device = replace(
        known.accelerator,
        memory=base.accelerator.memory,
        bandwidth=known.accelerator.bandwidth * more,
        rates={word: rate * more for word, rate in known.accelerator.rates.items()},
    )
    link = replace(known.inside, domain=base.devices_per_node)
    far = base.network if base.nodes > 1 else link
    return replace(base, name=f"{base.name}, measured", accelerator=device, inside=link, network=far)


def guessed(devices: int | None = None, kind: str | None = None, here: int | None = None) -> Cluster:
    """By what the devices are called, and their data sheets. ``here``: of ``devices`` those on this machine, where
    there are as many others on each of several."""
    memory, cores = psutil.virtual_memory().total, psutil.cpu_count(logical=False) or 1
    count = devices or (torch.cuda.device_count() if on_gpus(kind) else cores)
    ranks = here or count
    if on_gpus(kind):
        return _gpus(count, ranks, memory)
    share = max(1.0, cores / ranks)
    cpu = Accelerator(
        name="cpu",
        memory=memory // ranks,
        bandwidth=20e9 * share,
        rates={"fp32": 80e9 * share},
        reached={"fp32": 0.5},
        units=max(1, int(share)),
        tile=(16, 32),  # of registers: products of a few rows are not filled up
        fill=16.0,
        launch=2e-6,
        packs=2.0,
    )
    shared = Link(kind="memory", bandwidth=5e9, latency=50e-6, domain=ranks)
    far = Link(kind="network", bandwidth=1.25e9, latency=NETWORK_LATENCY, domain=0)
    return Cluster(
        name=f"{ranks} CPU ranks here" if ranks == count else f"{count} CPU ranks, {ranks} of them here",
        accelerator=cpu,
        devices_per_node=ranks,
        nodes=-(-count // ranks),
        inside=shared,
        network=shared if ranks == count else far,
        host_memory=memory,
    )


def _gpus(count: int, here: int, host_memory: int) -> Cluster:
    found = torch.cuda.get_device_properties(0)
    name = like(found.name, found.total_memory)
    base = cluster_of(f"{-(-count // here)}x{here}x{name}")
    device = replace(base.accelerator, memory=found.total_memory, units=found.multi_processor_count)
    name = f"{count} x {found.name}{' here' if here == count else ''}"
    base = joined(base, topology())
    return replace(base, name=name, accelerator=device, host_memory=host_memory, price=None)


def joined(base: Cluster, found: Topology | None) -> Cluster:
    """With the links that the machine says it has, where it says so."""
    if found is None or found.gpus < 2 or base.nodes > 1:
        return base
    slow = Link(kind="pcie", bandwidth=base.accelerator.pcie, latency=PCIE_LATENCY, domain=0)
    if found.domain == 1:
        return replace(base, inside=replace(slow, domain=base.devices))
    fast = replace(
        base.inside,
        kind="nvlink",
        bandwidth=min(found.bandwidth, base.accelerator.nvlink or found.bandwidth),
        latency=NVLINK_LATENCY,
        domain=min(found.domain, base.devices),
    )
    return replace(base, inside=fast, network=slow if fast.domain < base.devices else base.network)


def like(name: str, memory: int) -> str:
    """The known device that a driver's name stands for ("NVIDIA A100-SXM4-80GB"): of those whose model is in it, the
    one with the nearest memory."""
    words = name.upper().replace(" ", "").replace("NVIDIA", "").replace("GEFORCE", "")
    model = lambda device: device.name.upper().split("-")[0]
    every = list(ACCELERATORS.values())
    known = [device for device in every if words.startswith(model(device))]
    known = known or [device for device in every if model(device) in words] or every
    longest = max(len(model(device)) for device in known)
    pcie = lambda device: ("PCIE" in device.name.upper()) != ("PCIE" in words)
    best = [device for device in known if len(model(device)) == longest]
    return min(best, key=lambda device: (pcie(device), abs(device.memory - memory))).name
