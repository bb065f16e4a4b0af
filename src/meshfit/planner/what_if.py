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
    allowed."""
    alone = replace(allowed, fixed={**allowed.fixed, "microbatches": 1}, offload=False)
    fits = lambda size: search(predictor, size, alone).best
    found = _largest(fits, batch, batch << 12, predictor.cluster.devices)
    return None if found is None else found[1]


def largest_model(
    model: Decoder, predicting: Callable[[Decoder], Predictor], batch: int, allowed: Allowed
) -> tuple[Decoder, Prediction] | None:
    """The same decoder with as many layers as fit."""
    deeper = lambda layers: replace(model, layers=layers)
    fits = lambda layers: search(predicting(deeper(layers)), batch, allowed).best
    found = _largest(fits, model.layers, model.layers << 8, 1)
    return None if found is None else (deeper(found[0]), found[1])


def _largest(
    fits: Callable[[int], Prediction | None], first: int, limit: int, step: int
) -> tuple[int, Prediction] | None:
    """The largest number that fits, to a part in 32 and in multiples of ``step``, with what it gives: doubled from
    ``first`` on while it fits, then by halves between. Smaller ones than ``step`` are tried where none else fits."""
    best, low, high = None, 0, max(1, first)
    while high < limit and (found := fits(high)) is not None:
        best, low, high = (high, found), high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        middle = middle // step * step or middle
        if middle <= low:
            break
        if (found := fits(middle)) is None:
            high = middle
        else:
            best, low = (middle, found), middle
    return best
