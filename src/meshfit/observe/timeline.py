"""A run's spans in time: as a Chrome trace, which Perfetto opens, and as a picture.

In the picture one lane is one device. Spans within a phase are drawn in the phase's place, microbatches are numbered,
and what is passed from stage to stage is a line between lanes.
"""

import gzip
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshfit.observe.kinds import PHASES, kind_of
from meshfit.observe.reading import Rank, RecordedRun, RecordedSpan
from meshfit.observe.svg import lanes_picture


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps of a run to look at, and their time."""

    name: str
    start: float
    end: float
    first: int
    last: int


def chrome_trace(run: RecordedRun) -> dict[str, Any]:
    """Chrome's trace-event format: a process a lane; threads for phases, spans within them, and overlapped ones."""
    events: list[dict[str, Any]] = []
    microseconds = lambda seconds: round(seconds * 1e6, 3)
    for pid, (label, rank) in enumerate(lanes(run)):
        where = f"{rank.facts.get('device', '')} {rank.facts.get('host', '')}".strip()
        meta = {"ph": "M", "pid": pid, "tid": 0}
        events.append({**meta, "name": "process_name", "args": {"name": f"{label}  {where}".strip()}})
        events.append({**meta, "name": "process_sort_index", "args": {"sort_index": pid}})
        for thread, name in enumerate(("phases", "within", "overlapped")):
            events.append({**meta, "name": "thread_name", "tid": thread, "args": {"name": name}})
        for span in rank.spans:
            name = span.name if "microbatch" not in span.about else f"{span.name} {span.about['microbatch']}"
            phase = kind_of(span.name).phase
            event = {"name": name, "cat": span.name, "ph": "X", "pid": pid, "args": {"step": span.step, **span.about}}
            event["tid"] = 0 if not phase else 2 if phase == "overlapped" else 1
            events.append({**event, "ts": microseconds(span.at), "dur": microseconds(span.seconds)})
        for instant in rank.instants:
            at = microseconds(instant["at"])
            events.append({"name": instant["instant"], "ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": at})
        for key in ("cpu", "rss", "gpu_use", "gpu_allocated"):
            for at, value in rank.series(key):
                events.append({"name": key, "ph": "C", "pid": pid, "ts": microseconds(at), "args": {key: value}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"plan": run.plan}}


def lanes(run: RecordedRun) -> list[tuple[str, Rank]]:
    """Ranks and servers, each with its label."""
    return [*((f"rank {r.rank}", r) for r in run.ranks), *((f"server {r.rank}", r) for r in run.servers)]


def write_trace(run: RecordedRun, path: Path) -> None:
    """The Chrome trace, compressed."""
    path.write_bytes(gzip.compress(json.dumps(chrome_trace(run), separators=(",", ":")).encode(), 6))


def drawn(rank: Rank) -> list[RecordedSpan]:
    """Spans for one lane, none over another: those within a phase in its place, with what is left of the phase."""
    inner = defaultdict(list)
    for span in rank.spans:
        if kind_of(span.name).phase in PHASES:
            inner[span.step].append(span)
    found: list[RecordedSpan] = []
    for span in rank.spans:
        if kind_of(span.name).phase:
            continue
        parts = [s for s in inner.get(span.step, []) if s.at >= span.at - 1e-6 and s.end <= span.end + 1e-6]
        whole = [] if parts and span.name == "forward_backward" else [span]  # of which the rest is waiting
        found += flat([*whole, *parts])
    return sorted(found, key=lambda span: span.at)


def overlapped(rank: Rank) -> list[RecordedSpan]:
    """Spans that overlap the work, for the line below a lane."""
    return [span for span in rank.spans if kind_of(span.name).phase == "overlapped"]


def flat(spans: list[RecordedSpan]) -> list[RecordedSpan]:
    """Nested spans as a row of pieces: the inner ones, and what they leave of the outer ones. The longest piece of a
    span keeps its microbatch."""
    ordered = sorted(spans, key=lambda span: (span.at, -span.seconds))
    edges = sorted({edge for span in spans for edge in (span.at, span.end)})
    pieces: dict[int, list[RecordedSpan]] = defaultdict(list)
    open_, ahead = [], 0  # spans under way, innermost last; the next one to begin
    for at, until in pairwise(edges):
        while ahead < len(ordered) and ordered[ahead].at <= at:
            open_.append(ahead)
            ahead += 1
        open_ = [number for number in open_ if ordered[number].end > at + 1e-6]
        if not open_:
            continue
        some = pieces[open_[-1]]
        if some and some[-1].end >= at - 1e-9:
            some[-1] = replace(some[-1], seconds=until - some[-1].at)
        else:
            some.append(replace(ordered[open_[-1]], at=at, seconds=until - at, about={}))
    for number, some in pieces.items():
        longest = max(range(len(some)), key=lambda i: some[i].seconds)
        some[longest] = replace(some[longest], about=ordered[number].about)
    return [piece for some in pieces.values() for piece in some]


def windows(run: RecordedRun, usual_steps: int = 4) -> list[StepRange]:
    """Some usual steps; the slowest, if it is far slower and not among the first; and the first ones."""
    bounds = step_bounds(run)
    steps = sorted(bounds)
    if not steps:
        return []

    def found(name: str, first: int, last: int) -> StepRange:
        return StepRange(name, bounds[first][0], bounds[last][1], first, last)

    took = {step: end - start for step, (start, end) in bounds.items()}
    inside = {s.step for rank in run.ranks for s in rank.spans if kind_of(s.name).phase == "forward_backward"}
    later = [step for step in steps if step > 3] or steps
    later = [step for step in later if step in inside] or later  # a GPU times spans within phases in some steps alone
    usual = statistics.median(took[step] for step in later)
    count = min(usual_steps, len(later))
    runs = [some for some in zip(*(later[i:] for i in range(count)), strict=False) if some[-1] - some[0] == count - 1]
    off = lambda some: abs(bounds[some[-1]][1] - bounds[some[0]][0] - count * usual)
    middle = min(runs or [later[:1]], key=off)
    slowest = max(later, key=lambda step: took[step])
    return [
        found("usual", middle[0], middle[-1]),
        *([found("slowest", slowest, slowest)] if took[slowest] > 1.5 * usual else []),
        found("first", steps[0], steps[min(3, len(steps) - 1)]),
    ]


def step_bounds(run: RecordedRun) -> dict[int, tuple[float, float]]:
    """When each step began on the first rank, and ended on the last; without evaluation and checkpoints. After the
    last step ranks look for data once more, which is no step."""
    found: dict[int, tuple[float, float]] = {}
    spans = [span for rank in run.ranks for span in rank.spans]
    for span in spans:
        if span.name in PHASES and span.name not in ("evaluate", "checkpoint"):
            start, end = found.get(span.step, (span.at, span.end))
            found[span.step] = (min(start, span.at), max(end, span.end))
    made = {span.step for span in spans if span.name == "forward_backward"}
    return {step: ends for step, ends in found.items() if step in made}


def picture(run: RecordedRun, window: StepRange | None = None, *, title: str | None = None, moving: float = 0.0) -> str:
    """An SVG of ``window``: by default of some usual steps. ``moving``: seconds in which it is revealed from left to
    right, again and again."""
    window = window or next(iter(windows(run)), None)
    if window is None:
        return ""
    rows = []
    for label, rank in lanes(run):
        device = str(rank.facts.get("device", ""))
        label += f" {device}" if device.startswith("cuda") else ""
        rows.append((label, [*drawn(rank), *overlapped(rank)]))
    heading = title or f"{run.plan}   step {window.first}" + (
        f" to {window.last}" if window.last > window.first else ""
    )
    return lanes_picture(heading, rows, window.start, window.end, passed=passed(run, window), moving=moving)


def passed(run: RecordedRun, window: StepRange) -> list[tuple[int, float, int, float]]:
    """What was passed from stage to stage within ``window``: from which lane and when, to which and when."""
    actions: dict[tuple[Any, ...], list[tuple[int, RecordedSpan]]] = defaultdict(list)
    for row, rank in enumerate(run.ranks):
        for span in rank.spans:
            if "stage" in span.about and window.start <= span.at and span.end <= window.end:
                key = (span.name, span.step, span.about["microbatch"], span.about["stage"])
                actions[key].append((row, span))
    found = []
    for (name, step, microbatch, stage), here in actions.items():
        following = stage + 1 if name == "forward" else stage - 1 if name == "backward" else None
        there = actions.get((name, step, microbatch, following), [])
        for (row, span), (other, later) in zip(here, there, strict=False):
            if row != other and later.at >= span.end:
                found.append((row, span.end, other, later.at))
    return found
