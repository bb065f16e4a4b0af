"""What the page shows, as plain values: the page itself only draws. Also what the live page is sent."""

import time
from typing import Any

from meshfit.cost import size
from meshfit.data.source import STAGES
from meshfit.observe import foretold, ideal
from meshfit.observe.charts import charts, xy
from meshfit.observe.figures import amount, arithmetic, number, seconds
from meshfit.observe.ideal import Ideal
from meshfit.observe.kinds import KINDS, OTHER, kind_of
from meshfit.observe.reading import Rank, Recording, Span, phase_shares
from meshfit.observe.timeline import drawn, lanes, overlapped, windows
from meshfit.observe.verdict import findings

LANE_SPANS = 4000
WITHIN = tuple(kind.name for kind in KINDS.values() if kind.phase == "forward_backward" and kind.waits)
WINDOWS = {"usual": "usual steps", "slowest": "slowest step", "first": "first steps"}


def page_data(run: Recording) -> dict[str, Any]:
    """Everything about ``run`` that the page shows; JSON can hold it."""
    found, without = (
        findings(run),
        ideal.ideal(run, [step for w in windows(run) for step in range(w.first, w.last + 1)]),
    )
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
        "timeline": _timeline(run, without),
        "charts": charts(run),
        "notes": list(run.about.get("notes", [])),
        "tables": [table for table in _tables(run, without) if table["rows"]],
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
        "loss": xy(loss, 120),
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
    share = {name: took / max(rank.wall, 1e-9) for name, took in rank.steady.items()}
    acts = {name: share[name] for name in ("forward", "backward", "weight") if share.get(name)}
    waits = {name: share[name] for name in WITHIN if share.get(name, 0.0) > 0.005}
    if shares.get("forward_backward") and (acts or waits):  # shown by its parts where they are known
        whole = shares.pop("forward_backward")
        done = sum(acts.values()) if staged else whole
        work = {"forward_backward": max(0.0, done - sum(waits.values()))} if waits else acts
        rest = max(0.0, whole - sum(work.values()) - sum(waits.values()))
        left = "receive" if staged else "forward_backward"  # a rank of a pipeline waits when it does neither
        shares = {**work, **waits, **({left: work.get(left, 0.0) + rest} if rest > 0.002 else {}), **shares}
    use = rank.mean("gpu_use") if rank.mean("gpu_use") is not None else rank.mean("cpu")
    device = str(rank.facts.get("device", ""))
    return {
        "label": f"rank {rank.rank}",
        "note": device + (f", {use:.0f} % in use" if use is not None else ""),
        "parts": [[name, round(share, 5)] for name, share in shares.items() if share > 0.0005],
    }


def _timeline(run: Recording, found: Ideal | None) -> dict[str, Any]:
    names: list[str] = []
    shown = windows(run)

    def row(span: Span) -> list[Any]:
        if span.name not in names:
            names.append(span.name)
        values = [names.index(span.name), round(span.at, 6), round(span.seconds, 6), span.step]
        return [*values, span.about["microbatch"]] if "microbatch" in span.about else values

    def some(spans: list[Span]) -> list[list[Any]]:
        if len(spans) > LANE_SPANS:
            near = [(w.first - 8, w.last + 8) for w in shown]
            spans = [s for s in spans if s.seconds > 0.2 or any(a <= s.step <= b for a, b in near)][:LANE_SPANS]
        return [row(span) for span in spans]

    measured = [
        {
            "label": label,
            "note": str(rank.facts.get("device", "")),
            "spans": some(drawn(rank)),
            "beside": some(overlapped(rank)),
        }
        for label, rank in lanes(run)
    ]
    without = {} if found is None else found.lanes
    return {
        "lanes": measured,
        "ideal": [{"label": f"rank {rank}", "spans": some(spans)} for rank, spans in sorted(without.items())],
        "idle": None if found is None else [round(found.bubble, 4), round(found.measured, 4)],
        "kinds": [{"name": name, **_kind(kind_of(name))} for name in names],
        "windows": [
            {"label": WINDOWS[w.name], "start": w.start, "end": w.end, "steps": [w.first, w.last]} for w in shown
        ],
    }


def _tables(run: Recording, without: Ideal | None) -> list[dict[str, Any]]:
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
        *filter(None, (ideal.beside(run, without), foretold.beside(run))),
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
