"""What devices say to each other, as values, and how long it takes.

Bytes are those of the larger side of a gather or scatter, as in ``Cost.moved``. A collective of n devices sends

    all_reduce 2 (n - 1) / n    all_gather, reduce_scatter, all_to_all (n - 1) / n    send 1

of them over each device's link, in steps that each take the link's latency. Over several nodes the devices of a node
use their network ports together, so that a ring is as fast as the slower of the link inside and all ports of a node;
an exchange of all with all sends most of its bytes over the network, each device over its own port, and what goes to
several devices of a node (a token to its experts) only once.
"""

from math import ceil, log2

from meshfit.cost import CollectiveCall
from meshfit.planner.cluster import Cluster, Link

SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0}

REACHED = {
    "nvlink": {"all_reduce": 0.75, "all_gather": 0.70, "reduce_scatter": 0.70, "all_to_all": 0.60, "send": 0.80},
    "pcie": {"all_reduce": 0.70, "all_gather": 0.70, "reduce_scatter": 0.70, "all_to_all": 0.55, "send": 0.80},
    "memory": {"all_reduce": 0.70, "all_gather": 0.50, "reduce_scatter": 0.25, "all_to_all": 0.55, "send": 0.80},
    "network": {"all_reduce": 0.85, "all_gather": 0.85, "reduce_scatter": 0.85, "all_to_all": 0.60, "send": 0.85},
}
"""Share of a link's speed with large messages. nvlink: 220 of 300 GB/s on eight A100 (vTrain's table of nccl-tests), on
B200 0.74, 0.67, 0.67, 0.60 (SimuMax); memory: gloo between processes, whose reduce_scatter is an all_reduce of which a
part is kept (16 MiB between two: 12.7 ms, 8.8 and 18.5); network: 0.90 and 0.92 at 1 GiB over two and eight
nodes (SimAI's ratios)."""

START = 15e-6
"""Seconds before the first byte: nccl-tests, 20 to 25 us with the latency of the steps."""

SLOWED = {"nvlink": 0.15, "pcie": 0.1, "network": 0.05, "memory": 1.0}
"""By how much computing slows down while such a collective runs beside it: the units that it occupies (Calculon's 15 %
and 2 %; Galvatron measures 10 to 30 %). In memory a core copies and adds, and computes nothing meanwhile."""


OVER_THE_BUS = ("host_to_device", "device_to_host", "push", "pull", "meet")
"""Copies between a device and its host; messages to a model server, which is on one."""


def seconds(call: CollectiveCall, cluster: Cluster) -> float:
    """Of all its calls, one after another, with nothing else on the links."""
    if call.name in OVER_THE_BUS:
        return call.count * (START + call.bytes / (cluster.accelerator.pcie * REACHED["pcie"]["send"]))
    if call.degree <= 1 or not call.bytes:
        return 0.0
    if call.name == "send":
        link = cluster.link(2, call.stride)
        return call.count * (START + link.latency + call.bytes / (link.bandwidth * _reached(link, "send")))
    near, far = cluster.tiers(call.degree, call.stride)
    moved = SHARES[call.name] * call.bytes * (call.degree - 1) / call.degree
    inside = cluster.inside.bandwidth * _reached(cluster.inside, call.name)
    rounds = 2 if call.name == "all_reduce" else 1
    if far == 1:
        return call.count * (START + rounds * (near - 1) * cluster.inside.latency + moved / inside)
    outside = cluster.network.bandwidth * _reached(cluster.network, call.name)
    if call.name == "all_to_all":
        nodes = far * (1 - (1 - 1 / far) ** call.copies)  # on average, that a row goes to
        away = call.bytes / call.copies * nodes * (far - 1) / far
        sent = max(away / outside, moved / inside)
    else:
        sent = moved / min(inside, near * outside)
    steps = (near - 1) * cluster.inside.latency + min(far - 1, 4 * ceil(log2(far))) * cluster.network.latency
    return call.count * (START + rounds * steps + sent)


def _reached(link: Link, name: str) -> float:
    return REACHED.get(link.kind, REACHED["pcie"]).get(name, 0.7)


def beside(computing: float, hidden: float, kind: str) -> float:
    """Seconds of ``computing`` with ``hidden`` seconds of collectives beside it: while they run they take units,
    and what does not fit is waited for."""
    return max(computing + SLOWED.get(kind, 0.1) * hidden, hidden)
