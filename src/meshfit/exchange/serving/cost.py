"""What model servers cost, by role. Bytes of payload: what is given to the transport, memory or connection.

              up a step                 down a step     held
    worker    P (compressed: 1/2, 1/4)  P               weights, gradients; on one host these are the payload itself
    server    w times its share of P    w times         its share of weights, one gradient, optimizer state

Waiting: a synchronous worker waits for the slowest worker, for the server to sum w gradients and to step, and for two
round trips; one that steps apart for one sum, and while it is more than ``staleness`` steps ahead.
"""

from torch import nn

from meshfit.cost import Cost
from meshfit.exchange.nature import StateBytes
from meshfit.exchange.serving.compress import Codec
from meshfit.exchange.serving.parcel import Parcel, behind, shares, statistics


def worker(model: nn.Module, *, servers: int = 1, compress: str = "none", device: str = "cpu") -> Cost:
    """Of a worker, a step."""
    up, down, packed = _payload(model, servers, compress)
    weights, gradients = sum(down), sum(up)
    host = {}
    if device != "cpu":  # the payload is a copy, in host memory
        host = {"payload": sum(up) + sum(down)}
        weights = gradients = sum(Parcel.of(share).bytes for share in shares(model, servers))
    elif packed:
        gradients += sum(Parcel.of(share).bytes for share in shares(model, servers))
    if packed:
        host = {**host, "feedback": sum(Parcel.of(share).payload for share in shares(model, servers))}
    return Cost(
        held={"weights": weights, "gradients": gradients},
        host=host,
        calls={"push": servers, "pull": servers},
        moved={"push": sum(up), "pull": sum(down)},
    )


def server(
    model: nn.Module,
    state: StateBytes,
    *,
    workers: int,
    index: int = 0,
    servers: int = 1,
    compress: str = "none",
    ema: bool = False,
) -> Cost:
    """Of one server, for a step of all ``workers``: synchronous, or each of them once."""
    up, down, _ = _payload(model, servers, compress)
    share = shares(model, servers)[index]
    parcel = Parcel.of(share)
    kept = sum(sum(state.of(tuple(p.shape), str(p.dtype).removeprefix("torch."))) for p in share.values() if p.numel())
    host = {"weights": parcel.bytes * (1 + ema), "gradients": parcel.bytes, "optimizer": kept}
    return Cost(
        host=host,
        calls={"push": workers, "pull": workers},
        moved={"push": workers * up[index], "pull": workers * down[index]},
    )


def _payload(model: nn.Module, servers: int, compress: str) -> tuple[list[int], list[int], bool]:
    """Bytes up and down by server, and whether gradients are packed. The first also gets BatchNorm's statistics."""
    parcels = [Parcel.of(share) for share in shares(model, servers)]
    running = [Parcel.of(statistics(model)).bytes, *([0] * (servers - 1))]
    up = [behind(Codec(compress, p).bytes) + extra for p, extra in zip(parcels, running, strict=True)]
    down = [behind(p.bytes) + extra for p, extra in zip(parcels, running, strict=True)]
    return up, down, compress != "none"
