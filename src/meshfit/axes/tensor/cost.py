"""What a rank of a tensor group keeps and computes, from the trace of the whole: events inside regions do 1/n.

A value is shared out from the weight that is cut by columns to the one that is cut by rows; whatever is computed from
it in between is shared out too. Sizes are those of the trace divided by n: a mask or an index that every rank has whole
in between counts too little, what regions add (sums, gathered outputs) counts as it was. Where rows are cut between
regions, so is what is computed of them; what a region keeps of its input is all of it.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from meshfit.anatomy.operations import MatrixProduct, Operation, divided, with_part
from meshfit.anatomy.trace import Event, EventCost, Parameter, Trace
from meshfit.axes.counted import counted_cost
from meshfit.axes.tensor.region import VOCABULARY, Cut, TensorPlan, joined
from meshfit.axes.tensor.sliced import POINTWISE
from meshfit.cost import CollectiveCall, Cost

HIDDEN = {(name, "backward"): "products" for name in ("all_reduce", "reduce_scatter")}
"""Sums of gradients of a region's input run beside the products for gradients of its weights: see functions.py."""

WHOLE, COLUMN, INSIDE, ROW, ROWS = "whole", "column", "inside", "row", "rows"


def tensor_cost(trace: Trace, plan: TensorPlan, *, microbatches: int = 1, half: str = "") -> tuple[Trace, Cost]:
    """Of a step on one rank. Collectives are those counted when the plan was checked; ``half``: the dtype of what
    products make under autocast, and of its gradients. Rows of an embedding, and what the loss is made of, are fp32."""
    cuts = plan.cuts

    def own(tensors: dict[str, Parameter]) -> dict[str, Parameter]:
        return {name: _cut(p, cuts[name]) if name in cuts else p for name, p in tensors.items()}

    parameters = own(trace.parameters)
    how: dict[str, Any] = {"axis": "tensor", "degree": plan.degree, "samples": plan.samples}
    how |= {"microbatches": microbatches, "hidden": HIDDEN}
    full, rest = [], plan.collectives
    if not plan.traffic:
        every = [(region, each) for region in plan.regions for each in region.traffic]
        full = [(r.calls, each) for r, each in every if r.kind in VOCABULARY and not each.backward]
        rest = [(r.calls, each) for r, each in every if r.kind not in VOCABULARY or each.backward]
    added = counted_cost(full, trace, **how) + counted_cost(rest, trace, **how, half=half)
    sums: Counter[tuple[str, int]] = Counter()
    for name in plan.shared:
        sums[parameters[name].dtype, cuts[name].copies if name in cuts else plan.degree] += parameters[name].bytes
    summed = (
        CollectiveCall("all_reduce", size, degree, axis="tensor", dtype=dtype, phase="step", once=True)
        for (dtype, degree), size in sums.items()
    )
    added += Cost(collectives=tuple(summed))
    return replace(shrunk(trace, plan), parameters=parameters, buffers=own(trace.buffers)), added


def _cut(p: Parameter, each: Cut) -> Parameter:
    shape = (*p.shape[: each.dim], each.own, *p.shape[each.dim + 1 :])
    return replace(p, shape=shape, bytes=p.bytes * each.own // each.size)


def shrunk(trace: Trace, plan: TensorPlan) -> Trace:
    """The trace of what one rank runs, but for its parameters."""
    roles, cuts = _Roles(trace, plan), plan.cuts
    cut: set[int] = set()  # storages of which a rank has a share
    saved: set[int] = set()
    gathered: set[int] = set()  # of rows, what a region has put together
    events = []
    for event in trace.events:
        role = roles.of(event)
        less = 0
        uses = []
        for use in event.cost.uses:
            if use.made and (role in (COLUMN, INSIDE, ROWS) or roles.rowed.issuperset(event.writes)):
                cut.add(use.storage)
            elif use.made:
                cut.discard(use.storage)
            together = role == COLUMN and not use.made and use.storage in cut
            own = use.bytes // plan.degree if use.storage in cut and not together else use.bytes
            if use.saved and together and use.storage in saved and use.storage not in gathered:
                less -= use.bytes
            if use.saved and together:
                gathered.add(use.storage)
            if use.saved and use.storage not in saved:
                saved.add(use.storage)
                less += use.bytes - own
            flops = use.flops if role == WHOLE else use.flops // plan.degree
            uses.append(replace(use, bytes=own, flops=flops))
        held = [(trace.parameters[name].shape, cuts[name]) for name in event.parameters if name in cuts]
        cost = _less(roles.own_kernels(event, role), role, less, tuple(uses), plan.degree)
        events.append(replace(event, cost=_split(cost, event.cost, role, held, plan.degree)))
    values = {
        number: replace(value, bytes=value.bytes // plan.degree) if number in roles.shared | roles.rowed else value
        for number, value in trace.values.items()
    }
    return replace(trace, events=tuple(events), values=values)


def _less(cost: EventCost, role: str, less: int, uses: tuple, degree: int) -> EventCost:
    by = 1 if role == WHOLE else degree
    return EventCost(
        cost.flops // by,
        cost.flops_backward // by,
        cost.bytes_read // by,
        cost.bytes_written // by,
        max(cost.kept - less, 0),
        cost.rounded,
        cost.passed // by,
        uses,
    )


def _split(
    cost: EventCost, whole: EventCost, role: str, held: list[tuple[tuple[int, ...], Cut]], degree: int
) -> EventCost:
    """``cost`` with a rank's share of the operations of ``whole``; ``held``: shapes of weights that are cut."""
    if role == WHOLE:
        return replace(cost, forward=whole.forward, backward=whole.backward, again=whole.again)

    def own(operation: Operation, *, backward: bool = False) -> Operation:
        if isinstance(operation, MatrixProduct):
            parts = (
                with_part(operation, shape, cut.dim, cut.own / max(1, cut.size), backward=backward)
                for shape, cut in held
            )
            if (found := next(filter(None, parts), None)) is not None:
                return found
            if operation.batch == 1 and role != ROWS:
                return operation  # with a weight that every rank has whole
        return divided(operation, degree)

    return replace(
        cost, forward=tuple(map(own, whole.forward)), backward=tuple(own(op, backward=True) for op in whole.backward)
    )


class _Roles:
    """What each event is to the regions of a plan; events are asked for in order."""

    def __init__(self, trace: Trace, plan: TensorPlan):
        self.ties = trace.ties
        self.products = {path for path, kind in trace.kinds.items() if kind in ("Linear", "Conv1D")}
        self.cuts, self.shared = plan.cuts, set()
        self.rows, self.returns = set(), set()
        self.by_rows, self.scatters, self.rowed = set[str](), set[str](), set[int]()
        self.homes: dict[str, str] = {}
        for region in plan.regions:
            self.rows |= {joined(region.module, leave.module) for leave in region.leaves}
            self.rows |= {joined(region.module, name) for raw in region.raw for name in raw.rows}
            self.scatters |= {joined(region.module, leave.module) for leave in region.leaves if leave.rows}
            self.by_rows |= {joined(region.module, path) for path in region.rows}
            self.returns |= {joined(region.module, path) for path, _ in region.gathers}
            self.returns |= {joined(region.module, path) for path in region.lookups}
            for each in region.cuts:
                self.homes[joined(region.module, each.name)] = "" if region.slices else region.module
        self.home: dict[int, str] = {}  # of a value that is shared out

    def of(self, event: Event) -> str:
        parameters = [self.ties.get(name, name) for name in event.parameters]
        held = [name for name in parameters if name in self.cuts]
        reads = [value for value in event.reads if value in self.shared and self._is_inside(event, self.home[value])]
        if not held and not reads:
            if any(self._is_inside(event, path) for path in self.by_rows) or self._keeps_rows(event):
                self.rowed |= set(event.writes)
                return ROWS
            return WHOLE
        if event.name in self.returns or event.name in self.rows or self.rows & set(held):
            if event.name in self.scatters:
                self.rowed |= set(event.writes)
            return ROW
        home = self.homes[held[0]] if held else self.home[reads[0]]
        self.shared |= set(event.writes)
        self.home |= dict.fromkeys(event.writes, home)
        return INSIDE if reads else COLUMN

    def own_kernels(self, event: Event, role: str) -> EventCost:
        """Its cost, where a region computes it in another way than autograd would."""
        cost = event.cost
        if role == COLUMN and event.name in self.products:  # see functions.py: rounded anew in backward
            return replace(cost, rounded=0)
        if role == INSIDE and event.name == "cross_entropy":  # see functions.py: one gradient in fp32, not two
            wide = max((use.bytes for use in cost.uses if use.made), default=0)
            return replace(cost, passed=min(cost.passed, wide)) if cost.passed == 2 * wide else cost
        return cost

    def _keeps_rows(self, event: Event) -> bool:
        return event.kind == "glue" and event.name in POINTWISE and not self.rowed.isdisjoint(event.reads)

    def _is_inside(self, event: Event, home: str) -> bool:
        return not home or any(path == home or path.startswith(f"{home}.") for path in (event.name, event.inside))
