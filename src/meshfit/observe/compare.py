"""Several runs side by side, such as the same job under several plans: one table, one picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from rich.table import Table
from rich.text import Text

from meshfit.observe.columns import columns
from meshfit.observe.reading import RecordedRun
from meshfit.observe.svg import document, lane, legend, names_between
from meshfit.observe.timeline import drawn, lanes, windows
from meshfit.observe.verdict import findings
from meshfit.units import percent, quantity, seconds, size

EQUAL = 1e-4
"""Relative difference of losses that rounding explains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run among others."""

    name: str
    difference: float
    """Largest relative difference of a step's loss from the first run's; NaN where there is nothing to compare."""
    rate: float
    step_seconds: float
    memory: float
    """Bytes of the fullest device or rank."""
    traffic: float
    """Bytes a step that a rank hands to collectives; NaN where not counted."""
    busy: float
    """Share of the time in which devices compute, in the mean."""
    waited: float
    """Share in which they wait for each other."""
    limit: str
    """What limited its speed most."""

    @property
    def equal(self) -> bool:
        return self.difference <= EQUAL

    @property
    def losses(self) -> str:
        return "" if math.isnan(self.difference) else "equal" if self.equal else f"differ by {self.difference:.1e}"

    @property
    def shown_traffic(self) -> str:
        return "not counted" if math.isnan(self.traffic) else size(self.traffic) if self.traffic else "none"


def compared(runs: Sequence[RecordedRun], names: Sequence[str] | None = None) -> list[ComparedRun]:
    """Each run; losses are compared with those of the first."""
    reference = dict(runs[0].values("loss")) if runs else {}
    return [_compared(run, name, reference) for run, name in zip(runs, names or run_names(runs), strict=True)]


def run_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Their plans; with their folders where two have the same plan."""
    plans = [run.plan for run in runs]
    if len(set(plans)) == len(plans):
        return plans
    return [f"{run.folder.resolve().name}: {run.plan}" for run in runs]


def _compared(run: RecordedRun, name: str, reference: dict[float, float]) -> ComparedRun:
    losses, found = dict(run.values("loss")), findings(run)
    gaps = [abs(losses[s] - reference[s]) / max(abs(reference[s]), 1e-12) for s in losses.keys() & reference.keys()]
    return ComparedRun(
        name=name,
        difference=max((g if math.isfinite(g) else math.inf for g in gaps), default=math.nan),
        rate=run.rate,
        step_seconds=run.step_seconds,
        memory=max((rank.peak_memory for rank in run.ranks), default=0.0),
        traffic=math.nan if run.traffic is None else float(sum(run.traffic.values())),
        busy=run.share("forward_backward", "update") - run.bubble,
        waited=run.share("exchange") + run.bubble,
        limit=found[0].title if found else "",
    )


def table(found: Sequence[ComparedRun]) -> Table:
    """For a terminal."""
    numbers = (">samples/s", ">step", ">memory", ">traffic/step", ">computing", ">waiting")
    shown = columns("plan", "losses", *numbers, "limited by")
    fastest = max((run.rate for run in found), default=0.0)
    for i, run in enumerate(found):
        shown.add_row(
            Text(run.name),
            Text(run.losses if i else "reference", style="" if run.equal or i == 0 else "yellow"),
            Text(quantity(run.rate), style="green" if run.rate == fastest and len(found) > 1 else ""),
            seconds(run.step_seconds),
            size(run.memory) if run.memory else "",
            run.shown_traffic,
            percent(run.busy),
            percent(run.waited),
            run.limit,
        )
    return shown


WIDTH, LEFT, RIGHT, LANE, GAP = 1120, 210, 396, 13, 3
BARS = WIDTH - RIGHT + 30
COLUMNS = {"samples / s": BARS, "memory a rank": BARS + 124, "traffic a step": BARS + 248}


def picture(runs: Sequence[RecordedRun], names: Sequence[str] | None = None, *, title: str = "") -> str:
    """An SVG: for each run the lanes of two usual steps, all to one scale, and bars of rate, memory and traffic."""
    found = compared(runs, names)
    usual = [next(iter(windows(run, 2)), None) for run in runs]
    longest = max((w.end - w.start for w in usual if w is not None), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    text = lambda x, y, said, of="": f'<text class="{of}" x="{x}" y="{y}">{escape(said)}</text>'
    parts = [text(20, 26, title or "The same job under several plans", "head")]
    heads = {f"two steps, to one scale: {seconds(longest)} across": LEFT, **COLUMNS}
    parts += [text(x, 46, label, "dim") for label, x in heads.items()]
    tops = [max((v for v in values if v == v), default=0.0) or 1.0 for values in zip(*map(_bars, found), strict=True)]
    y, used = 56.0, dict[str, None]()
    for one, run, window in zip(found, runs, usual, strict=True):
        said = wrap(one.name, 22) or [""]
        parts.append(f'<line class="rule" x1="20" x2="{WIDTH - 20}" y1="{y - 4}" y2="{y - 4}"/>')
        parts += [text(20, y + 14 + 16 * i, line, "name") for i, line in enumerate(said)]
        losses = "the reference" if one is found[0] else f"losses {one.losses}"
        parts.append(text(20, y + 14 + 16 * len(said), losses, "dim"))
        for i, (label, rank) in enumerate(lanes(run)):
            if window is None:
                continue
            top, spans = y + i * (LANE + GAP), drawn(rank)
            if label.startswith("server"):
                at = f'x="{LEFT - 8}" y="{top + LANE - 2:.1f}"'
                parts.append(f'<text class="dim" {at} text-anchor="end">{escape(label)}</text>')
            parts.append(lane(spans, window.start, window.end, left=LEFT, top=top, height=LANE, scale=scale))
            used |= dict.fromkeys(names_between(spans, window.start, window.end))
        shown = quantity(one.rate), size(one.memory), one.shown_traffic
        for x, value, most, said_ in zip(COLUMNS.values(), _bars(one), tops, shown, strict=True):
            length = max(1.0, 96 * value / most) if value == value else 0.0
            parts.append(f'<rect class="bar" x="{x}" y="{y + 4}" width="{length:.1f}" height="10" rx="2"/>')
            parts.append(text(x, y + 30, said_))
        y += max(len(lanes(run)) * (LANE + GAP), 18 + 16 * len(said)) + 14
    colours, height = legend(used, y + 13, left=LEFT, right=WIDTH - 20)
    return document("".join(parts) + colours, used, WIDTH, height)


def _bars(run: ComparedRun) -> tuple[float, float, float]:
    return run.rate, run.memory, run.traffic
