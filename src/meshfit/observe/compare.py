"""Several runs side by side: the same job under several plans, say. One table, one picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from rich.table import Table
from rich.text import Text

from meshfit.cost import size
from meshfit.observe.figures import amount, number, seconds
from meshfit.observe.kinds import kind_of
from meshfit.observe.reading import Recording, phase_shares
from meshfit.observe.timeline import Window, drawn, legend, windows
from meshfit.observe.verdict import findings

EQUAL = 1e-4
"""Relative difference of losses that rounding explains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run among others."""

    name: str
    devices: int
    apart: float
    """Largest relative difference of a step's loss from the first run's; NaN where there is nothing to compare."""
    rate: float
    step_seconds: float
    memory: float
    """Bytes of the fullest device or rank."""
    traffic: float
    """Bytes a step that a rank hands to collectives; NaN where nobody counted."""
    busy: float
    """Share of the time in which devices compute, in the mean."""
    waited: float
    """Share in which they wait for each other."""
    held_back: str

    @property
    def equal(self) -> bool:
        return self.apart <= EQUAL


def rows(runs: Sequence[Recording], names: Sequence[str] | None = None) -> list[Row]:
    """The first is what the others' losses are held against."""
    reference = _losses(runs[0]) if runs else {}
    return [_row(run, name, reference) for run, name in zip(runs, names or called(runs), strict=True)]


def called(runs: Sequence[Recording]) -> list[str]:
    """By plan; by folder where two have the same."""
    plans = [run.plan for run in runs]
    if len(set(plans)) == len(plans):
        return plans
    return [f"{run.folder.resolve().name}: {run.plan}" for run in runs]


def _row(run: Recording, name: str, reference: dict[int, float]) -> Row:
    mine = _losses(run)
    gaps = [abs(mine[s] - reference[s]) / max(abs(reference[s]), 1e-12) for s in mine.keys() & reference.keys()]
    shares = [phase_shares(rank) for rank in run.ranks]
    mean = lambda *names: sum(s.get(n, 0.0) for s in shares for n in names) / max(1, len(shares))
    idle = [max(0.0, s.get("forward_backward", 0.0) - _acted(run, i)) for i, s in enumerate(shares)]
    bubble = sum(idle) / max(1, len(idle))
    found = findings(run)
    return Row(
        name=name,
        devices=len(run.ranks),
        apart=max((g if math.isfinite(g) else math.inf for g in gaps), default=math.nan),
        rate=run.rate,
        step_seconds=run.step_seconds,
        memory=max((v for r in run.ranks for _, v in r.series("gpu_peak") or r.series("rss")), default=0.0),
        traffic=math.nan if run.traffic is None else float(sum(run.traffic.values())),
        busy=mean("forward_backward", "update") - bubble,
        waited=mean("exchange") + bubble,
        held_back=found[0].title if found else "",
    )


def _acted(run: Recording, i: int) -> float:
    """Share of a rank's time in actions of a pipeline; all of forward_backward where there is none."""
    rank = run.ranks[i]
    if int(run.words.get("pipeline", 1)) < 2 or "forward" not in rank.steady:
        return 1.0
    return sum(rank.steady.get(n, 0.0) for n in ("forward", "backward", "weight")) / max(rank.wall, 1e-9)


def _losses(run: Recording) -> dict[int, float]:
    return {step["step"]: number(step["loss"]) for step in run.steps if "loss" in step}


def table(found: Sequence[Row]) -> Table:
    """For a terminal."""
    shown = Table(box=None, padding=(0, 2), header_style="dim")
    for title in (
        "plan",
        "losses",
        ">samples/s",
        ">step",
        ">memory",
        ">traffic/step",
        ">computing",
        ">waiting",
        "held back by",
    ):
        shown.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left", no_wrap=True)
    fastest = max((row.rate for row in found), default=0.0)
    for i, row in enumerate(found):
        same = (
            "reference"
            if i == 0
            else ""
            if math.isnan(row.apart)
            else "equal"
            if row.equal
            else f"{row.apart:.1e} apart"
        )
        style = "green" if row.rate == fastest and len(found) > 1 else ""
        shown.add_row(
            Text(row.name),
            Text(same, style="" if row.equal or i == 0 else "yellow"),
            Text(amount(row.rate), style=style),
            seconds(row.step_seconds),
            size(row.memory) if row.memory else "",
            _traffic(row.traffic),
            f"{row.busy:.0%}",
            f"{row.waited:.0%}",
            row.held_back,
        )
    return shown


def _traffic(count: float) -> str:
    return "not counted" if math.isnan(count) else size(count) if count else "none"


WIDTH, LEFT, RIGHT, LANE = 1120, 210, 396, 13


def picture(runs: Sequence[Recording], names: Sequence[str] | None = None, *, title: str = "") -> str:
    """An SVG: for each run the lanes of two usual steps, all to one scale, and bars of what they came to."""
    found = rows(runs, names)
    usual = [next(iter(windows(run, 2)), None) for run in runs]
    longest = max((w.end - w.start for w in usual if w is not None), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    y, parts, used = 56.0, [], dict[str, None]()
    parts.append(f'<text class="head" x="20" y="26">{escape(title or "The same job under several plans")}</text>')
    columns = _columns()
    for x, label in (
        (LEFT, f"two steps, to one scale: {seconds(longest)} across"),
        *((x, label) for x, label, _ in columns),
    ):
        parts.append(f'<text class="dim" x="{x}" y="46">{escape(label)}</text>')
    tops = {
        key: max((v for row in found if (v := getattr(row, key)) == v), default=0.0) or 1.0 for _, _, key in columns
    }
    for row, run, window in zip(found, runs, usual, strict=True):
        said = wrap(row.name, 22) or [""]
        tall = max(len(run.ranks + run.servers) * (LANE + 3), 18 + 16 * len(said))
        parts.append(f'<line class="rule" x1="20" x2="{WIDTH - 20}" y1="{y - 4}" y2="{y - 4}"/>')
        for i, line in enumerate(said):
            parts.append(f'<text class="name" x="20" y="{y + 14 + 16 * i}">{escape(line)}</text>')
        same = "" if row is found[0] else "losses equal" if row.equal else f"losses {row.apart:.0e} apart"
        below = y + 14 + 16 * len(said)
        parts.append(f'<text class="dim" x="20" y="{below}">{escape(same or "the reference")}</text>')
        if window is not None:
            parts.append(_lanes(run, window, y, scale, used))
        for x, _, key in columns:
            value = getattr(row, key)
            shown = {"rate": amount(value), "memory": size(value), "traffic": _traffic(value)}[key]
            length = max(1.0, 96 * value / tops[key]) if value == value else 0.0
            parts.append(f'<rect class="bar" x="{x}" y="{y + 4}" width="{length:.1f}" height="10" rx="2"/>')
            parts.append(f'<text x="{x}" y="{y + 30}">{escape(shown)}</text>')
        y += tall + 14
    meaning, height = legend(used, y + 13, left=LEFT, right=WIDTH - 20)
    parts.append(meaning)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}">'
        f"<style>{_style(list(used))}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}" rx="8"/>{"".join(parts)}</svg>\n'
    )


def _columns() -> list[tuple[int, str, str]]:
    start = WIDTH - RIGHT + 30
    return [
        (start, "samples / s", "rate"),
        (start + 124, "memory a rank", "memory"),
        (start + 248, "traffic a step", "traffic"),
    ]


def _lanes(run: Recording, window: Window, y: float, scale: float, used: dict[str, None]) -> str:
    parts = []
    for i, rank in enumerate(run.ranks + run.servers):
        top = y + i * (LANE + 3)
        if i >= len(run.ranks):
            label = f'x="{LEFT - 8}" y="{top + LANE - 2:.1f}" text-anchor="end"'
            parts.append(f'<text class="dim" {label}>server {rank.rank}</text>')
        whole = (window.end - window.start) * scale
        parts.append(f'<rect class="empty" x="{LEFT}" y="{top:.1f}" width="{whole:.1f}" height="{LANE}" rx="2"/>')
        for span in drawn(rank):
            if span.end < window.start or span.at > window.end:
                continue
            used[span.name] = None
            a, b = max(span.at, window.start), min(span.end, window.end)
            tall = LANE / 3 if kind_of(span.name).waits else LANE
            x, width = LEFT + (a - window.start) * scale, max((b - a) * scale, 0.4)
            box = f'x="{x:.2f}" y="{top + LANE - tall:.1f}" width="{width:.2f}"'
            parts.append(f'<rect class="k-{escape(span.name)}" {box} height="{tall:.1f}"/>')
    return "".join(parts)


def _style(names: list[str]) -> str:
    def colours(which: str) -> str:
        return "".join(f".k-{name}{{fill:{getattr(kind_of(name), which)}}}" for name in names)

    return (
        "text{font:12px Inter,ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#211f1b}"
        ".head{font-weight:600;font-size:15px}.name{font:500 13px ui-monospace,Menlo,Consolas,monospace}"
        ".dim,.lane{fill:#8a857b;font-size:11.5px}.paper{fill:#fffdf9}.empty{fill:#efece4}"
        ".rule{stroke:#e6e1d6}.bar{fill:#8fa9cf}"
        + colours("colour")
        + "@media(prefers-color-scheme:dark){text{fill:#ece8df}.dim,.lane{fill:#8d8a83}.paper{fill:#17191c}"
        + ".empty{fill:#22252a}"
        + ".rule{stroke:#2b2e33}.bar{fill:#4a6489}"
        + colours("dark")
        + "}"
    )
