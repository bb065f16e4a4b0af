"""The picture of a predicted step: a lane a rank of the pipeline, drawn as measured ones are."""

from collections.abc import Mapping
from html import escape

from meshfit.observe.reading import RecordedSpan
from meshfit.observe.svg import document, lane, legend
from meshfit.observe.timeline import GAP, LANE, LEFT, RIGHT, TOP, WIDTH, axis
from meshfit.plan import Plan
from meshfit.planner.step import StepModel, StepWork
from meshfit.schedule.actions import SPANS
from meshfit.units import seconds

MOST = 48
"""Microbatches that are drawn, or three a rank if that is more."""


def foreseen(plan: Plan, work: StepWork, items: Mapping[str, float], steps: StepModel) -> str:
    """An SVG of forward and backward, then what is waited for, and the update. ``items``: seconds of the step, see
    ``StepTime``."""
    drawn = min(work.microbatches, max(MOST, 3 * work.ranks))
    timed = steps.timeline(work, drawn)
    waits, update = items.get("collectives", 0.0), items.get("update", 0.0)
    inside = sum(e[1] + e[3] for e in steps.stages(work)) / work.ranks * work.microbatches
    after = max(0.0, waits - inside)
    end = timed.end + after + update
    scale = (WIDTH - RIGHT - LEFT) / max(end, 1e-12)
    labels, boxes, names = [], [], dict[str, None]()
    for rank, actions in enumerate(timed.spans):
        spans = [
            RecordedSpan(SPANS[t.action.kind], 1, t.start, t.end - t.start, {"microbatch": t.action.microbatch})
            for t in actions
        ]
        spans.append(RecordedSpan("exchange", 1, timed.end, after))
        spans.append(RecordedSpan("update", 1, timed.end + after, update))
        y = TOP + rank * (LANE + GAP)
        at = f'x="{LEFT - 10}" y="{y + LANE / 2 + 4}"'
        name = f"pipeline {rank}" if work.ranks > 1 else "every rank"
        labels.append(f'<text class="lane" {at} text-anchor="end">{name}</text>')
        boxes.append(lane(spans, 0.0, end, left=LEFT, top=y, height=LANE, scale=scale))
        names |= dict.fromkeys(span.name for span in spans if span.seconds)
    bottom = TOP + len(timed.spans) * (LANE + GAP)
    colours, height = legend(names, bottom + 40, left=LEFT, right=WIDTH - RIGHT)
    slack = steps.software.slack  # over everything
    ruler = axis(end * slack, scale / slack, bottom)
    part = f", {drawn} of its {work.microbatches} microbatches" if drawn < work.microbatches else ""
    heading = f"{plan} · predicted: {seconds(sum(items.values()))} a step{part}"
    head = f'<text class="head" x="{LEFT}" y="20">{escape(heading)}</text>'
    return document(head + "".join(labels) + ruler + colours + "".join(boxes), names, WIDTH, height)
