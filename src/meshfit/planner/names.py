"""How a cluster is written: names of machines, a line of text, a file.

    8xH100                      eight devices on one node; 64xH100 eight nodes of eight
    4x8xA100-80GB@400Gbps       nodes x devices x name @ network of a node
    16x8xH100@8x400Gbps         eight ports of 400 Gbit/s a node
    2xp5.48xlarge               machines by name

Networks are those of the machines' data sheets and of the clouds' pages of instance types; prices only where the page
that states them is named.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from meshfit.errors import PlanError, did_you_mean
from meshfit.planner.accelerators import ACCELERATORS, ALIASES, GIB, Accelerator
from meshfit.planner.cluster import Cluster, Link

NVLINK_LATENCY, PCIE_LATENCY, NETWORK_LATENCY = 4e-6, 8e-6, 15e-6
"""Seconds a step: of NCCL's rings, from nccl-tests (8 A100: 45 us for seven steps and back; SimuMax's B200: 22 us and
5.5 us a rank)."""

BLOCKS = "AWS EC2 Capacity Blocks for ML, US East, late 2024"


@dataclass(frozen=True)
class NodeType:
    """A machine that is sold or rented under a name."""

    accelerator: str
    devices: int
    gbps: float
    """Network of a node, Gbit/s."""
    host: int = 0
    """GiB."""
    price: float | None = None
    source: str = ""
    domain: int = 0
    """Devices that the fast link joins, where not those of a node."""


NODES = {
    "DGX-1V": NodeType("V100-32GB", 8, 400, 512),
    "DGX-2": NodeType("V100-32GB", 16, 800, 1536),
    "DGX-A100": NodeType("A100-80GB", 8, 1600, 2048),
    "DGX-A100-40GB": NodeType("A100-40GB", 8, 1600, 1024),
    "DGX-H100": NodeType("H100-SXM", 8, 3200, 2048),
    "DGX-H200": NodeType("H200", 8, 3200, 2048),
    "DGX-B200": NodeType("B200", 8, 3200, 4096),
    "DGX-B300": NodeType("B300", 8, 6400, 4096),
    "DGX-GB200": NodeType("GB200", 4, 1600, 960, domain=72),
    "DGX-GB300": NodeType("GB300", 4, 3200, 960, domain=72),
    "p3.16xlarge": NodeType("V100-16GB", 8, 25, 488),
    "p3dn.24xlarge": NodeType("V100-32GB", 8, 100, 768),
    "p4d.24xlarge": NodeType("A100-40GB", 8, 400, 1152, 14.75, BLOCKS),
    "p4de.24xlarge": NodeType("A100-80GB", 8, 400, 1152),
    "p5.48xlarge": NodeType("H100-SXM", 8, 3200, 2048, 39.33, BLOCKS),
    "p5e.48xlarge": NodeType("H200", 8, 3200, 2048, 43.26, BLOCKS),
    "p5en.48xlarge": NodeType("H200", 8, 3200, 2048),
    "p6-b200.48xlarge": NodeType("B200", 8, 3200, 2048),
    "g4dn.12xlarge": NodeType("T4", 4, 50, 192),
    "g5.xlarge": NodeType("A10G", 1, 10, 16, 1.006, "AWS EC2 on demand, us-east-1, June 2026"),
    "g5.48xlarge": NodeType("A10G", 8, 100, 768),
    "g6.48xlarge": NodeType("L4", 8, 100, 768),
    "a2-highgpu-8g": NodeType("A100-40GB", 8, 100, 680),
    "a2-ultragpu-8g": NodeType("A100-80GB", 8, 100, 1360),
    "a3-highgpu-8g": NodeType("H100-SXM", 8, 1000, 1872),
    "a3-megagpu-8g": NodeType("H100-SXM", 8, 1800, 1872),
    "a3-ultragpu-8g": NodeType("H200", 8, 3200, 2952),
    "ND96asr_v4": NodeType("A100-40GB", 8, 1600, 900),
    "ND96amsr_A100_v4": NodeType("A100-80GB", 8, 1600, 1924),
    "ND96isr_H100_v5": NodeType("H100-SXM", 8, 3200, 1900),
    "ND96isr_MI300X_v5": NodeType("MI300X", 8, 3200, 1850),
}

USUAL = {
    **{"V100-16GB": "DGX-1V", "V100-32GB": "DGX-1V", "A100-40GB": "DGX-A100-40GB", "A100-80GB": "DGX-A100"},
    **{"H100-SXM": "DGX-H100", "H100-SXM-500W": "DGX-H100", "H200": "DGX-H200", "B200": "DGX-B200"},
    **{"B300": "DGX-B300", "GB200": "DGX-GB200", "GB300": "DGX-GB300", "MI300X": "ND96isr_MI300X_v5"},
    **{"A10G": "g5.48xlarge", "L4": "g6.48xlarge", "T4": "g4dn.12xlarge"},
}
"""The machine that a device is usually bought in; others: eight in a node, 100 Gbit/s."""

_TEXT = re.compile(r"^(?:(?P<first>\d+)x)?(?:(?P<second>\d+)x)?(?P<name>[^@]+?)(?:@(?P<network>.+))?$", re.IGNORECASE)
_SPEED = re.compile(
    r"^(?:(?P<ports>\d+)x)?(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>Gbps|Tbps|Mbps|GB/s|MB/s)$", re.IGNORECASE
)
_UNITS = {"mbps": 1e6 / 8, "gbps": 1e9 / 8, "tbps": 1e12 / 8, "mb/s": 1e6, "gb/s": 1e9}


def cluster_of(what: str | Path | Mapping[str, Any]) -> Cluster:
    """See ``Cluster.of``."""
    if isinstance(what, Mapping):
        return _from_dict(dict(what))
    if isinstance(what, Path) or what.endswith((".toml", ".json")):
        return _from_file(Path(what))
    return _from_text(what.strip())


def _from_text(text: str) -> Cluster:
    parsed = _TEXT.match(text)
    if not parsed:
        raise PlanError(f"{text!r} names no cluster", 'as in "8xH100", "4x8xA100-80GB@400Gbps" or "2xp5.48xlarge"')
    first, second, name = parsed["first"], parsed["second"], parsed["name"].strip()
    known, counts = _known(name, text), [int(n) for n in (first, second) if n]
    if 0 in counts:
        raise PlanError(f"{text!r} has no device")
    if isinstance(known, NodeType):
        if second:
            raise PlanError(f"{text!r}: {name} is a machine of {known.devices} devices", f'as in "{first}x{name}"')
        node, nodes, devices = known, counts[0] if counts else 1, known.devices
    else:
        node = NODES[USUAL[known.name]] if known.name in USUAL else NodeType(known.name, 8, 100)
        node = replace(node, accelerator=known.name)
        nodes, devices = _counts(counts, node.devices, text)
    gbytes = speed(parsed["network"], text) if parsed["network"] else node.gbps * 1e9 / 8
    return _built(text, node, nodes, devices, gbytes / devices if parsed["network"] else gbytes / node.devices)


def _counts(counts: list[int], usual: int, text: str) -> tuple[int, int]:
    """Nodes, and devices of each."""
    if len(counts) == 2:
        return counts[0], counts[1]
    total = counts[0] if counts else 1
    if total <= usual:
        return 1, total
    if total % usual:
        less, more = total // usual * usual, (total // usual + 1) * usual
        raise PlanError(
            f"{text!r}: {total} devices do not fill nodes of {usual}",
            f"{less} or {more} would; other nodes are written nodes x devices, as in 2x{total // 2}x...",
        )
    return total // usual, usual


def _built(name: str, node: NodeType, nodes: int, devices: int, network: float) -> Cluster:
    accelerator = ACCELERATORS[node.accelerator]
    fast = accelerator.nvlink > 0
    inside = Link(
        kind="nvlink" if fast else "pcie",
        bandwidth=accelerator.nvlink if fast else accelerator.pcie,
        latency=NVLINK_LATENCY if fast else PCIE_LATENCY,
        domain=node.domain or devices,
    )
    far = Link(kind="network", bandwidth=network, latency=NETWORK_LATENCY, domain=0)
    return Cluster(
        name=name,
        accelerator=accelerator,
        devices_per_node=devices,
        nodes=nodes,
        inside=inside,
        network=far,
        host_memory=node.host * GIB,
        price=node.price if devices == node.devices else None,
        price_source=node.source,
    )


def accelerator_named(name: str) -> Accelerator | None:
    """By its name or a usual form of it, in any case; None if unknown."""
    forms = {key.lower(): key for key in ACCELERATORS} | {key.lower(): key for key in ALIASES}
    key = forms.get(name.lower().removeprefix("nvidia-").replace(" ", "-"))
    return None if key is None else ACCELERATORS[ALIASES.get(key, key)]


def _known(name: str, text: str) -> Accelerator | NodeType:
    machines = {key.lower(): node for key, node in NODES.items()}
    found = machines.get(name.lower()) or accelerator_named(name)
    if found is None:
        forms = {word.lower(): word for word in (*ACCELERATORS, *ALIASES, *NODES)}
        near = difflib.get_close_matches(name.lower(), forms, n=1, cutoff=0.5)
        raise PlanError(
            f"no device or machine is known as {name!r}",
            f"in {text!r}" if text != name else "",
            f"did you mean {forms[near[0]]}?" if near else f"devices: {', '.join(ACCELERATORS)}",
            "" if near else f"machines: {', '.join(NODES)}",
            "others can be described in a file: see docs/planner.md",
        )
    return found


def speed(text: str, where: str = "") -> float:
    """Bytes/s: "400Gbps", "8x400Gbps", "50GB/s"."""
    parsed = _SPEED.match(text.strip())
    if not parsed:
        raise PlanError(
            f"{text!r} is no speed of a network", f"in {where!r}" if where else "", 'as in "400Gbps", "50GB/s"'
        )
    return int(parsed["ports"] or 1) * float(parsed["number"]) * _UNITS[parsed["unit"].lower()]


def _from_file(path: Path) -> Cluster:
    if not path.is_file():
        raise PlanError(f"there is no file {path}", "a cluster is a name, a line of text or a .toml or .json file")
    try:
        text = path.read_text()
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    return _from_dict({"name": path.stem} | content)


def _from_dict(content: dict[str, Any]) -> Cluster:
    """``like`` names a cluster to begin with; what else is said replaces its parts. A network's speed as text is that
    of a node, as in a line of text; in a table it is that of a device, as in ``Link``."""
    like = content.pop("like", None)
    if like is None and "accelerator" not in content:
        raise PlanError("a cluster's file says what its devices are", 'like = "8xH100", or accelerator = "H100"')
    named = content.get("accelerator")
    if like is None and isinstance(named, Mapping):
        missing = [word for word in ("name", "memory", "bandwidth", "rates", "units") if word not in named]
        if missing:
            raise PlanError(
                f"the cluster's accelerator lacks {', '.join(missing)}", 'or begin with one: like = "8xH100"'
            )
    base = cluster_of(like if like is not None else named if isinstance(named, str) else "8xH100")
    base = _with_nodes_of(base, content.get("devices_per_node", base.devices_per_node))
    known = [field.name for field in fields(Cluster)]
    for key, value in content.items():
        if key not in known:
            raise PlanError(f"a cluster has no {key!r}", did_you_mean(key, known))
        if key == "accelerator" and isinstance(value, str):
            content[key] = cluster_of(value).accelerator
        elif key == "network" and isinstance(value, str):
            content[key] = replace(base.network, bandwidth=speed(value, key) / base.devices_per_node)
        elif key in ("accelerator", "inside", "network"):
            content[key] = _part(getattr(base, key), value, key)
    return replace(base, **content)


def _with_nodes_of(base: Cluster, devices: int) -> Cluster:
    """The same machines with more or fewer devices each, on the same network."""
    shared = replace(base.network, bandwidth=base.network.bandwidth * base.devices_per_node / devices)
    joined = devices if base.inside.domain == base.devices_per_node else base.inside.domain
    return replace(base, devices_per_node=devices, network=shared, inside=replace(base.inside, domain=joined))


def _part(base: Any, value: Any, key: str) -> Any:
    if isinstance(value, str):
        value = {"bandwidth": value}
    known = [field.name for field in fields(base)]
    for word in value:
        if word not in known:
            raise PlanError(f"a cluster's {key} has no {word!r}", did_you_mean(word, known))
    if isinstance(value.get("bandwidth"), str):
        value = value | {"bandwidth": speed(value["bandwidth"], key)}
    if "tile" in value:
        value = value | {"tile": tuple(value["tile"])}
    return replace(base, **value)
