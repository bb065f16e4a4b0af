"""What the page shows, as plain values: the page itself only draws. Also what the live page is sent."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshfit.data.clock import STAGES
from meshfit.observe.kinds import KINDS, OTHER, PHASES, kind_of
from meshfit.observe.reading import Rank, Recording, Total, phase_shares
from meshfit.observe.timeline import drawn, windows
from meshfit.observe.verdict import findings

POINTS = 500
LANE_SPANS = 4000
GIB = 2**30


def page_data(run: Recording) -> dict[str, Any]:
    """Everything about ``run`` that the page shows; JSON can hold it."""
    found = findings(run)
    return {
        "mode": "run",
        "name": run.folder.resolve().name,
        "plan": run.plan,
        "state": run.state,
        "error": run.error,
        "when": time.strftime("%-d %B %Y, %H:%M", time.localtime(run.began)) if run.began else "",
        "verdict": _finding(found[0]) if found else None,
        "findings": [_finding(finding) for finding in found],
        "tiles": tiles(run),
        "kinds": {k.name: _kind(k) for k in (*KINDS.values(), OTHER)},
        "bars": [_bar(rank, int(run.words.get("pipeline", 1)) > 1) for rank in run.ranks],
        "timeline": _timeline(run),
        "charts": [chart for chart in _charts(run) if chart is not None and any(s["x"] for s in chart["series"])],
        "notes": list(run.about.get("notes", [])),
        "tables": [table for table in _tables(run) if table["rows"]],
    }


def summary_data(run: Recording) -> dict[str, Any]:
    """A run on one card, for pages about several."""
    found = findings(run)
    loss = [(float(s["step"]), number(s["loss"])) for s in run.steps if "loss" in s]
    return {
        "name": run.folder.resolve().name,
        "plan": run.plan,
        "state": run.state,
        "tiles": tiles(run)[:3],
        "verdict": _finding(found[0]) if found else None,
        "loss": _xy(loss, 120),
        "steps": run.steps[-1]["step"] if run.steps else 0,
        "of": run.fact("last_step"),
    }


def tiles(run: Recording) -> list[dict[str, Any]]:
    """The figures one looks for first."""
    last = run.steps[-1] if run.steps else {}
    found = []
    if "loss" in last:
        found.append({"label": "loss", "value": f"{number(last['loss']):.4g}", "note": f"after {last['step']:,} steps"})
    valid = next((step["valid"] for step in reversed(run.steps) if step.get("valid")), {})
    for name, value in list(valid.items())[:2]:
        label = f"validation {name}" if name == "loss" else name
        shown = f"{number(value):.4g}"
        best = [number(s["valid"][name]) for s in run.steps if name in s.get("valid", {})]
        note = "last evaluation" if len(best) < 2 else f"from {best[0]:.4g}"
        found.append({"label": label, "value": shown, "note": note})
    found.append(
        {"label": "samples / s", "value": amount(run.rate), "note": f"batch of {run.about.get('batch_size', '?')}"}
    )
    if run.tokens:
        note = f"{run.tokens:,} a sample"
        found.append({"label": "tokens / s", "value": amount(run.rate * run.tokens), "note": note})
    if run.flops:
        note = "of the model" if run.of_peak is None else f"{run.of_peak:.0%} of peak"
        value, unit = arithmetic(run.flops).split()
        found.append({"label": unit.replace("/", " / "), "value": value, "note": note})
    if run.step_seconds:
        found.append({"label": "step", "value": seconds(run.step_seconds), "note": f"{len(run.ranks)} {_devices(run)}"})
    peak = max((v for r in run.ranks for v in [_peak(r)]), default=0.0)
    if peak:
        found.append({"label": "memory", "value": size(peak), "note": "a device, at its most"})
    if "seconds" in last:
        found.append(
            {"label": "trained", "value": seconds(last["seconds"]), "note": f"{last.get('samples', 0):,} samples"}
        )
    return found


def _devices(run: Recording) -> str:
    word = "GPU" if str(run.fact("device", "")).startswith("cuda") else "CPU rank"
    return word + ("s" if len(run.ranks) != 1 else "")


def _peak(rank: Rank) -> float:
    gpu = [v for _, v in rank.series("gpu_peak")]
    return max(gpu or [v for _, v in rank.series("rss")], default=0.0)


def _finding(finding: Any) -> dict[str, Any]:
    gain = f"{finding.faster:.2f}x" if finding.lost >= 0.02 else ""
    names = ("name", "title", "evidence", "change", "good")
    return {**{n: getattr(finding, n) for n in names}, "lost": round(finding.lost, 4), "gain": gain}


def _kind(kind: Any) -> dict[str, Any]:
    return {"label": kind.label, "colour": kind.colour, "dark": kind.dark, "waits": kind.waits}


def _bar(rank: Rank, staged: bool) -> dict[str, Any]:
    shares = phase_shares(rank)
    inner = {n: rank.steady.get(n, 0.0) for n in ("forward", "backward", "weight", "receive")}
    if sum(inner.values()) and shares.get("forward_backward"):  # shown by its parts where they are known
        whole, wall = shares.pop("forward_backward"), max(rank.wall, 1e-9)
        parts = {n: took / wall for n, took in inner.items() if took}
        rest = max(0.0, whole - sum(parts.values()))
        left = "receive" if staged else "forward_backward"  # a rank of a pipeline waits when it does neither
        shares = {**parts, **({left: parts.get(left, 0.0) + rest} if rest > 0.002 else {}), **shares}
    use = rank.mean("gpu_use") if rank.mean("gpu_use") is not None else rank.mean("cpu")
    device = str(rank.facts.get("device", ""))
    return {
        "label": f"rank {rank.rank}",
        "note": device + (f", {use:.0f} % in use" if use is not None else ""),
        "parts": [[name, round(share, 5)] for name, share in shares.items() if share > 0.0005],
    }


def _timeline(run: Recording) -> dict[str, Any]:
    names: list[str] = []
    shown = windows(run)
    lanes = []
    for i, rank in enumerate([*run.ranks, *run.servers]):
        spans = drawn(rank)
        if len(spans) > LANE_SPANS:
            near = [(w.first - 8, w.last + 8) for w in shown]
            spans = [s for s in spans if s.seconds > 0.2 or any(a <= s.step <= b for a, b in near)][:LANE_SPANS]
        rows = []
        for span in spans:
            if span.name not in names:
                names.append(span.name)
            row = [names.index(span.name), round(span.at, 6), round(span.seconds, 6), span.step]
            rows.append([*row, span.about["microbatch"]] if "microbatch" in span.about else row)
        label = f"rank {rank.rank}" if i < len(run.ranks) else f"server {rank.rank}"
        lanes.append({"label": label, "note": str(rank.facts.get("device", "")), "spans": rows})
    labels = {"usual": "usual steps", "slowest": "slowest step", "first": "first steps"}
    return {
        "kinds": [{"name": name, **_kind(kind_of(name))} for name in names],
        "lanes": lanes,
        "windows": [
            {"label": labels[w.name], "start": w.start, "end": w.end, "steps": [w.first, w.last]} for w in shown
        ],
    }


def _charts(run: Recording) -> list[dict[str, Any] | None]:
    return [
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


def _chart(name: str, title: str, x: str, unit: str, series: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": name, "title": title, "x": x, "unit": unit, "series": series, **more}


def _series(
    name: str, points: Sequence[tuple[float, float]], tone: int = 0, most: int = POINTS, **more: Any
) -> dict[str, Any]:
    return {"name": name, "tone": tone, **_xy(points, most), **more}


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


def _tables(run: Recording) -> list[dict[str, Any]]:
    about = run.about
    plan = [
        ["plan", run.plan],
        ["batch", f"{about.get('batch_size', '?')} samples over all devices"],
        ["seed", str(about.get("seed", ""))],
    ]
    if parameters := run.fact("parameters"):
        plan.append(["parameters", f"{parameters:,} on rank 0"])
    memory = [[kind, size(count)] for kind, count in (run.fact("memory") or {}).items()]
    path = [["waited for data", f"{run.share('data'):.1%} of the time"]]
    if run.steps and "epoch" in run.steps[-1]:
        path.append(["epochs begun", str(run.steps[-1]["epoch"] + 1)])
    workers = max((int(v) for r in run.ranks for _, v in r.series("workers")), default=0)
    path.append(["processes beside the ranks", str(workers)])
    made = run.fact("data") or {}
    if batches := made.get("batches"):
        path += [[f"to {name}", f"{seconds(made[name] / batches)} a batch"] for name in STAGES if name in made]
    longest = max((s.seconds for r in run.ranks for s in r.spans if s.name == "data"), default=0.0)
    path.append(["longest wait", seconds(longest)])
    traffic = run.traffic or {}
    moved = [[name.replace("_", "-"), f"{size(count)} a step"] for name, count in traffic.items()]
    if moved and run.step_seconds:
        moved.append(["that is", f"{size(sum(traffic.values()) / run.step_seconds)} / s on each rank"])
    if len(run.ranks) > 1:
        moved.append(["waited for it", f"{run.share('exchange'):.1%} of the time"])
    return [
        {"title": "Plan", "rows": plan},
        {"title": "Data path", "rows": path},
        {"title": "Traffic", "rows": moved},
        {"title": "Stays in memory", "rows": memory},
        *({"title": "Machine", "rows": _machine(machine)} for machine in run.machines),
        {"title": "Software", "rows": [[k, str(about[k])] for k in ("meshfit", "torch", "python") if k in about]},
    ]


def _machine(machine: dict[str, Any]) -> list[list[str]]:
    rows = [[k, str(machine[k])] for k in ("host", "system", "cpu", "cores", "cuda") if machine.get(k)]
    if machine.get("memory"):
        rows.append(["memory", size(machine["memory"])])
    if machine.get("gpus"):
        rows.append(["GPUs", f"{len(machine['gpus'])} x {machine['gpus'][0]}"])
    return rows


def number(value: Any) -> float:
    """From JSON, which has no NaN."""
    return float(value)


def _xy(points: Sequence[tuple[float, float]], most: int) -> dict[str, list[Any]]:
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


def amount(value: float) -> str:
    for unit, divisor in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * divisor:
            return f"{value / divisor:,.1f} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def arithmetic(flops: float) -> str:
    """A second."""
    unit, divisor = next(((u, d) for u, d in (("T", 1e12), ("G", 1e9)) if flops >= d), ("M", 1e6))
    return f"{flops / divisor:.3g} {unit}FLOP/s"


def seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.3g} min"
    return f"{value / 3600:.3g} h"


def size(count: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
