"""Lanes of spans as SVG: what the timeline of one run, and the pictures of several and of predictions, are drawn with.

Work fills a lane's height, waiting a third of it; time without a span is left empty. Spans that overlap the work are a
line below the lane. Colours follow the viewer's light or dark mode.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from meshfit.observe.kinds import KINDS, kind_of
from meshfit.observe.reading import RecordedSpan
from meshfit.units import seconds

WIDTH, LANE, GAP, LEFT, TOP, RIGHT = 1100, 30, 8, 92, 34, 12
OVERLAPPED = 4  # height of the line below a lane
REST = 0.8  # share of an animation after which all is shown

Rows = Sequence[tuple[str, Sequence[RecordedSpan]]]
"""Lanes, each with its label."""


def lanes_picture(
    heading: str,
    rows: Rows,
    start: float,
    end: float,
    *,
    height: float = LANE,
    ruler: float = 1.0,
    passed: Iterable[tuple[int, float, int, float]] = (),
    moving: float = 0.0,
) -> str:
    """The whole file: ``rows`` between the times ``start`` and ``end``, with a legend. ``ruler``: how long a second
    is called below them; 0: there is no ruler. ``passed``: lines from a row at a time to another. ``moving``: seconds
    in which all is revealed from left to right, again and again."""
    right = WIDTH - RIGHT
    scale = (right - LEFT) / max(end - start, 1e-12)
    labels, boxes, names = [], [], dict[str, None]()
    for i, (label, spans) in enumerate(rows):
        y = TOP + i * (height + GAP)
        at = f'x="{LEFT - 10}" y="{y + height / 2 + 4}"'
        labels.append(f'<text class="lane" {at} text-anchor="end">{escape(label)}</text>')
        boxes.append(lane(spans, start, end, left=LEFT, top=y, height=height, scale=scale))
        names |= dict.fromkeys(names_between(spans, start, end))
    middle = lambda row: TOP + row * (height + GAP) + height / 2
    for one, at, other, until in passed:
        ends = f'x1="{LEFT + (at - start) * scale:.1f}" x2="{LEFT + (until - start) * scale:.1f}"'
        boxes.append(f'<line class="passed" {ends} y1="{middle(one)}" y2="{middle(other)}"/>')
    bottom, shown = TOP + len(rows) * (height + GAP), "".join(boxes)
    if moving:
        shown = animated(shown, left=LEFT, right=right, top=TOP - 6, bottom=bottom, loop=moving)
    colours, below = legend(names, bottom + (40 if ruler else 18), left=LEFT, right=right)
    head = f'<text class="head" x="{LEFT}" y="20">{escape(heading)}</text>'
    times = axis((end - start) * ruler, scale / ruler, bottom) if ruler else ""
    return document(head + "".join(labels) + times + colours + shown, names, WIDTH, below)


def lane(
    spans: Sequence[RecordedSpan], start: float, end: float, *, left: float, top: float, height: float, scale: float
) -> str:
    """Spans between the times ``start`` and ``end``, at ``scale`` pixels a second, with numbers of microbatches."""
    width = (end - start) * scale
    parts = [f'<rect class="empty" x="{left}" y="{top:.1f}" width="{width:.1f}" height="{height}" rx="3"/>']
    for span in spans:
        if span.end <= start or span.at >= end:
            continue
        kind = kind_of(span.name)
        x = left + (max(span.at, start) - start) * scale
        wide = max((min(span.end, end) - max(span.at, start)) * scale, 0.4)
        y, tall = (top + height * 2 / 3, height / 3) if kind.waits else (top, height)
        if kind.phase == "overlapped":
            y, tall = top + height + 1, OVERLAPPED
        box = f'x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{tall:.1f}"'
        took = span.about.get("took") or f"step {span.step}, {seconds(span.seconds)}"
        tip = escape(f"{kind.label}, {took}")
        parts.append(f'<rect class="k-{escape(span.name)}" {box}><title>{tip}</title></rect>')
        if "microbatch" in span.about and wide > 11:
            number = escape(str(span.about["microbatch"]))
            at = f'x="{x + wide / 2:.2f}" y="{top + height / 2 + 4}" text-anchor="middle"'
            parts.append(f'<text class="micro" {at}>{number}</text>')
    return "".join(parts)


def axis(length: float, scale: float, y: float) -> str:
    """So many seconds, at ``scale`` pixels a second, down to ``y``."""
    parts, step = [], nice(max(length, 1e-9) / 8)
    for i in range(int(length / step + 1e-9) + 1):
        x, left = LEFT + i * step * scale, length - i * step
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{y - 2}"/>')
        anchor = "middle" if left * scale > 24 else "end"  # or it would reach out of the picture
        at = f'x="{x:.1f}" y="{y + 12}" text-anchor="{anchor}"'
        parts.append(f'<text class="tick" {at}>{i * step * 1e3:.6g} ms</text>')
    return "".join(parts)


def nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def names_between(spans: Iterable[RecordedSpan], start: float, end: float) -> list[str]:
    """Names of the spans between two times, for ``legend``."""
    return list(dict.fromkeys(span.name for span in spans if span.end > start and span.at < end))


def legend(names: Iterable[str], y: float, *, left: float, right: float) -> tuple[str, float]:
    """The names of the colours, in as many rows as needed; and where the last row ends."""
    parts, x = [], left
    for name in sorted(names, key=lambda n: list(KINDS).index(n) if n in KINDS else 99):
        label = kind_of(name).label
        if x > left and x + 18 + 6.6 * len(label) > right:
            x, y = left, y + 20
        parts.append(f'<rect class="k-{escape(name)}" x="{x:.1f}" y="{y - 9}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="lane" x="{x + 18:.1f}" y="{y + 1}">{escape(label)}</text>')
        x += 40 + 6.6 * len(label)
    return "".join(parts), y + 26


def animated(shown: str, *, left: float, right: float, top: float, bottom: float, loop: float) -> str:
    """``shown``, revealed from left to right in ``loop`` seconds, again and again: SVG alone, without a script. Viewers
    that animate nothing, or prefer reduced motion, show the whole."""
    times = f'dur="{loop:g}s" repeatCount="indefinite" keyTimes="0;{REST};1"'
    width = right - left
    grow = f'<animate attributeName="width" values="0;{width:g};{width:g}" {times}/>'
    places = f"0 0;{width:g} 0;{width:g} 0"
    move = f'<animateTransform attributeName="transform" type="translate" values="{places}" {times}/>'
    return (
        "<style>.seen{clip-path:url(#seen)}.cursor{stroke:#c8553d;stroke-width:1.5}"
        "@media(prefers-color-scheme:dark){.cursor{stroke:#e2765e}}"
        "@media(prefers-reduced-motion:reduce){.seen{clip-path:none}.cursor{display:none}}</style>"
        f'<g class="seen">{shown}</g>'
        f'<clipPath id="seen"><rect x="{left:g}" y="0" width="{width:g}" height="{bottom:g}">{grow}</rect></clipPath>'
        f'<line class="cursor" x1="{left:g}" x2="{left:g}" y1="{top:g}" y2="{bottom:g}">{move}</line>'
    )


def document(body: str, names: Iterable[str], width: float, height: float) -> str:
    """The whole file: ``body`` on paper, with the colours of spans ``names``."""
    kinds = [kind_of(name) for name in names]
    light = "".join(f".k-{kind.name}{{fill:{kind.colour}}}" for kind in kinds)
    dark = "".join(f".k-{kind.name}{{fill:{kind.dark}}}" for kind in kinds)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}"><style>{STYLE}{light}@media(prefers-color-scheme:dark){{{DARK}{dark}}}</style>'
        f'<rect class="paper" width="{width}" height="{height:.0f}"/>{body}</svg>\n'
    )


STYLE = (
    "text{font:12px ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#3b3833}"
    ".head{font-weight:600;font-size:14px}.name{font:500 13px ui-monospace,Menlo,Consolas,monospace}"
    ".dim{fill:#8a857b;font-size:11.5px}.paper{fill:#fffdf9}.empty{fill:#efece4}.rule{stroke:#e6e1d6}.bar{fill:#8fa9cf}"
    ".tick{stroke:#00000014;fill:#8a857b;font-size:11px}text.tick{stroke:none}"
    ".passed{stroke:#3b3833;stroke-width:1;stroke-dasharray:3 2;opacity:.55}"
    ".micro{fill:#fff;font-size:11px;font-weight:600}"
)
DARK = (
    "text{fill:#dcd8ce}.dim{fill:#8d8a83}.paper{fill:#17191c}.empty{fill:#22252a}.rule{stroke:#2b2e33}"
    ".bar{fill:#4a6489}.tick{stroke:#ffffff14;fill:#8d8a83}.passed{stroke:#dcd8ce}"
)
