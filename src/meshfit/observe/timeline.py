"""A run's spans in time: as a Chrome trace, which Perfetto opens, and as a picture of our own.

In the picture one lane is one device. What lies within a phase is drawn in the phase's place. Work fills the lane's
height, waiting a third of it; time that no span holds is left empty. Microbatches are numbered. Traffic that goes on
beside the work is a line below the lane, and what passes from stage to stage a line between lanes.
"""

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from meshfit.observe.kinds import KINDS, PHASES, kind_of
from meshfit.observe.motion import STYLE, cursor
from meshfit.observe.reading import Rank, Recording, Span


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a run worth looking at."""

    name: str
    start: float
    end: float
    first: int
    last: int


def chrome_trace(run: Recording) -> dict[str, Any]:
    """Chrome's trace-event format: a process a lane; phases, what lies within them and what overlaps in threads."""
    events: list[dict[str, Any]] = []
    for pid, (label, rank) in enumerate(lanes(run)):
        where = f"{rank.facts.get('device', '')} {rank.facts.get('host', '')}".strip()
        events.append(_meta("process_name", pid, 0, f"{label}  {where}".strip()))
        events.append({**_meta("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}})
        for thread, name in enumerate(("phases", "within", "overlapped")):
            events.append(_meta("thread_name", pid, thread, name))
        for span in rank.spans:
            about = {"step": span.step, **span.about}
            name = span.name if "microbatch" not in span.about else f"{span.name} {span.about['microbatch']}"
            kind = kind_of(span.name)
            thread = 0 if not kind.phase else 2 if kind.phase == "overlapped" else 1
            where = {
                "pid": pid,
                "tid": thread,
                "ts": round(span.at * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
            }
            events.append({"name": name, "cat": span.name, "ph": "X", **where, "args": about})
        for instant in rank.instants:
            at = round(instant["at"] * 1e6, 3)
            events.append({"name": instant["instant"], "ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": at})
        for sample in rank.samples:
            for key in ("cpu", "rss", "gpu_use", "gpu_allocated"):
                if sample.values.get(key) is not None:
                    counted = {"name": key, "ph": "C", "pid": pid, "ts": round(sample.at * 1e6, 3)}
                    events.append({**counted, "args": {key: sample.values[key]}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"plan": run.plan}}


def lanes(run: Recording) -> list[tuple[str, Rank]]:
    """Who has a lane, and what it is called."""
    return [*((f"rank {r.rank}", r) for r in run.ranks), *((f"server {r.rank}", r) for r in run.servers)]


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}


def write_trace(run: Recording, path: Path) -> Path:
    """The trace, compressed if ``path`` ends in .gz; Perfetto takes either."""
    text = json.dumps(chrome_trace(run), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
    return path


def drawn(rank: Rank) -> list[Span]:
    """Spans for one lane, none on another: those within a phase in its place, with what is left of the phase."""
    inner = defaultdict(list)
    for span in rank.spans:
        if kind_of(span.name).phase in PHASES:
            inner[span.step].append(span)
    found: list[Span] = []
    for span in rank.spans:
        if kind_of(span.name).phase:
            continue
        parts = [s for s in inner.get(span.step, []) if s.at >= span.at - 1e-6 and s.end <= span.end + 1e-6]
        whole = [] if parts and span.name == "forward_backward" else [span]  # of which the rest is waiting
        found += flat([*whole, *parts])
    return sorted(found, key=lambda span: span.at)


def overlapped(rank: Rank) -> list[Span]:
    """What went on beside the work, for the line below a lane."""
    return [span for span in rank.spans if kind_of(span.name).phase == "overlapped"]


def flat(spans: list[Span]) -> list[Span]:
    """Spans that lie within each other, as a row of pieces: the inner ones, and what they leave of the outer ones.
    The longest piece of a span is the one that names its microbatch."""
    pieces: dict[int, list[Span]] = defaultdict(list)
    around: list[list[Any]] = []  # spans under way, innermost last: number, span, from when on nothing is drawn

    def draw(until: float) -> None:
        number, span, at = around[-1]
        if until > at:
            pieces[number].append(replace(span, at=at, seconds=until - at, about={}))
        around[-1][2] = until

    def close() -> None:
        draw(end := around[-1][1].end)
        around.pop()
        if around:
            around[-1][2] = end

    ordered = sorted(spans, key=lambda span: (span.at, -span.seconds))
    for number, span in enumerate(ordered):
        while around and around[-1][1].end <= span.at + 1e-6:
            close()
        if around:
            draw(span.at)
        around.append([number, span, span.at])
    while around:
        close()
    found = []
    for number, some in pieces.items():
        longest = max(range(len(some)), key=lambda i: some[i].seconds)
        some[longest] = replace(some[longest], about=ordered[number].about)
        found += some
    return found


def windows(run: Recording, usual_steps: int = 4) -> list[Window]:
    """The first steps, some usual ones, and the slowest step that is not among the first."""
    bounds = _bounds(run)
    steps = sorted(bounds)
    if not steps:
        return []

    def window(name: str, first: int, last: int) -> Window:
        return Window(name, bounds[first][0], bounds[last][1], first, last)

    found = []
    took = {step: bounds[step][1] - bounds[step][0] for step in steps}
    inside = {s.step for rank in run.ranks for s in rank.spans if kind_of(s.name).phase == "forward_backward"}
    later = [step for step in steps if step > 3] or steps
    later = [step for step in later if step in inside] or later  # on a GPU not all are marked in depth
    usual = statistics.median(took[step] for step in later)
    count = min(usual_steps, len(later))
    runs = [later[i : i + count] for i in range(len(later) - count + 1)]
    runs = [some for some in runs if some[-1] - some[0] == count - 1] or [later[:1]]
    middle = min(runs, key=lambda some: abs(bounds[some[-1]][1] - bounds[some[0]][0] - count * usual))
    found.append(window("usual", middle[0], middle[-1]))
    slowest = max(later, key=lambda step: took[step])
    if took[slowest] > 1.5 * usual:
        found.append(window("slowest", slowest, slowest))
    found.append(window("first", steps[0], steps[min(3, len(steps) - 1)]))
    return found


def quickest(run: Recording, steps: int, *, after: int = 3) -> Window | None:
    """The ``steps`` steps one after another that took least: those that other work on the machine disturbed least."""
    bounds = _bounds(run)
    firsts = [s for s in bounds if s > after and all(s + i in bounds for i in range(steps))]
    if not firsts:
        return next(iter(windows(run, steps)), None)
    first = min(firsts, key=lambda s: bounds[s + steps - 1][1] - bounds[s][0])
    last = first + steps - 1
    return Window("quickest", bounds[first][0], bounds[last][1], first, last)


def _bounds(run: Recording) -> dict[int, tuple[float, float]]:
    """When each step began on the first rank that did, and ended on the last; evaluation and checkpoints apart. After
    the last one ranks look for data once more: that is no step."""
    found: dict[int, tuple[float, float]] = {}
    for rank in run.ranks:
        for span in rank.spans:
            if span.name in PHASES and span.name not in ("evaluate", "checkpoint"):
                low, high = found.get(span.step, (span.at, span.end))
                found[span.step] = (min(low, span.at), max(high, span.end))
    made = {span.step for rank in run.ranks for span in rank.spans if span.name == "forward_backward"}
    return {step: ends for step, ends in found.items() if step in made}


LANE, GAP, LEFT, TOP = 30, 8, 92, 34


def picture(
    run: Recording,
    window: Window | None = None,
    *,
    width: int = 1100,
    title: str | None = None,
    moving: float = 0.0,
) -> str:
    """An SVG of ``window``: by default of some usual steps. Follows the viewer's light or dark. ``moving``: seconds in
    which it is gone through from left to right, again and again."""
    window = window or next(iter(windows(run)), None)
    if window is None:
        return ""
    scale = (width - LEFT - 12) / max(window.end - window.start, 1e-9)
    used: dict[str, None] = {}
    parts: list[str] = []
    frame: list[str] = []
    for row, (label, rank) in enumerate(lanes(run)):
        y = TOP + row * (LANE + GAP)
        device = str(rank.facts.get("device", ""))
        label += f" {device}" if device.startswith("cuda") else ""
        frame.append(
            f'<text class="lane" x="{LEFT - 10}" y="{y + LANE / 2 + 4}" text-anchor="end">{escape(label)}</text>'
        )
        frame.append(f'<rect class="empty" x="{LEFT}" y="{y}" width="{width - LEFT - 12}" height="{LANE}" rx="3"/>')
        for span in [*drawn(rank), *overlapped(rank)]:
            if span.end <= window.start or span.at >= window.end:
                continue
            kind = kind_of(span.name)
            used[span.name] = None
            x0, x1 = max(span.at, window.start), min(span.end, window.end)
            x, w = LEFT + (x0 - window.start) * scale, max((x1 - x0) * scale, 0.4)
            tip = f"{kind.label}, step {span.step}, {span.seconds * 1e3:.2f} ms"
            said = span.about.get("microbatch")
            top, tall = (y + LANE * 2 / 3, LANE / 3) if kind.waits else (y, LANE)
            if kind.phase == "overlapped":
                top, tall = y + LANE + 1, GAP - 4
            box = f'x="{x:.2f}" y="{top:.1f}" width="{w:.2f}" height="{tall:.1f}"'
            body = f'<rect class="k-{escape(span.name)}" {box}><title>{escape(tip)}</title></rect>'
            if said is not None and w > 11:
                body += (
                    f'<text class="micro" x="{x + w / 2:.2f}" y="{y + LANE / 2 + 4}" text-anchor="middle">{said}</text>'
                )
            parts.append(body)
    bottom = TOP + len(lanes(run)) * (LANE + GAP)
    middle = lambda row: TOP + row * (LANE + GAP) + LANE / 2
    for one, at, other, until in passed(run, window):
        ends = f'x1="{LEFT + (at - window.start) * scale:.1f}" x2="{LEFT + (until - window.start) * scale:.1f}"'
        parts.append(f'<line class="passed" {ends} y1="{middle(one)}" y2="{middle(other)}"/>')
    shown = "".join(parts)
    if moving:
        shown = f'<g class="seen">{shown}</g>{cursor(LEFT, width - 12, TOP - 6, bottom, moving)}'
    meaning, height = legend(used, bottom + 40, left=LEFT, right=width - 12)
    around = "".join(frame) + _axis(window, scale, bottom) + meaning
    heading = title or f"{run.plan}   step {window.first}" + (
        f" to {window.last}" if window.last > window.first else ""
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{_style(list(used))}{STYLE if moving else ''}</style>"
        f'<rect class="paper" width="{width}" height="{height}"/>'
        f'<text class="head" x="{LEFT}" y="20">{escape(heading)}</text>{around}{shown}</svg>\n'
    )


def passed(run: Recording, window: Window) -> list[tuple[int, float, int, float]]:
    """What went from one stage to the next within ``window``: from which lane and when, to which and when."""
    acts: dict[tuple[Any, ...], list[tuple[int, Span]]] = defaultdict(list)
    for lane, rank in enumerate(run.ranks):
        for span in rank.spans:
            if "stage" in span.about and window.start <= span.at and span.end <= window.end:
                key = (span.name, span.step, span.about["microbatch"], span.about["stage"])
                acts[key].append((lane, span))
    found = []
    for (name, step, microbatch, stage), here in acts.items():
        following = stage + 1 if name == "forward" else stage - 1 if name == "backward" else None
        there = acts.get((name, step, microbatch, following), [])
        for (lane, span), (other, later) in zip(here, there, strict=False):
            if lane != other and later.at >= span.end:
                found.append((lane, span.end, other, later.at))
    return found


def _axis(window: Window, scale: float, y: float) -> str:
    length = window.end - window.start
    step = nice(length / 8)
    parts, at = [], 0.0
    while at <= length:
        x = LEFT + at * scale
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{y - 2}"/>')
        anchor = "middle" if (length - at) * scale > 24 else "end"  # or it would reach out of the picture
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 12}" text-anchor="{anchor}">{at * 1e3:g} ms</text>')
        at = round(at + step, 12)
    return "".join(parts)


def nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``step``."""
    power = 10.0 ** len(str(int(1 / step))) if 0 < step < 1 else 1.0
    unit = 1.0 / power
    for factor in (1, 2, 5, 10, 20, 50, 100):
        if factor * unit >= step:
            return factor * unit
    return step


def legend(names: Iterable[str], y: float, *, left: float, right: float) -> tuple[str, float]:
    """What the colours mean, in as many rows as it takes; and where the last one ends."""
    parts, x = [], left
    for name in sorted(names, key=lambda n: list(KINDS).index(n) if n in KINDS else 99):
        label = kind_of(name).label
        if x > left and x + 18 + 6.6 * len(label) > right:
            x, y = left, y + 20
        parts.append(f'<rect class="k-{escape(name)}" x="{x:.1f}" y="{y - 9}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="lane" x="{x + 18:.1f}" y="{y + 1}">{escape(label)}</text>')
        x += 40 + 6.6 * len(label)
    return "".join(parts), y + 26


def _style(names: list[str]) -> str:
    def colours(which: str) -> str:
        return "".join(f".k-{name}{{fill:{getattr(kind_of(name), which)}}}" for name in names)

    return (
        "text{font:12px ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#3b3833}"
        ".head{font-weight:600;font-size:13px}.paper{fill:#fffdf9}.empty{fill:#efece4}"
        ".tick{stroke:#00000014;fill:#8a857b;font-size:11px}"
        ".passed{stroke:#3b3833;stroke-width:1;stroke-dasharray:3 2;opacity:.55}"
        "text.tick{stroke:none}.micro{fill:#fff;font-size:11px;font-weight:600}"
        + colours("colour")
        + "@media(prefers-color-scheme:dark){text{fill:#dcd8ce}.paper{fill:#17191c}.empty{fill:#22252a}"
        + ".tick{stroke:#ffffff14;fill:#8d8a83}.passed{stroke:#dcd8ce}"
        + colours("dark")
        + "}"
    )
