"""The charts of the page, as plain values: what was measured, over steps or seconds."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from meshfit.observe.figures import number
from meshfit.observe.kinds import PHASES, kind_of
from meshfit.observe.reading import Recording, Total

POINTS = 500
GIB = 2**30


def charts(run: Recording) -> list[dict[str, Any]]:
    """Those that have something to show."""
    every = [
        _loss(run),
        *_measured(run),
        _by_step(run, "rate", "Throughput", "samples / s", smooth=True),
        _phases_over_time(run),
        _memory(run),
        _host_memory(run),
        _use(run),
        _cores(run),
        _by_step(run, "grad_norm", "Gradient norm", "", log=True),
        _by_step(run, "lr", "Learning rate", ""),
        _rates(run, "Disk", ("disk_read", "read"), ("disk_written", "written")),
        _rates(run, "Network", ("net_sent", "sent"), ("net_received", "received")),
        *_own(run),
    ]
    return [chart for chart in every if chart is not None and any(s["x"] for s in chart["series"])]


def _chart(name: str, title: str, x: str, unit: str, series: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": name, "title": title, "x": x, "unit": unit, "series": series, **more}


def _series(
    name: str, points: Sequence[tuple[float, float]], tone: int = 0, most: int = POINTS, **more: Any
) -> dict[str, Any]:
    return {"name": name, "tone": tone, **xy(points, most), **more}


def _loss(run: Recording) -> dict[str, Any]:
    points = [(float(s["step"]), number(s["loss"])) for s in run.steps if "loss" in s]
    series = [_series("each step", points, style="faint"), _series("training", smoothed(points))]
    valid = [(float(s["step"]), number(s["valid"]["loss"])) for s in run.steps if "loss" in s.get("valid", {})]
    if valid:
        series.append(_series("validation", valid, 1, style="points"))
    return _chart("loss", "Loss", "step", "", series, wide=True, log=False)


def _measured(run: Recording) -> list[dict[str, Any]]:
    found = []
    for name in dict.fromkeys(name for s in run.steps for name in s.get("valid", {}) if name != "loss"):
        points = [(float(s["step"]), number(s["valid"][name])) for s in run.steps if name in s.get("valid", {})]
        title = name[:1].upper() + name[1:].replace("_", " ")
        found.append(_chart(f"valid-{name}", title, "step", "", [_series(name, points, 1, style="points")]))
    return found


def _by_step(
    run: Recording, key: str, title: str, unit: str, *, smooth: bool = False, log: bool = False
) -> dict[str, Any]:
    points = [(float(s["step"]), number(s[key])) for s in run.steps if key in s]
    series = [_series("each step", points, style="faint"), _series(title.lower(), smoothed(points))] if smooth else None
    return _chart(
        key, title, "step", unit, series or [_series(title.lower(), points)], **({"log": True} if log else {})
    )


def _phases_over_time(run: Recording) -> dict[str, Any] | None:
    if not run.ranks or len(run.ranks[0].totals) < 3:
        return None
    totals = run.ranks[0].totals
    series = []
    for name in PHASES:
        points = [(t.at, 100 * _in_phase(t, name) / _spent(t)) for t in totals if t.seconds > 0.05]
        if any(share > 0.5 for _, share in points):
            series.append(_series(kind_of(name).label, points, most=200, kind=name))
    return _chart("phases", "Where each second went", "s", "% of rank 0", series, stack=True, top=100)


def _in_phase(total: Total, name: str) -> float:
    return total.by.get(f"gpu {name}", total.by.get(name, 0.0))


def _spent(total: Total) -> float:
    """Seconds of ``total``; more where a span that ended in them had begun before."""
    return max(total.seconds, sum(_in_phase(total, name) for name in PHASES))


def _memory(run: Recording) -> dict[str, Any] | None:
    """Of the first device, by kind: what stays is counted from its tensors, the rest is what was measured above it."""
    if not run.ranks:
        return None
    rank = run.ranks[0]
    gpu = rank.series("gpu_allocated")
    measured = gpu or rank.series("rss")
    if len(measured) < 2:
        return None
    kinds = rank.facts.get("memory", {})
    order = [kind for kind in ("weights", "gradients", "optimizer", "buffers") if kinds.get(kind)]
    known = sum(kinds[kind] for kind in order)
    series = [
        _series(kind, [(at, kinds[kind] / GIB) for at, _ in measured], i, most=200) for i, kind in enumerate(order)
    ]
    rest = [(at, max(0.0, value - known) / GIB) for at, value in measured]
    series.append(
        _series("activations and the rest" if gpu else "activations, program and the rest", rest, 4, most=200)
    )
    title = f"Memory of {rank.facts.get('device', 'rank 0')}" if gpu else "Memory of rank 0"
    return _chart("memory", title, "s", "GiB", series, stack=True)


def _host_memory(run: Recording) -> dict[str, Any] | None:
    if len(run.ranks) < 2:
        return None
    gpu = any(rank.series("gpu_allocated") for rank in run.ranks)
    key, title = ("gpu_allocated", "Memory by device") if gpu else ("rss", "Memory by rank")
    series = [
        _series(f"rank {rank.rank}", [(at, v / GIB) for at, v in rank.series(key)], i % 8, most=200)
        for i, rank in enumerate(run.ranks[:16])
    ]
    return _chart("memory-ranks", title, "s", "GiB", series, zero=True)


def _use(run: Recording) -> dict[str, Any]:
    gpu = any(rank.series("gpu_use") for rank in run.ranks)
    title, unit = ("GPU use", "%") if gpu else ("CPU use by rank", "% of a core")
    series = [
        _series(f"rank {rank.rank}", rank.series("gpu_use" if gpu else "cpu"), i % 8, most=200)
        for i, rank in enumerate(run.ranks[:16])
    ]
    return _chart("use", title, "s", unit, series, zero=True)


def _cores(run: Recording) -> dict[str, Any]:
    """Each core of each machine, as one picture."""
    series = []
    for rank in run.ranks:
        seen = [s for s in rank.samples if s.values.get("cores")]
        if not seen:
            continue
        step = -(-len(seen) // 160)
        seen = seen[::step]
        for core in range(min(128, len(seen[0].values["cores"]))):
            points = [(s.at, s.values["cores"][core]) for s in seen if core < len(s.values["cores"])]
            series.append(_series(f"core {core}", points, most=200))
    return _chart("cores", "CPU cores of the machine", "s", "%", series, heat=True)


def _rates(run: Recording, title: str, *keys: tuple[str, str]) -> dict[str, Any]:
    series = []
    for rank in run.ranks:
        for tone, (key, label) in enumerate(keys):
            points = [(at, value / 2**20) for at, value in rank.series(key)]
            if points and max(value for _, value in points) > 0.01:
                series.append(_series(label, points, tone, most=200))
    return _chart(title.lower(), title, "s", "MiB / s", series, zero=True)


def _own(run: Recording) -> list[dict[str, Any]]:
    """Scalars of parts, or of the user's own."""
    names = dict.fromkeys(s["scalar"] for rank in run.ranks for s in rank.scalars)
    found = []
    for name in names:
        series = [
            _series(f"rank {r.rank}", [(float(s["step"]), s["value"]) for s in r.scalars if s["scalar"] == name], i % 8)
            for i, r in enumerate(run.ranks)
        ]
        found.append(_chart(f"own-{name}", name, "step", "", [s for s in series if s["x"]]))
    return found


def xy(points: Sequence[tuple[float, float]], most: int) -> dict[str, list[Any]]:
    """Points in order; of more than ``most`` the lowest and the highest of each stretch."""
    if len(points) > most:
        stretch = -(-2 * len(points) // most)
        kept = []
        for i in range(0, len(points), stretch):
            part = [p for p in points[i : i + stretch] if math.isfinite(p[1])] or points[i : i + 1]
            ends: list[Callable[..., Any]] = [min, max]
            kept += sorted({pick(part, key=lambda p: p[1]) for pick in ends})
        points = kept
    ys = [_short(y) if math.isfinite(y) else None for _, y in points]
    return {"x": [_short(x) for x, _ in points], "y": ys}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A running mean over a fiftieth of the points, on both sides of each."""
    reach = max(1, len(points) // 100)
    if len(points) < 8:
        return list(points)

    def mean(i: int) -> float:
        near = [y for _, y in points[max(0, i - reach) : i + reach + 1] if math.isfinite(y)]
        return statistics.fmean(near) if near else math.nan

    return [(x, mean(i)) for i, (x, _) in enumerate(points)]
