"""A run without waiting, beside the run as measured.

Of a pipeline: its schedule, simulated with the measured time of each action, and transfers that take none. What the
measured step takes beyond that is transfers and late ranks. For other plans: the work alone.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

from meshfit.errors import MeshfitError
from meshfit.observe.kinds import KINDS, PHASES
from meshfit.observe.reading import Rank, RecordedRun, RecordedSpan
from meshfit.plan import Plan
from meshfit.schedule.actions import SPANS, Action, Schedule
from meshfit.schedule.orders import schedule
from meshfit.schedule.simulate import ActionSpan, Simulated, simulate
from meshfit.units import seconds

MOST_STEPS = 64
STEP_PHASES = tuple(name for name in PHASES if name not in ("evaluate", "checkpoint", "compile"))
WAITS = tuple(kind.name for kind in KINDS.values() if kind.waits)
Actions = dict[tuple[str, int, int], RecordedSpan]
"""Of one step, by name, stage and microbatch."""


@dataclass(frozen=True)
class Ideal:
    """``bubble``: share of forward and backward in which ranks were idle, by the schedule and as measured, in the
    median over steps."""

    bubble: float
    measured: float
    lost: float
    """Seconds of a step that the schedule does not account for."""
    lanes: dict[int, list[RecordedSpan]] = field(default_factory=dict)
    """By rank, at the time of the measured steps."""


def ideal(run: RecordedRun, steps: list[int]) -> Ideal | None:
    """Of a pipeline; ``steps`` are those to draw. None where the recorded spans are not those of the plan."""
    plan = _schedule(run)
    if plan is None:
        return None
    pipelines = _pipelines(run, plan)
    actions = {rank.rank: _actions(rank) for ranks in pipelines for rank in ranks}
    known = sorted({step for found in actions.values() for step in found})
    looked = {*(known[3:] or known)[-MOST_STEPS:], *steps}
    seen: list[tuple[float, float, float]] = []
    lanes: dict[int, list[RecordedSpan]] = {}
    for ranks in pipelines:
        for step in (step for step in known if step in looked):
            measured = _measured(plan, [actions[rank.rank].get(step, {}) for rank in ranks])
            if measured is None:
                continue
            took = {timed.action: timed.end - timed.start for spans in measured.spans for timed in spans}
            best = simulate(plan, took.__getitem__)
            seen.append((best.bubble, measured.bubble, measured.seconds - best.seconds))
            if step in steps:
                for rank, spans in zip(ranks, best.spans, strict=True):
                    lanes.setdefault(rank.rank, []).extend(_recorded(timed, step, measured.start) for timed in spans)
    if not seen:
        return None
    bubble, measured, lost = map(statistics.median, zip(*seen, strict=True))
    return Ideal(bubble, measured, lost, lanes)


def _schedule(run: RecordedRun) -> Schedule | None:
    try:
        plan = Plan.parse(run.plan)
        if plan.pipeline > 1:
            return schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks or None)
    except (MeshfitError, ValueError):  # a plan of another version
        pass
    return None


def _pipelines(run: RecordedRun, plan: Schedule) -> list[list[Rank]]:
    """The ranks of each pipeline, first stage first."""
    places: list[list[Rank]] = [[] for _ in range(plan.ranks)]
    for rank in run.ranks:
        stage = next((span.about["stage"] for span in rank.spans if "stage" in span.about), None)
        if stage is not None and stage < plan.stages:
            places[plan.rank_of(stage)].append(rank)
    return [list(ranks) for ranks in zip(*places, strict=False)]


def _actions(rank: Rank) -> dict[int, Actions]:
    """By step."""
    found: dict[int, Actions] = {}
    for span in rank.spans:
        if "stage" in span.about and "microbatch" in span.about:
            found.setdefault(span.step, {})[span.name, span.about["stage"], span.about["microbatch"]] = span
    return found


def _measured(plan: Schedule, ranks: list[Actions]) -> Simulated | None:
    def timed(action: Action, found: Actions) -> ActionSpan:
        span = found[SPANS[action.kind], action.stage, action.microbatch]
        return ActionSpan(action, span.at, span.end)

    orders = zip(plan.orders, ranks, strict=True)
    try:
        return Simulated(plan, tuple(tuple(timed(action, found) for action in order) for order, found in orders))
    except KeyError:  # a step of fewer microbatches, or not written whole
        return None


def _recorded(timed: ActionSpan, step: int, start: float) -> RecordedSpan:
    about = {"microbatch": timed.action.microbatch, "stage": timed.action.stage}
    return RecordedSpan(SPANS[timed.action.kind], step, start + timed.start, timed.end - timed.start, about)


def working(run: RecordedRun) -> float | None:
    """Share of the time of steps in which ranks worked, and waited for nobody; None where it is not known."""
    steps = [rank for rank in run.ranks if rank.share(*STEP_PHASES)]
    shares = [max(0.0, 1 - rank.share(*WAITS) / rank.share(*STEP_PHASES)) for rank in steps]
    return statistics.fmean(shares) if shares else None


def ideal_table(run: RecordedRun, found: Ideal | None) -> dict[str, Any] | None:
    """Ideal beside measured."""
    step, rows = run.step_seconds, []
    if found is not None:
        rows.append(["idle in forward and backward", f"{found.bubble:.1%}", f"{found.measured:.1%}"])
        rows.append(["step", seconds(max(0.0, step - found.lost)), seconds(step)])
    elif "pipeline" not in run.words and len(run.ranks) > 1 and (share := working(run)) is not None:
        rows.append(["at work", "100.0%", f"{share:.1%}"])
        rows.append(["step", seconds(step * share), seconds(step)])
    return {"title": "Ideal and measured", "head": ["", "ideal", "measured"], "rows": rows} if rows and step else None
