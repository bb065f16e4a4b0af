"""What ``tensor=n`` splits of each model, and what that costs: printed by ``parity.py --axes tensor``.

parameters   of all bytes of parameters, how many are cut
flops        of all arithmetic of a forward and backward, how much is shared: counted on a rank and alone
collectives  in one forward
bytes        that a step really moves, on one rank, beside what ``cost`` foretells: equal
memory       weights, gradients and AdamW's state on one rank, over those of one device
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.collectives import Collectives
from benchmarks.zoo import Case
from meshfit.anatomy.record import TraceError
from meshfit.axes.shard.units import traced
from meshfit.data import tree
from meshfit.job import Job
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from meshfit.run import Run

DEVICES = Devices("cpu", None)
SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    parameters: float
    flops: float
    collectives: int
    moved: int
    foretold: int | None
    """None: the model cannot be traced, or its bytes depend on what it is given."""
    memory: float


def rows(cases: list[Case], plan: Plan) -> dict[str, Row]:
    return {case.name: row_of(case, plan) for case in cases}


def row_of(case: Case, plan: Plan) -> Row:
    degree = plan.tensor
    alone = replace(_job(case, Plan()), plan=Plan())
    spread = _job(case, plan)
    flops, memory = _flops(Run(alone, World(0, 1, torch.device("cpu"))))
    with LocalRanks(lambda world, _: _watched(spread, world), size=degree, devices=DEVICES) as ranks:
        found = ranks.results[0]
    shared = min(1.0, (1 - found["flops"] / flops) * degree / (degree - 1)) if flops else 0.0
    return Row(
        parameters=found["parameters"],
        flops=shared,
        collectives=found["collectives"],
        moved=found["moved"],
        foretold=found["foretold"],
        memory=found["memory"] / memory,
    )


def _job(case: Case, plan: Plan) -> Job:
    return Job(
        model=case.build,
        data=case.data(2 * SAMPLES),
        loss=case.loss,
        optimizer=torch.optim.AdamW,
        batch_size=SAMPLES,
        steps=2,
        plan=plan,
        devices=DEVICES,
        shuffle=False,
    ).settled()


def _flops(run: Run) -> tuple[int, int]:
    """Of a forward and backward; and bytes of weights, gradients and optimizer state after a step."""
    batch = next(iter(run.batches()))
    with FlopCounterMode(display=False) as counter:
        run.schedule(batch)
    scalars = run.exchange.finish()
    run.update(run.exchange.gradients, scalars.loss, 1.0, run.exchange.norm)
    held = [*run.model.parameters(), *run.exchange.gradients, *tree.tensors(dict(run.optimizer.state))]
    return counter.get_total_flops(), sum(t.nbytes for t in held)


def _watched(job: Job, world: World) -> dict[str, Any]:
    whole = {name: p.nbytes for name, p in job.build().named_parameters()}
    run = Run(job, world)
    parts = run.placed.layers["tensor"]
    cut = [name for name, p in run.model.named_parameters() if parts.is_cut(p)]
    batch = next(iter(run.batches()))
    with Collectives() as forward:
        run.job.objective(run.model, batch.microbatches[0].content)
    with Collectives() as step:
        run.schedule(batch)
        run.exchange.finish()
    foretold = _foretold(job, run, batch.microbatches[0].content) if world.rank == 0 else None
    run.exchange.clear()
    flops, memory = _flops(run)
    return {
        "parameters": sum(whole[name] for name in cut) / sum(whole.values()),
        "flops": flops,
        "collectives": forward.calls.total(),
        "moved": step.moved.total(),
        "foretold": foretold,
        "memory": memory,
    }


def _foretold(job: Job, run: Run, batch: Any) -> int | None:
    model: nn.Module = job.build().train()
    trace = traced(model, job.objective, batch, device="cpu")
    if isinstance(trace, TraceError):
        return None
    found = cost(run.plan, trace, run.optimizer, found=run.placed.found)
    return sum(found.moved.values())


def table(found: dict[str, Row], plan: Plan) -> Table:
    shown = Table(
        *("model", "parameters cut", "flops shared", "collectives\na forward", "bytes a step", "foretold", "memory"),
        title=str(plan),
    )
    for name, row in found.items():
        foretold = "-" if row.foretold is None else f"{row.foretold:,}"
        if row.foretold not in (None, row.moved):
            foretold = f"[red]{foretold}[/red]"
        shown.add_row(
            name,
            f"{row.parameters:.0%}",
            f"{row.flops:.0%}",
            str(row.collectives),
            f"{row.moved:,}",
            foretold,
            f"{row.memory:.2f}",
        )
    return shown
