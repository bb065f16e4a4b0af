"""Questions about clusters and sizes that a search answers: the cheapest cluster for a deadline, the largest batch or
model that fits, how throughput grows with devices."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshfit.errors import JobError
from meshfit.planner.cluster import Cluster
from meshfit.planner.decoder import Decoder
from meshfit.planner.explain import WholeJob
from meshfit.planner.prediction import Prediction, Predictor
from meshfit.planner.search import Allowed, Found, search

Predicting = Callable[[Cluster], Predictor]
"""A model's predictor for a cluster."""

_UNITS = {
    "s": 1,
    "second": 1,
    "minute": 60,
    "min": 60,
    "hour": 3600,
    "h": 3600,
    "day": 86400,
    "d": 86400,
    "week": 604800,
}


def time_of(text: str) -> float:
    """Seconds: "3 days", "12h"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise JobError(f"{text!r} is no time", 'as in "3 days", "12 hours"')
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True)
class Scaled:
    """A cluster of another size, and what was found on it."""

    cluster: Cluster
    found: Found

    def whole(self, steps: int) -> WholeJob | None:
        best = self.found.best
        return None if best is None else WholeJob(prediction=best, cluster=self.cluster, steps=steps)


def sizes_up_to(cluster: Cluster) -> list[int]:
    """Devices: powers of two inside a node, then powers of two of nodes, and all of them."""
    inside = [n for n in (1, 2, 4, 8, 16) if n < cluster.devices_per_node]
    nodes = [2**i for i in range(cluster.nodes.bit_length()) if 2**i <= cluster.nodes]
    return sorted({*inside, *(n * cluster.devices_per_node for n in nodes), cluster.devices})


def scale(predicting: Predicting, cluster: Cluster, batch: int, allowed: Allowed) -> Iterator[Scaled]:
    """The best plan on 1 to all devices, of the same global batch."""
    for devices in sizes_up_to(cluster):
        smaller = cluster.with_devices(devices)
        yield Scaled(smaller, search(predicting(smaller), batch, allowed))


def cheapest(
    predicting: Predicting, cluster: Cluster, batch: int, allowed: Allowed, *, steps: int, within: float
) -> tuple[Scaled | None, list[Scaled]]:
    """Of the same machines, as few as end ``steps`` in ``within`` seconds at the least price (device hours, where no
    price is known); and all that were tried."""
    tried = list(scale(predicting, cluster, batch, allowed))
    in_time = [(w, s) for s in tried if (w := s.whole(steps)) is not None and w.seconds <= within]
    cost = lambda pair: pair[0].price or pair[0].seconds * pair[1].cluster.devices
    return (min(in_time, key=cost)[1] if in_time else None), tried


def largest_batch(predictor: Predictor, batch: int, allowed: Allowed) -> Prediction | None:
    """The best plan of the largest batch in one pass of all devices, without recomputing or offloading more than is
    allowed: doubled while it fits, then by halves between."""
    alone = replace(allowed, fixed={**allowed.fixed, "microbatches": 1}, offload=False)
    best, low, high = None, 0, max(1, batch)
    try_it = lambda size: search(predictor, size, alone).best
    while (found := try_it(high)) is not None and high < batch << 12:
        best, low, high = found, high, 2 * high
    if best is None:  # not even that: smaller ones
        while high > 1 and best is None:
            high //= 2
            best, low = try_it(high), high
        return best
    step = max(1, predictor.cluster.devices)
    while high - low > max(step, low // 16):
        middle = (low + high) // 2 // step * step
        if middle <= low:
            break
        found = try_it(middle)
        best, low, high = (found, middle, high) if found is not None else (best, low, middle)
    return best


def largest_model(
    model: Decoder, predicting: Callable[[Decoder], Predictor], batch: int, allowed: Allowed
) -> tuple[Decoder, Prediction] | None:
    """The same decoder with as many layers as fit."""
    best, low, high = None, 0, model.layers
    fits = lambda layers: search(predicting(replace(model, layers=layers)), batch, allowed).best
    while (found := fits(high)) is not None and high < model.layers << 8:
        best, low, high = (replace(model, layers=high), found), high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        found = fits(middle)
        low, high = (middle, high) if found is not None else (low, middle)
        best = (replace(model, layers=middle), found) if found is not None else best
    return best
