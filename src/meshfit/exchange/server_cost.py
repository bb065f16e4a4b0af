"""What travels between a worker and its model servers, and what they cost, by role.

Bytes of payload: what is given to the transport, memory or connection.

              up a step                 down a step     held
    worker    P (compressed: 1/2, 1/4)  P               weights, gradients; on one host these are the payload itself
    server    w times its share of P    w times         its share of weights, one gradient, optimizer state

Waiting: a synchronous worker waits for the slowest worker, for the server to sum w gradients and to step, and for two
round trips; an asynchronous one for one sum, and while it is more than ``staleness`` steps ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from meshfit.anatomy.probe_optimizer import StateBytes
from meshfit.axes.data.batchnorm import running_statistics
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.exchange.compress import Codec
from meshfit.exchange.parcel import Parcel, balanced, trained

BROADCAST = 13
"""Numbers that the first rank of a worker group broadcasts to the others, twice a step, beside one for each worker."""


@dataclass(frozen=True)
class Payload:
    """Gradients up, weights down; to and from the first server also BatchNorm's ``running`` statistics."""

    parcels: tuple[Parcel, ...]
    """Of the trained parameters, by server."""
    running: Parcel
    compress: str = "none"

    @classmethod
    def of(cls, model: nn.Module, *, servers: int = 1, compress: str = "none") -> Self:
        return cls.holding(trained(model), running_statistics(model), servers=servers, compress=compress)

    @classmethod
    def holding(
        cls, parameters: Mapping[str, Tensor], running: Mapping[str, Tensor], *, servers: int, compress: str
    ) -> Self:
        return cls(tuple(map(Parcel.of, balanced(parameters, servers))), Parcel.of(running), compress)

    @property
    def names(self) -> list[str]:
        return [name for parcel in self.parcels for name in parcel.names]

    @property
    def compressed(self) -> bool:
        return self.compress != "none"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Bytes up and down, by server."""
        extra = [self.running.bytes, *([0] * (len(self.parcels) - 1))]
        return [
            (Codec(self.compress, p).bytes + more, p.bytes + more) for p, more in zip(self.parcels, extra, strict=True)
        ]


def worker(payload: Payload, *, device: str = "cpu") -> Cost:
    """Of a worker, a step."""
    (up, down), bare = map(sum, zip(*payload.sizes, strict=True)), sum(parcel.bytes for parcel in payload.parcels)
    weights, gradients, host = down, up, {}
    if device != "cpu":  # the payload is a copy, in host memory
        host = {"payload": up + down}
        weights = gradients = bare
    elif payload.compressed:
        gradients += bare
    if payload.compressed:
        host = {**host, "feedback": bare}
    servers = len(payload.parcels)
    return Cost(
        held={"weights": weights, "gradients": gradients},
        host=host,
        collectives=_said({"push": up / servers, "pull": down / servers}, servers),
    )


def worker_group(payload: Payload, up: int, down: int, *, workers: int, ranks: int) -> Cost:
    """Of a rank of a worker that is ``ranks`` of them, a step, beside what they exchange among themselves. ``up`` and
    ``down``: bytes that it copies to and from the memory they share."""
    return Cost(
        host={"payload": sum(map(sum, payload.sizes)) // ranks},
        collectives=(
            *_said({"push": up, "pull": down}, 1),
            *_said({"all_reduce": 8 * (len(payload.names) + 1)}, 1, ranks),
            *_said({"broadcast": 8 * (BROADCAST + workers)}, 2, ranks),
        ),
    )


def server(payload: Payload, state: StateBytes, *, workers: int, index: int = 0, ema: bool = False) -> Cost:
    """Of one server, for a step of all ``workers``: synchronous, or each of them once."""
    parcel, (up, down) = payload.parcels[index], payload.sizes[index]
    shapes = [(tuple(shape), run.dtype) for run in parcel.runs for shape in run.layout.shapes if shape.numel()]
    kept = sum(sum(state.of(shape, str(dtype).removeprefix("torch."))) for shape, dtype in shapes)
    return Cost(
        host={"weights": parcel.bytes * (1 + ema), "gradients": parcel.bytes, "optimizer": kept},
        collectives=_said({"push": up, "pull": down}, workers),
    )


def _said(sizes: Mapping[str, float], count: int, degree: int = 1) -> tuple[CollectiveCall, ...]:
    how = {"count": count, "axis": "server", "dtype": "float32", "phase": "step", "once": True}
    return tallied(CollectiveCall(name, size, degree, **how) for name, size in sizes.items())
