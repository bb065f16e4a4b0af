"""What a run would have been had nobody waited, beside what it was.

Of a pipeline: its schedule, simulated with the times that each action really took, and transfers that take none. What
the measured step has beyond that is not the schedule's: transfers, and ranks that came late. Elsewhere: work alone.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

from meshfit.errors import MeshfitError
from meshfit.observe.figures import seconds as in_words
from meshfit.observe.kinds import KINDS, PHASES
from meshfit.observe.reading import Rank, Recording, Span
from meshfit.passes.clock import SPANS
from meshfit.plan import Plan
from meshfit.schedule.actions import Action, Schedule, schedule
from meshfit.schedule.simulate import Simulated, simulate
from meshfit.schedule.simulate import Span as Timed

MOST_STEPS = 64


@dataclass(frozen=True)
class Ideal:
    """``bubble``: share of forward and backward in which ranks had nothing to do, by the schedule and as measured, in
    the median over steps."""

    bubble: float
    measured: float
    lost: float
    """Seconds of a step that the schedule does not account for."""
    lanes: dict[int, list[Span]] = field(default_factory=dict)
    """By rank, in the place of the measured steps."""


def ideal(run: Recording, steps: list[int]) -> Ideal | None:
    """Of a pipeline; ``steps`` are those to draw. None where spans and plan do not tell."""
    plan = _schedule(run)
    if plan is None:
        return None
    lines = _lines(run, plan)
    acts = {rank.rank: _actions(rank) for line in lines for rank in line}
    known = sorted({step for found in acts.values() for step in found})
    looked = {*(known[3:] or known)[-MOST_STEPS:], *steps}
    seen: list[tuple[float, float, float]] = []
    lanes: dict[int, list[Span]] = {}
    for line in lines:
        for step in (step for step in known if step in looked):
            measured = _measured(plan, [acts[rank.rank].get(step, {}) for rank in line])
            if measured is None:
                continue
            took = {timed.action: timed.end - timed.start for spans in measured.spans for timed in spans}
            best = simulate(plan, took.__getitem__)
            seen.append((best.bubble, measured.bubble, measured.seconds - best.seconds))
            if step in steps:
                for rank, spans in zip(line, best.spans, strict=True):
                    lanes.setdefault(rank.rank, []).extend(_drawn(timed, step, measured.start) for timed in spans)
    if not seen:
        return None
    bubble, measured, lost = (statistics.median(values) for values in zip(*seen, strict=True))
    return Ideal(bubble, measured, lost, lanes)


def _schedule(run: Recording) -> Schedule | None:
    try:
        plan = Plan.parse(run.plan)
        if plan.pipeline > 1:
            return schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks or None)
    except (MeshfitError, ValueError):  # another version's words
        pass
    return None


def _lines(run: Recording, plan: Schedule) -> list[list[Rank]]:
    """Ranks that are one pipeline each, first stage first."""
    places: list[list[Rank]] = [[] for _ in range(plan.ranks)]
    for rank in run.ranks:
        stage = next((span.about["stage"] for span in rank.spans if "stage" in span.about), None)
        if stage is not None and stage < plan.stages:
            places[plan.rank_of(stage)].append(rank)
    return [list(line) for line in zip(*places, strict=False)]


Found = dict[tuple[str, int, int], Span]


def _actions(rank: Rank) -> dict[int, Found]:
    """By step; then by name, stage and microbatch."""
    found: dict[int, Found] = {}
    for span in rank.spans:
        if "stage" in span.about and "microbatch" in span.about:
            found.setdefault(span.step, {})[span.name, span.about["stage"], span.about["microbatch"]] = span
    return found


def _measured(plan: Schedule, ranks: list[Found]) -> Simulated | None:
    def timed(action: Action, found: Found) -> Timed:
        span = found[SPANS[action.kind], action.stage, action.microbatch]
        return Timed(action, span.at, span.end)

    try:
        spans = [
            tuple(timed(action, found) for action in order) for order, found in zip(plan.orders, ranks, strict=True)
        ]
    except KeyError:  # a step of fewer microbatches, or not written whole
        return None
    return Simulated(plan, tuple(spans))


def _drawn(timed: Timed, step: int, start: float) -> Span:
    about = {"microbatch": timed.action.microbatch, "stage": timed.action.stage}
    return Span(SPANS[timed.action.kind], step, start + timed.start, timed.end - timed.start, about)


def working(run: Recording) -> float | None:
    """Share of the time of steps in which ranks did their own work, and waited for nobody; None where none is known."""
    shares = [work / steps for work, steps in map(_work, run.ranks) if steps]
    return statistics.fmean(shares) if shares else None


def _work(rank: Rank) -> tuple[float, float]:
    """Seconds of work, and of steps."""
    took = {name: seconds for name, seconds in rank.steady.items() if name in KINDS}
    steps = sum(took.get(name, 0.0) for name in PHASES if name not in ("evaluate", "checkpoint", "compile"))
    waits = sum(seconds for name, seconds in took.items() if KINDS[name].waits)
    return max(0.0, steps - waits), steps


def beside(run: Recording, found: Ideal | None) -> dict[str, Any] | None:
    """A table: ideal and measured."""
    step = run.step_seconds
    rows = []
    if found is not None:
        rows.append(["idle in forward and backward", f"{found.bubble:.1%}", f"{found.measured:.1%}"])
        rows.append(["step", in_words(max(0.0, step - found.lost)), in_words(step)])
    elif "pipeline" not in run.words and len(run.ranks) > 1 and (share := working(run)) is not None:
        rows.append(["at work", "100.0%", f"{share:.1%}"])
        rows.append(["step", in_words(step * share), in_words(step)])
    if not rows or not step:
        return None
    return {"title": "Ideal beside measured", "head": ["", "ideal", "measured"], "rows": rows}
