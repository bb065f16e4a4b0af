"""What model servers cost, by role. Bytes of payload: what is given to the transport, memory or connection.

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
from meshfit.cost import Cost
from meshfit.server.compress import Codec
from meshfit.server.packing import Parcel, trained, widely


@dataclass(frozen=True)
class Payload:
    """What travels, by server: gradients up, weights down. The first also gets BatchNorm's ``running`` statistics."""

    parameters: Mapping[str, Tensor]
    """Those that are trained."""
    running: Mapping[str, Tensor]
    servers: int = 1
    compress: str = "none"

    @classmethod
    def of(cls, model: nn.Module, *, servers: int = 1, compress: str = "none") -> Self:
        return cls(trained(model), running_statistics(model), servers, compress)

    @property
    def shares(self) -> list[dict[str, Tensor]]:
        return widely(self.parameters, self.servers)

    @property
    def parcels(self) -> list[Parcel]:
        return [Parcel.of(share) for share in self.shares]

    @property
    def up(self) -> list[int]:
        return [Codec(self.compress, p).bytes + extra for p, extra in zip(self.parcels, self._running, strict=True)]

    @property
    def down(self) -> list[int]:
        return [p.bytes + extra for p, extra in zip(self.parcels, self._running, strict=True)]

    @property
    def _running(self) -> list[int]:
        return [Parcel.of(self.running).bytes, *([0] * (self.servers - 1))]


def worker(payload: Payload, *, device: str = "cpu") -> Cost:
    """Of a worker, a step."""
    up, down, bare = sum(payload.up), sum(payload.down), sum(parcel.bytes for parcel in payload.parcels)
    weights, gradients, host = down, up, {}
    if device != "cpu":  # the payload is a copy, in host memory
        host = {"payload": up + down}
        weights = gradients = bare
    elif payload.compress != "none":
        gradients += bare
    if payload.compress != "none":
        host = {**host, "feedback": bare}
    return Cost(
        held={"weights": weights, "gradients": gradients},
        host=host,
        calls={"push": payload.servers, "pull": payload.servers},
        moved={"push": up, "pull": down},
    )


def server(payload: Payload, state: StateBytes, *, workers: int, index: int = 0, ema: bool = False) -> Cost:
    """Of one server, for a step of all ``workers``: synchronous, or each of them once."""
    share, parcel = payload.shares[index], payload.parcels[index]
    kept = sum(sum(state.of(tuple(p.shape), str(p.dtype).removeprefix("torch."))) for p in share.values() if p.numel())
    host = {"weights": parcel.bytes * (1 + ema), "gradients": parcel.bytes, "optimizer": kept}
    return Cost(
        host=host,
        calls={"push": workers, "pull": workers},
        moved={"push": workers * payload.up[index], "pull": workers * payload.down[index]},
    )
