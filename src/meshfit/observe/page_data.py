"""What the page shows, as plain values: the page only draws. The live page is sent the same."""

import time
from typing import Any

from meshfit.data.source import STAGES
from meshfit.observe.beside import beside_tables
from meshfit.observe.charts import charts, xy
from meshfit.observe.ideal import Ideal, ideal, ideal_table
from meshfit.observe.kinds import KINDS, OTHER, Kind, kind_of
from meshfit.observe.reading import Rank, RecordedRun, RecordedSpan
from meshfit.observe.timeline import drawn, lanes, overlapped, windows
from meshfit.observe.verdict import Finding, findings
from meshfit.units import flop, quantity, seconds, size

LANE_SPANS = 4000
WITHIN = tuple(kind.name for kind in KINDS.values() if kind.phase == "forward_backward" and kind.waits)
WINDOWS = {"usual": "usual steps", "slowest": "slowest step", "first": "first steps"}


def page_data(run: RecordedRun) -> dict[str, Any]:
    """All that the page shows about ``run``, as JSON values."""
    found = findings(run)
    without = ideal(run, [step for window in windows(run) for step in range(window.first, window.last + 1)])
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
        "bars": [_bar(rank, run.degree("pipeline") > 1) for rank in run.ranks],
        "timeline": _timeline(run, without),
        "charts": charts(run),
        "notes": list(run.about.get("notes", [])),
        "tables": [table for table in _tables(run, without) if table["rows"]],
    }


def summary_data(run: RecordedRun) -> dict[str, Any]:
    """A run on one card, for pages about several."""
    found = findings(run)
    return {
        "name": run.folder.resolve().name,
        "plan": run.plan,
        "state": run.state,
        "tiles": tiles(run)[:3],
        "verdict": _finding(found[0]) if found else None,
        "loss": xy(run.values("loss"), 120),
        "steps": run.last_step,
        "of": run.fact("last_step"),
    }


def tiles(run: RecordedRun) -> list[dict[str, Any]]:
    """The numbers to look at first."""
    found: list[dict[str, Any]] = []
    last = run.steps[-1] if run.steps else {}

    def add(label: str, value: str, note: str) -> None:
        found.append({"label": label, "value": value, "note": note})

    if "loss" in last:
        add("loss", f"{float(last['loss']):.4g}", f"after {last['step']:,} steps")
    valid = next((step["valid"] for step in reversed(run.steps) if step.get("valid")), {})
    for name, value in list(valid.items())[:2]:
        before = run.values(name, "valid")
        note = "last evaluation" if len(before) < 2 else f"from {before[0][1]:.4g}"
        add(f"validation {name}" if name == "loss" else name, f"{float(value):.4g}", note)
    add("samples / s", quantity(run.rate), f"batch of {run.about.get('batch_size', '?')}")
    if run.tokens:
        add("tokens / s", quantity(run.rate * run.tokens), f"{run.tokens:,} a sample")
    if run.flops:
        value, unit = flop(run.flops).split()
        add(f"{unit} / s", value, "of the model" if run.of_peak is None else f"{run.of_peak:.0%} of peak")
    if run.step_seconds:
        device = "GPU" if run.on_gpu else "CPU rank"
        add("step", seconds(run.step_seconds), f"{len(run.ranks)} {device}{'s' * (len(run.ranks) != 1)}")
    if peak := max((rank.peak_memory for rank in run.ranks), default=0.0):
        add("memory", size(peak), "peak of a device")
    if "seconds" in last:
        add("trained", seconds(last["seconds"]), f"{last.get('samples', 0):,} samples")
    return found


def _finding(finding: Finding) -> dict[str, Any]:
    gain = f"{finding.faster:.2f}x" if finding.lost >= 0.02 else ""
    names = ("name", "title", "evidence", "change", "good")
    return {**{n: getattr(finding, n) for n in names}, "lost": round(finding.lost, 4), "gain": gain}


def _kind(kind: Kind) -> dict[str, Any]:
    return {"label": kind.label, "colour": kind.colour, "dark": kind.dark, "waits": kind.waits}


def _bar(rank: Rank, staged: bool) -> dict[str, Any]:
    shares = dict(rank.phase_shares)
    acts = {name: rank.share(name) for name in ("forward", "backward", "weight") if rank.share(name)}
    waits = {name: rank.share(name) for name in WITHIN if rank.share(name) > 0.005}
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


def _timeline(run: RecordedRun, found: Ideal | None) -> dict[str, Any]:
    names: list[str] = []
    shown = windows(run)

    def row(span: RecordedSpan) -> list[Any]:
        if span.name not in names:
            names.append(span.name)
        values = [names.index(span.name), round(span.at, 6), round(span.seconds, 6), span.step]
        return [*values, span.about["microbatch"]] if "microbatch" in span.about else values

    def some(spans: list[RecordedSpan]) -> list[list[Any]]:
        if len(spans) > LANE_SPANS:
            near = [(w.first - 8, w.last + 8) for w in shown]
            spans = [s for s in spans if s.seconds > 0.2 or any(a <= s.step <= b for a, b in near)][:LANE_SPANS]
        return [row(span) for span in spans]

    measured = []
    for label, rank in lanes(run):
        lane = {"label": label, "note": str(rank.facts.get("device", "")), "spans": some(drawn(rank))}
        measured.append({**lane, "beside": some(overlapped(rank))})
    without = {} if found is None else found.lanes
    ranges = [{"label": WINDOWS[w.name], "start": w.start, "end": w.end, "steps": [w.first, w.last]} for w in shown]
    return {
        "lanes": measured,
        "ideal": [{"label": f"rank {rank}", "spans": some(spans)} for rank, spans in sorted(without.items())],
        "idle": None if found is None else [round(found.bubble, 4), round(found.measured, 4)],
        "kinds": [{"name": name, **_kind(kind_of(name))} for name in names],
        "windows": ranges,
    }


def _tables(run: RecordedRun, without: Ideal | None) -> list[dict[str, Any]]:
    about = run.about
    plan = [["plan", run.plan], ["batch", f"{about.get('batch_size', '?')} samples over all devices"]]
    plan.append(["seed", str(about.get("seed", ""))])
    if parameters := run.fact("parameters"):
        plan.append(["parameters", f"{parameters:,} on rank 0"])
    path = [["waited for data", f"{run.share('data'):.1%} of the time"]]
    if run.steps and "epoch" in run.steps[-1]:
        path.append(["epochs begun", str(run.steps[-1]["epoch"] + 1)])
    workers = max((rank.most("workers") for rank in run.ranks), default=0)
    path.append(["processes beside the ranks", f"{workers:.0f}"])
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
    tables = {
        "Plan": plan,
        "Data path": path,
        "Traffic": moved,
        "Stays in memory": [[kind, size(count)] for kind, count in (run.fact("memory") or {}).items()],
        **{f"Machine {m.get('host', '')}".strip(): _machine(m) for m in run.machines},
        "Software": [[k, str(about[k])] for k in ("meshfit", "torch", "python") if k in about],
    }
    compared = [table for table in (ideal_table(run, without),) if table is not None]
    return [*compared, *beside_tables(run), *({"title": title, "rows": rows} for title, rows in tables.items())]


def _machine(machine: dict[str, Any]) -> list[list[str]]:
    rows = [[k, str(machine[k])] for k in ("system", "cpu", "cores", "cuda") if machine.get(k)]
    if machine.get("memory"):
        rows.append(["memory", size(machine["memory"])])
    if machine.get("gpus"):
        rows.append(["GPUs", f"{len(machine['gpus'])} x {machine['gpus'][0]}"])
    return rows
