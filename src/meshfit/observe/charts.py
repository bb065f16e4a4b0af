"""The charts of the page, as plain values: measurements over steps or seconds."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from meshfit.observe.kinds import PHASES, kind_of
from meshfit.observe.reading import RecordedRun, Total

POINTS, FEW = 500, 200
RANKS = 16  # of which curves are drawn
GIB = 2**30
Points = Sequence[tuple[float, float]]


def charts(run: RecordedRun) -> list[dict[str, Any]]:
    """Those for which there is data."""
    rate, validation = run.values("rate"), run.values("loss", "valid")
    loss = [*_smooth(run.values("loss"), "training"), _series("validation", validation, 1, style="points")]
    named = (name for step in run.steps for kind in ("values", "valid") for name in step.get(kind, {}))
    metrics = dict.fromkeys(name for name in named if name != "loss")
    every = [
        _chart("loss", "Loss", "step", "", loss if validation else loss[:-1], wide=True, log=False),
        *(_metric(run, name) for name in metrics),
        _chart("rate", "Throughput", "step", "samples / s", _smooth(rate, "throughput")),
        _phases_over_time(run),
        *_memory(run),
        _use(run),
        _cores(run),
        _by_step(run, "grad_norm", "Gradient norm", log=True),
        _by_step(run, "lr", "Learning rate"),
        _rates(run, "Disk", ("disk_read", "read"), ("disk_written", "written")),
        _rates(run, "Network", ("net_sent", "sent"), ("net_received", "received")),
        *_scalars(run),
    ]
    return [chart for chart in every if any(series["x"] for series in chart["series"])]


def _chart(name: str, title: str, x: str, unit: str, series: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": name, "title": title, "x": x, "unit": unit, "series": series, **more}


def _series(name: str, points: Points, tone: int = 0, most: int = POINTS, **more: Any) -> dict[str, Any]:
    return {"name": name, "tone": tone, **xy(points, most), **more}


def _smooth(points: Points, name: str) -> list[dict[str, Any]]:
    return [_series("each step", points, style="faint"), _series(name, smoothed(points))]


def _by_step(run: RecordedRun, key: str, title: str, **more: Any) -> dict[str, Any]:
    return _chart(key, title, "step", "", [_series(title.lower(), run.values(key))], **more)


def _metric(run: RecordedRun, name: str) -> dict[str, Any]:
    title = name[:1].upper() + name[1:].replace("_", " ")
    logged, evaluations = run.values(name, "values"), _series(name, run.values(name, "valid"), 1, style="points")
    if not logged:
        return _chart(f"valid-{name}", title, "step", "", [evaluations])
    evaluations["name"] = "validation"
    series = [*_smooth(logged, "training"), *([evaluations] if evaluations["x"] else [])]
    return _chart(f"value-{name}", title, "step", "", series)


def _by_rank(run: RecordedRun, key: str, unit: float = 1.0) -> list[dict[str, Any]]:
    return [
        _series(f"rank {rank.rank}", [(at, value / unit) for at, value in rank.series(key)], i % 8, FEW)
        for i, rank in enumerate(run.ranks[:RANKS])
    ]


def _phases_over_time(run: RecordedRun) -> dict[str, Any]:
    def seconds(total: Total, name: str) -> float:
        return total.by.get(f"gpu {name}", total.by.get(name, 0.0))

    def share(total: Total, name: str) -> float:  # a span that ended in this second may have begun before it
        return 100 * seconds(total, name) / max(total.seconds, sum(seconds(total, phase) for phase in PHASES))

    totals = run.ranks[0].totals if run.ranks and len(run.ranks[0].totals) > 2 else []
    series = []
    for name in PHASES:
        points = [(total.at, share(total, name)) for total in totals if total.seconds > 0.05]
        if any(percent > 0.5 for _, percent in points):
            series.append(_series(kind_of(name).label, points, most=FEW, kind=name))
    return _chart("phases", "Where each second went", "s", "% of rank 0", series, stack=True, top=100)


def _memory(run: RecordedRun) -> list[dict[str, Any]]:
    """Of the first rank by kind: what stays is counted from its tensors, the rest was measured above it. And of all."""
    gpu = any(rank.series("gpu_allocated") for rank in run.ranks)
    key = "gpu_allocated" if gpu else "rss"
    measured = run.ranks[0].series(key) if run.ranks else []
    if len(measured) < 2:
        return []
    facts = run.ranks[0].facts
    kinds = {k: n for k in ("weights", "gradients", "optimizer", "buffers") if (n := facts.get("memory", {}).get(k))}
    series = [_series(k, [(at, n / GIB) for at, _ in measured], i, FEW) for i, (k, n) in enumerate(kinds.items())]
    rest = [(at, max(0.0, value - sum(kinds.values())) / GIB) for at, value in measured]
    series.append(_series("activations and the rest" if gpu else "activations, program and the rest", rest, 4, FEW))
    title = f"Memory of {facts.get('device', 'rank 0') if gpu else 'rank 0'}"
    first = _chart("memory", title, "s", "GiB", series, stack=True)
    title = "Memory by device" if gpu else "Memory by rank"
    every = _chart("memory-ranks", title, "s", "GiB", _by_rank(run, key, GIB), zero=True)
    return [first, every] if len(run.ranks) > 1 else [first]


def _use(run: RecordedRun) -> dict[str, Any]:
    gpu = any(rank.series("gpu_use") for rank in run.ranks)
    key, title, unit = ("gpu_use", "GPU use", "%") if gpu else ("cpu", "CPU use by rank", "% of a core")
    return _chart("use", title, "s", unit, _by_rank(run, key), zero=True)


def _cores(run: RecordedRun) -> dict[str, Any]:
    """Each core of each machine, as one picture."""
    series = []
    for rank in run.ranks:
        seen = [(at, values["cores"]) for at, values in rank.samples if values.get("cores")]
        seen = seen[:: max(1, -(-len(seen) // 160))]
        for core in range(min(128, len(seen[0][1])) if seen else 0):
            points = [(at, cores[core]) for at, cores in seen if core < len(cores)]
            series.append(_series(f"core {core}", points, most=FEW))
    return _chart("cores", "CPU cores of the machine", "s", "%", series, heat=True)


def _rates(run: RecordedRun, title: str, *keys: tuple[str, str]) -> dict[str, Any]:
    series = []
    for rank in run.ranks:
        for tone, (key, label) in enumerate(keys):
            if rank.most(key) > 0.01 * 2**20:
                series.append(_series(label, [(at, value / 2**20) for at, value in rank.series(key)], tone, FEW))
    return _chart(title.lower(), title, "s", "MiB / s", series, zero=True)


def _scalars(run: RecordedRun) -> list[dict[str, Any]]:
    """Numbers that a part, or the user, recorded."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for rank in run.ranks:
        for line in rank.scalars:
            points = found.setdefault(line["scalar"], {}).setdefault(rank.rank, [])
            points.append((float(line["step"]), line["value"]))
    return [
        _chart(f"own-{name}", name, "step", "", [_series(f"rank {r}", points, r % 8) for r, points in by_rank.items()])
        for name, by_rank in found.items()
    ]


def xy(points: Points, most: int) -> dict[str, list[Any]]:
    """Points in order; of more than ``most`` the lowest and the highest of each stretch."""
    if len(points) > most:
        stretch = -(-2 * len(points) // most)
        kept: list[tuple[float, float]] = []
        for i in range(0, len(points), stretch):
            part = [p for p in points[i : i + stretch] if math.isfinite(p[1])] or points[i : i + 1]
            ends: list[Callable[..., Any]] = [min, max]
            kept += sorted({pick(part, key=lambda p: p[1]) for pick in ends})
        points = kept
    short = lambda value: float(f"{value:.6g}")
    return {"x": [short(x) for x, _ in points], "y": [short(y) if math.isfinite(y) else None for _, y in points]}


def smoothed(points: Points) -> list[tuple[float, float]]:
    """A running mean over a fiftieth of the points, on both sides of each."""
    reach = max(1, len(points) // 100)
    if len(points) < 8:
        return list(points)

    def mean(i: int) -> float:
        near = [y for _, y in points[max(0, i - reach) : i + reach + 1] if math.isfinite(y)]
        return statistics.fmean(near) if near else math.nan

    return [(x, mean(i)) for i, (x, _) in enumerate(points)]
