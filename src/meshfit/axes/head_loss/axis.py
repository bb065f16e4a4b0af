"""``recompute=loss``: logits and their cross entropy some tokens at a time, so that all logits are never there at once.

    memory   of logits, softmax and their gradients: those of one chunk. Beside it, from the loss to its backward, the
             gradients of the head's input and weight
    traffic  none of its own

Exact: a token's loss does not depend on other tokens. In evaluation logits are what the model makes of them.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from torch import nn

from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import StorageUse, Trace
from meshfit.axes.axis import Axis
from meshfit.axes.forward import wrap
from meshfit.axes.head_loss.chunks import chunk_rows
from meshfit.axes.head_loss.find import LOOKED_FOR, NoHead, head_of
from meshfit.axes.head_loss.logits import Head
from meshfit.axes.pipeline.cut import Shell
from meshfit.cost import CollectiveCall, Cost
from meshfit.errors import PlanError
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing

HELD = -3
"""The storage, in a trace, of gradients that wait for their backward: of no event, and saved by nobody."""

COPIES = 4
"""Of a chunk's logits in fp32, at most: as they are, as logarithms, and the gradients of both."""


class HeadLossAxis(Axis):
    word = "head_loss"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return plan.head_loss

    def find(self, study: "Study") -> str:
        """The path of the head."""
        without = replace(study.plan, recompute=study.plan.recomputed_blocks)
        works = f"{without} works"
        if isinstance(study.trace, TraceError):
            raise PlanError(f"{study.plan}: the model cannot be traced", study.trace.headline, LOOKED_FOR, works)
        try:
            found = head_of(study.trace)
        except NoHead as none:
            headline = f"{study.plan}: there is no head whose loss could be computed in chunks"
            raise PlanError(headline, *none.args, LOOKED_FOR, works) from none
        layer = study.model.get_submodule(found.head)
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            raise PlanError(f"{study.plan}: {found.head} is no plain nn.Linear but a {kind}", LOOKED_FOR, works)
        return found.head

    def closed(self, finding: str) -> Iterable[str]:
        return (finding,)

    def apply(self, placed: "Placed", finding: str) -> None:
        layer: Any = placed.model.get_submodule(finding)
        if not isinstance(layer, Shell):
            wrap(layer, Head(finding, layer).around)

    def cost(self, costing: "Costing", finding: Any) -> None:
        def later() -> None:
            trace, chunks = in_chunks(costing.unsharded, costing.trace)
            split = costing.found.get("tensor")
            sliced = split is not None and any(region.slices for region in split.regions)
            calls = 2 * (chunks - 1) * costing.plan.microbatches if sliced and chunks else 0
            more = CollectiveCall("all_reduce", 0, costing.plan.tensor, count=calls, axis="tensor")
            costing.add((trace, Cost(collectives=(more,) if calls else ())))  # of as many bytes as at once

        costing.after.append(later)


def in_chunks(unsharded: Trace, trace: Trace) -> tuple[Trace, int]:
    """``trace`` with what is kept then, and how many chunks there are; ``unsharded`` has the parameters that a rank
    computes with."""
    try:
        found = head_of(trace)
    except NoHead:
        return trace, 0
    head = trace.events[found.events[0]]
    given, logits = (trace.values[i] for i in (head.reads[0], head.writes[0]))
    held = [unsharded.parameters[name] for name in head.parameters if name in unsharded.parameters]
    classes = max((p.shape[0] for p in held if p.shape), default=logits.shape[-1])
    tokens = prod(logits.shape[:-1])
    rows = chunk_rows(tokens, given.shape[-1], classes)
    chunk = rows * classes * 4 * COPIES
    gradients = StorageUse(HELD, given.bytes + sum(p.bytes for p in held if p.trained), made=True, saved=True)
    events = list(trace.events)
    for i in found.events:
        last = i == found.events[-1]
        costs = replace(events[i].cost, kept=gradients.bytes * last, passed=chunk * last, uses=(gradients,) * last)
        events[i] = replace(events[i], cost=costs)
    return replace(trace, events=tuple(events)), ceil(tokens / rows)
