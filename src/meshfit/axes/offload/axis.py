"""``offload=activations``: what autograd saves is in host memory from forward to backward.

    memory   of activations: those on their way out and in, and what is too small to move. The rest on the host, pinned
    traffic  what is kept, once out and once in, over the bus; beside the device's work

With ``recompute=`` it is what is kept then: the inputs of blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshfit.anatomy.trace import EventCost
from meshfit.axes.axis import Applied, Axis
from meshfit.axes.head_loss.axis import HELD
from meshfit.axes.offload.activations import SMALLEST, WINDOW, HostActivations
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.torch_private.tensors import storage_id

if TYPE_CHECKING:
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


class ActivationsAxis(Axis):
    word = "offload"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return plan.offloads("activations")

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        if plan.offloads("activations") and plan.recomputed_blocks == "selective":
            raise PlanError(
                f"{plan}: recompute=selective keeps results of products itself, on the device",
                f"{replace(plan, recompute=plan.recompute.replace('selective', 'full'))} works: block inputs are moved",
            )

    def apply(self, placed: "Placed", finding: Any) -> "Offloading":
        return Offloading(placed)

    def cost(self, costing: "Costing", finding: Any) -> None:
        def away() -> None:
            trace, alive = costing.trace, costing.alive
            sizes = {event.index: event.cost.kept for event in trace.events if _moves(event.cost)}
            stay = [replace(e, cost=replace(e.cost, kept=0)) if e.index in sizes else e for e in trace.events]
            moved, times = round(sum(sizes.values()) * alive), costing.plan.microbatches
            copy = lambda name, phase: (
                CollectiveCall(name, size, count=times, axis="offload", phase=phase, hidden=phase)
                for size in sizes.values()
            )
            added = Cost(
                held={"activations": min(moved, max(WINDOW, *sizes.values(), 0))},
                host={"activations": moved},
                collectives=tallied([*copy("device_to_host", "forward"), *copy("host_to_device", "backward")]),
            )
            costing.add((replace(trace, events=tuple(stay)), added))

        costing.after.append(lambda: costing.after.append(away))  # last: what others leave to be kept


def _moves(cost: EventCost) -> bool:
    return cost.kept >= SMALLEST and not any(use.storage == HELD for use in cost.uses)


class Offloading(Applied):
    def __init__(self, placed: "Placed"):
        self._placed, self.host = placed, HostActivations(placed.device)

    @contextmanager
    def inside(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        model, shards = self._placed.model, self._placed.shards
        held = [*model.parameters(), *model.buffers()]
        gathered = [] if shards is None else [flat.whole for unit in shards.units for flat in unit.flats]
        stays = {storage_id(t) for t in (*held, *(t for t in gathered if t is not None))}
        self.host.begin(stays, {p.shape for p in held if p.dim() > 1})
        with saved_tensors_hooks(self.host.pack, self.host.unpack):
            yield
