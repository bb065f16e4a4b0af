"""A cluster, as a value: devices, nodes, links, memory, price.

Bandwidths are in bytes/s, in one direction and for one device; times in seconds; memory in bytes.

    Cluster.of("8xH100")                     one node of eight
    Cluster.of("4x8xA100-80GB@400Gbps")      four nodes of eight, 400 Gbit/s to each node
    Cluster.of("16xDGX-H100")                sixteen of a known machine
    Cluster.of("cluster.toml")               a file
    Cluster.detect()                         the machine at hand
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshfit.planner.accelerators import Accelerator
from meshfit.units import size


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices, seen from one of them."""

    kind: str
    """nvlink, pcie, network or memory."""

    bandwidth: float
    """Bytes/s from one device, while all of them send."""

    latency: float
    """Seconds that one step of a collective takes beside its bytes."""

    domain: int
    """Devices that it joins; 0: all of them."""

    @property
    def gbps(self) -> float:
        return self.bandwidth * 8 / 1e9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices."""

    name: str
    accelerator: Accelerator
    devices_per_node: int = 8
    nodes: int = 1
    inside: Link
    """Between devices of a node, or of a rack where its switch joins more."""

    network: Link
    """Between nodes."""

    host_memory: int = 0
    """Bytes of a node's own memory; 0: unknown."""

    price: float | None = None
    """US dollars an hour for a node; None where no public price is known."""

    price_source: str = ""

    @property
    def devices(self) -> int:
        return self.devices_per_node * self.nodes

    @property
    def domain(self) -> int:
        """Devices that the fast link joins."""
        return min(self.inside.domain or self.devices, self.devices)

    @property
    def hourly(self) -> float | None:
        """US dollars an hour for all of it."""
        return None if self.price is None else self.price * self.nodes

    def with_devices(self, devices: int) -> "Cluster":
        """The same machines, as many as ``devices`` take."""
        per_node = min(devices, self.devices_per_node)
        return replace(self, nodes=-(-devices // per_node), devices_per_node=per_node)

    def link(self, degree: int, stride: int = 1) -> Link:
        """The slowest link between ``degree`` devices that are ``stride`` ranks apart."""
        return self.inside if degree * stride <= self.domain else self.network

    def tiers(self, degree: int, stride: int = 1) -> tuple[int, int]:
        """Of ``degree`` devices ``stride`` ranks apart: how many share a fast link, and how many such groups."""
        near = max(1, min(degree, self.domain // stride))
        while degree % near:
            near -= 1
        return near, degree // near

    def __str__(self) -> str:
        a, fast, far = self.accelerator, self.inside, self.network
        facts = [
            f"{self.name}: {self.devices} devices, {self.nodes} x {self.devices_per_node}",
            f"{a.name}: {size(a.memory)}, {a.bandwidth / 1e12:.3g} TB/s, "
            + ", ".join(f"{key} {rate / 1e12:.4g} TFLOP/s" for key, rate in a.rates.items()),
            f"{fast.kind} {fast.bandwidth / 1e9:.4g} GB/s and {fast.latency * 1e6:.3g} us among {self.domain}",
        ]
        if self.devices > self.domain:
            facts.append(f"network {far.bandwidth / 1e9:.4g} GB/s a device ({far.gbps:.4g} Gbit/s)")
        if self.hourly is not None:
            facts.append(f"{self.hourly:.2f} $/h ({self.price_source})")
        return "\n  ".join(facts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file; ``of`` reads them."""
        return asdict(self)

    @staticmethod
    def of(what: "str | Path | Mapping[str, Any] | Cluster") -> "Cluster":
        """A cluster from its text, a file (.toml or .json) or what ``to_dict`` gave; a ``PlanError`` says what is
        unknown."""
        from meshfit.planner.names import cluster_of

        return what if isinstance(what, Cluster) else cluster_of(what)

    @staticmethod
    def detect(devices: int | None = None, kind: str | None = None, here: int | None = None) -> "Cluster":
        """The machine at hand: its GPUs, or ``devices`` CPU ranks (as many as cores, if not said). ``kind``: "cpu" or
        "cuda", if not what is there; ``here``: how many of ``devices`` this machine has, where it is one of several."""
        from meshfit.planner.detect import detected

        return detected(devices, kind, here)
