"""The keeper of one server's share of a model, from what the user gave."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.probe_optimizer import probe_optimizer
from meshfit.errors import PlanError
from meshfit.server.keeper import Keeper, restrict
from meshfit.server.packing import shares
from meshfit.server.running_statistics import RunningStatistics


def keep(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    *,
    index: int = 0,
    servers: int = 1,
    clip: float | None = None,
    ema: float | None = None,
    damp: bool = False,
    shorten: bool = False,
) -> Keeper:
    """Server ``index`` of ``servers``. ``make_optimizer`` is given all parameters, as on one device, so that groups of
    them come out as there; what other servers own is then forgotten, and its memory let go."""
    share = shares(model, servers)[index]
    optimizer = make_optimizer(list(model.parameters()))
    if servers > 1 and not (kind := probe_optimizer(optimizer)).separate:
        raise PlanError(
            f"server={servers}: parts of the model are stepped apart, which {type(optimizer).__name__} cannot",
            kind.why,
            "server=1 works",
        )
    restrict(optimizer, share.values())
    running = None if index else RunningStatistics.of(model)
    kept = set(share.values())
    for p in model.parameters():
        if p not in kept:
            p.data = torch.empty(0, dtype=p.dtype)
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return Keeper(
        share,
        optimizer,
        None if make_scheduler is None else make_scheduler(optimizer),
        clip=clip,
        ema=ema,
        statistics=running,
        may_fuse=not sparse,
        damp=damp,
        shorten=shorten,
    )
