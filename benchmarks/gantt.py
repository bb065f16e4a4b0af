"""The picture of a schedule: who worked on which microbatch when, as SVG that needs nothing beside it.

One lane a rank, time to the right. What a rank waits is left blank, with its share at the end of the lane. Thin lines
are transfers, from the end of an action to the start of the one that needed it. Several schedules under each other
(the ideal one above, the measured one below) share the scale of time.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape

import torch.distributed as dist

from meshfit.comm.objects import all_gather_object
from meshfit.passes.pipeline import Pipelined
from meshfit.schedule.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from meshfit.schedule.simulate import ActionSpan, Simulated

WIDTH, LEFT, RIGHT = 1180, 84, 92
LANE, GAP = 40, 10

INK, SOFT, LINE, PAPER, LANE_PAPER = "#1f2933", "#6b7785", "#d5dbe2", "#fbfbf9", "#f0f2f4"
COLOURS = {
    FORWARD: ("#3f7fbf", "#6ea3d6"),
    BACKWARD: ("#d9822b", "#eaa864"),
    INPUT: ("#d9822b", "#eaa864"),
    WEIGHT: ("#5a9367", "#8bb894"),
}
"""Of a rank's first stage, and of its further ones."""

WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward, gradients of inputs",
    WEIGHT: "backward, gradients of weights",
}


class ActionTimes:
    """When this rank runs each action of a pipeline's steps from now on, by a clock that processes of one machine
    share."""

    def __init__(self, run: Pipelined):
        self.plan, self._spans, timed = run.plan, list[ActionSpan](), run.timed

        @contextmanager
        def noted(action: Action) -> Iterator[None]:
            start = time.perf_counter()
            with timed(action):
                yield
            self._spans.append(ActionSpan(action, start, time.perf_counter()))

        run.timed = noted

    def together(self, group: dist.ProcessGroup) -> Simulated:
        """The actions since the last call, on all ranks of ``group``, from 0 on. They call it together."""
        every = all_gather_object(tuple(self._spans), group)
        self._spans.clear()
        zero = min(spans[0].start for spans in every)
        moved = tuple(tuple(ActionSpan(s.action, s.start - zero, s.end - zero) for s in spans) for spans in every)
        return Simulated(self.plan, moved)


def gantt(title: str, *rows: tuple[str, Simulated], note: str = "") -> str:
    """``rows`` are drawn from top to bottom, each under its own heading."""
    parts: list[str] = []
    longest = max((timed.seconds for _, timed in rows), default=1.0) or 1.0
    top = 78
    for heading, timed in rows:
        parts.append(_row(heading, timed, top, longest))
        top += 34 + len(timed.spans) * (LANE + GAP) + 44
    kinds = [k for k in COLOURS if any(s.action.kind == k for _, t in rows for lane in t.spans for s in lane)]
    chunked = any(timed.schedule.chunks > 1 for _, timed in rows)
    parts.append(_legend(kinds, top - 6, chunked=chunked))
    height = top + 34
    style = "font-family: 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" style="{style}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            _text(LEFT, 36, title, size=20, weight=600),
            _text(LEFT, 57, note, size=13, fill=SOFT),
            *parts,
            "</svg>",
        )
    )


def _row(heading: str, timed: Simulated, top: float, longest: float) -> str:
    plan, start, scale = timed.schedule, timed.start, (WIDTH - LEFT - RIGHT) / longest
    wide = timed.seconds * scale
    lane_at = lambda rank: top + 34 + rank * (LANE + GAP)
    at = lambda seconds: LEFT + (seconds - start) * scale
    found = [
        _text(LEFT, top + 18, heading, size=14, weight=600),
        _text(LEFT + wide, top + 18, f"idle {timed.bubble:.1%} of the time", size=13, fill=SOFT, anchor="end"),
    ]
    where: dict[Action, tuple[int, ActionSpan]] = {}
    for rank, spans in enumerate(timed.spans):
        y = lane_at(rank)
        found.append(f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="{LANE}" rx="4" fill="{LANE_PAPER}"/>')
        found.append(_text(LEFT - 12, y + LANE / 2 + 5, f"rank {rank}", size=13, anchor="end"))
        idle = f"{timed.idle(rank):.0%} idle"
        found.append(_text(LEFT + wide + 12, y + LANE / 2 + 5, idle, size=12, fill=SOFT))
        for span in spans:
            where[span.action] = (rank, span)
            found.append(_box(span, plan, at(span.start), y, (span.end - span.start) * scale))
    found += _transfers(plan, where, at, lane_at)
    found.append(_axis(timed, longest, lane_at(len(timed.spans)) - GAP + 6, at))
    return "\n".join(found)


def _box(span: ActionSpan, plan: Schedule, x: float, y: float, width: float) -> str:
    action = span.action
    fill = COLOURS[action.kind][min(1, action.stage // plan.ranks)]
    inset = min(0.6, width / 8)
    body = (
        f'<rect x="{x + inset:.2f}" y="{y + 3}" width="{max(0.4, width - 2 * inset):.2f}" height="{LANE - 6}" '
        f'rx="{min(3.0, width / 4):.1f}" fill="{fill}">'
    )
    about = (
        f"stage {action.stage}, microbatch {action.microbatch}, {WORDS[action.kind]}: {_time(span.end - span.start)}"
    )
    parts = [f"{body}<title>{escape(about)}</title></rect>"]
    label = str(action.microbatch)
    size = min(13.0, 1.55 * (width - 2) / max(1, len(label)))
    if size >= 6.5:
        parts.append(
            _text(x + width / 2, y + LANE / 2 + size * 0.36, label, size=size, fill="#ffffff", anchor="middle")
        )
    return "".join(parts)


def _transfers(plan: Schedule, where: dict[Action, tuple[int, ActionSpan]], at, lane_at) -> list[str]:
    found = []
    for action, (rank, span) in where.items():
        for need in plan.needs(action):
            source = where.get(need)
            if source is None or source[0] == rank:
                continue
            down = rank > source[0]
            x1, x2 = at(source[1].end), at(max(span.start, source[1].end))
            y1 = lane_at(source[0]) + (LANE - 3 if down else 3)
            y2 = lane_at(rank) + (3 if down else LANE - 3)
            colour = COLOURS[action.kind][0]
            bend = (x2 - x1) * 0.5
            curve = (
                f"M{x1:.2f} {y1} C{x1 + bend:.2f} {y1 + (6 if down else -6)} {x2 - bend:.2f} {y2 - (6 if down else -6)}"
            )
            found.append(
                f'<path d="{curve} {x2:.2f} {y2}" fill="none" stroke="{colour}" stroke-width="0.8" opacity="0.55"/>'
            )
    return found


def _axis(timed: Simulated, longest: float, y: float, at) -> str:
    step = _nice(longest / 8)
    found = [f'<line x1="{LEFT}" y1="{y}" x2="{at(timed.end):.1f}" y2="{y}" stroke="{LINE}"/>']
    ticks = int(timed.seconds / step + 1e-9)
    unit, factor = _unit(longest)
    for i in range(ticks + 1):
        x = at(timed.start + i * step)
        found.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="{LINE}"/>')
        label = f"{i * step * factor:g}" + (f" {unit}" if i == ticks and unit else "")
        found.append(_text(x, y + 17, label, size=11, fill=SOFT, anchor="middle"))
    return "\n".join(found)


def _nice(rough: float) -> float:
    """1, 2 or 5 times a power of ten, near ``rough``."""
    power = 1.0
    while power * 10 <= rough:
        power *= 10
    while power > rough:
        power /= 10
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 3 else ("ms", 1e3) if seconds >= 3e-3 else ("µs", 1e6)


def _time(seconds: float) -> str:
    unit, factor = _unit(seconds)
    return f"{seconds * factor:.3g} {unit}"


def _legend(kinds: Sequence[str], y: float, *, chunked: bool) -> str:
    found, x = [], float(LEFT)
    for kind in kinds:
        dark, light = COLOURS[kind]
        found.append(f'<rect x="{x}" y="{y}" width="16" height="14" rx="3" fill="{dark}"/>')
        x += 22
        if chunked:
            found.append(f'<rect x="{x - 4}" y="{y}" width="16" height="14" rx="3" fill="{light}"/>')
            x += 18
        found.append(_text(x, y + 11.5, WORDS[kind], size=12, fill=SOFT))
        x += 6.2 * len(WORDS[kind]) + 22
    said = ["a rank's first stage, and its others" if chunked else "", "numbers: microbatches", "blank: waiting"]
    found.append(
        f'<path d="M{x} {y + 12} C{x + 8} {y + 12} {x + 8} {y + 2} {x + 18} {y + 2}" fill="none" '
        f'stroke="{SOFT}" stroke-width="1"/>'
    )
    found.append(_text(x + 24, y + 11.5, "transfer", size=12, fill=SOFT))
    x += 90
    found.append(_text(x, y + 11.5, " · ".join(filter(None, said)), size=12, fill=SOFT))
    return "\n".join(found)


def _text(
    x: float, y: float, text: str, *, size: float, fill: str = INK, weight: int = 400, anchor: str = "start"
) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" fill="{fill}" text-anchor="{anchor}"{bold}>'
        f"{escape(text)}</text>"
    )
