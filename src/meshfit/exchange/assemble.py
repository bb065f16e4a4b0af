"""The exchange of a placed model: which gradients are summed over which ranks, by what its layers say."""

from collections import defaultdict
from collections.abc import Collection

from torch import Tensor, nn

from meshfit.axes.axis import SUMMED
from meshfit.axes.mesh import SECOND_SUM
from meshfit.axes.order import ORDER
from meshfit.axes.place import Placed
from meshfit.errors import PlanError
from meshfit.exchange.across import Across
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.scatter import Scatter
from meshfit.optimizers import Optimizers
from meshfit.plan import Plan

SUMMING = tuple(axis.word for axis in ORDER if axis.splits & SUMMED)
"""Axes whose ranks compute terms of the same gradients."""


def exchange_of(placed: Placed, values: int = 0) -> AllReduce | Scatter | Across:
    """All ranks call it together. ``values``: numbers to be summed beside the loss."""
    plan, mesh, device, shards = placed.plan, placed.mesh, placed.device, placed.shards
    over: dict[tuple[str, ...], list[nn.Parameter]] = defaultdict(list)
    for p in placed.model.parameters():
        if shards is None or p not in shards.place:
            over[tuple(word for word in SUMMING if not _is_cut(placed, word, p))].append(p)
    if shards is None:
        inner = AllReduce(over.pop(SUMMING, []), mesh.over(*SUMMING), device, mesh.groups.get(SECOND_SUM), values)
    else:
        _refuse_trained(plan, placed.model, over.pop(SUMMING, []))
        inner = Scatter(
            shards,
            world=mesh.over(*SUMMING),
            copies=mesh.over(*(word for word in SUMMING if word != "shard")),
            accumulate=plan.zero == 1 and plan.microbatches > 1,
            mixed=placed.staged is not None,
        )
    experts = [AllReduce(some, mesh.over(*words), device) for words, some in sorted(over.items())]
    layers = list(placed.layers.values())
    if not any(layer.spreads for layer in layers):
        assert not experts
        return inner
    return Across(inner, layers, placed.model, device, experts=experts, loss_replicas=plan.tensor * plan.branch)


def _refuse_trained(plan: Plan, model: nn.Module, unsharded: list[nn.Parameter]) -> None:
    """What sharding left out must need no gradient: nobody would sum it."""
    left_out = {p for p in unsharded if p.requires_grad}
    names = [name for name, p in model.named_parameters() if p in left_out]
    if names:
        raise PlanError(
            f"{plan}: parameters that train belong to no unit of the sharding: {', '.join(names[:8])}",
            "their gradients would not be summed over ranks",
            "data= instead of shard= holds them whole on each device",
        )


def _is_cut(placed: Placed, word: str, p: nn.Parameter) -> bool:
    layer = placed.layers.get(word)
    return layer is not None and layer.is_cut(p)


def cut_state(optimizer: Optimizers, placed: Placed, whole: Collection[Tensor] = ()) -> None:
    """Cut what an optimizer holds already as its parameters are cut: some make state when they are built. Those that
    are stepped ``whole`` keep it."""
    for parameter, state in optimizer.state.items():
        if parameter in whole:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor):
                for layer in placed.layers.values():
                    state[key] = layer.part(parameter, state[key])
