"""Lanes of spans as SVG: what the timeline of one run, and the picture of several, are drawn with.

Work fills a lane's height, waiting a third of it; time without a span is left empty. Spans that overlap the work are a
line below the lane. Colours follow the viewer's light or dark mode.
"""

from collections.abc import Iterable, Sequence
from html import escape

from meshfit.observe.kinds import KINDS, kind_of
from meshfit.observe.reading import RecordedSpan
from meshfit.units import seconds

OVERLAPPED = 4  # height of the line below a lane
REST = 0.8  # share of an animation after which all is shown


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
        tip = escape(f"{kind.label}, step {span.step}, {seconds(span.seconds)}")
        parts.append(f'<rect class="k-{escape(span.name)}" {box}><title>{tip}</title></rect>')
        if "microbatch" in span.about and wide > 11:
            number = escape(str(span.about["microbatch"]))
            at = f'x="{x + wide / 2:.2f}" y="{top + height / 2 + 4}" text-anchor="middle"'
            parts.append(f'<text class="micro" {at}>{number}</text>')
    return "".join(parts)


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
