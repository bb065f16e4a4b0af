"""What was predicted beside what was measured, item by item: seconds of a step, memory, traffic.

A prediction's items are those of the busiest rank, so that rank's are shown. Waits are told apart by where they are
met: in the middle of operations (``tensor``, ``context``, ``expert``, ``branch``), or for weights and gradients
(``data``, ``shard``). A GPU's stream waits within a pass, so there the first kind is part of forward and backward.
"""

from typing import Any

from meshfit.errors import JobError
from meshfit.observe.reading import Rank, RecordedRun
from meshfit.planner.calibrate import slowed
from meshfit.planner.cluster import Cluster
from meshfit.units import seconds, size

INSIDE = ("tensor", "context", "expert", "branch")
"""Axes whose ranks meet in the middle of operations."""
MET = ("meet", "join")
FETCHED = ("gather", "exchange", "average")


def step_items(run: RecordedRun) -> dict[str, tuple[float, float]]:
    """Seconds of a step, predicted and measured, by item; empty where either is not known."""
    told = run.about.get("predicted") or {}
    if "items" not in told or not run.step_seconds or not run.ranks:
        return {}
    items, waited = told["items"], told["waited"]
    inside = {axis: took for axis, took in waited.items() if axis in INSIDE}
    outside = {axis: took for axis, took in waited.items() if axis not in INSIDE}
    staged = run.degree("pipeline") > 1
    busiest = max(run.ranks, key=lambda rank: _computing(rank, staged))
    trained = max(1e-9, 1 - busiest.share("evaluate", "checkpoint"))
    took = lambda share: run.step_seconds * share / trained
    met, fetched = busiest.share(*MET), busiest.share(*FETCHED)
    rest = max(0.0, trained - busiest.share("forward_backward", "exchange", "update"))
    found = {"step": (told["seconds"], run.step_seconds)}
    if run.on_gpu:
        meanwhile = items["computing"] + sum(inside.values()) + items["bubble"]
        found["forward and backward"] = (meanwhile, took(busiest.share("forward_backward")))
    else:
        found["computing"] = (items["computing"], took(_computing(busiest, staged)))
        found[_waiting(inside)] = (sum(inside.values()), took(met))
        if staged:
            found["bubble"] = (items["bubble"], took(_idle(busiest, staged)))
    found[_waiting(outside)] = (sum(outside.values()), took(fetched))
    found["optimizer"] = (items["update"], took(busiest.share("update")))
    found["all else"] = (items["slack"], took(rest))
    return {name: pair for name, pair in found.items() if any(each > 1e-7 for each in pair)}


def learned(run: RecordedRun) -> tuple[Cluster, float]:
    """The machine as it was when the run was predicted, with devices as fast as the run's were; and how many times as
    long as predicted they computed. Links stay as they were: waits tell of late ranks, too."""
    timed = step_items(run)
    told, got = timed.get("computing") or timed.get("forward and backward") or (0.0, 0.0)
    if not told or not got:
        raise JobError(
            f"{run.folder} says nothing about this machine", "no seconds were predicted for it, or no step was timed"
        )
    return slowed(Cluster.of(run.about["predicted"]["cluster"]), got / told), got / told


def _waiting(waited: dict[str, float]) -> str:
    named = [axis for axis in waited if axis != "step"]
    return f"waiting: {' '.join(named) or 'other ranks'}"


def _idle(rank: Rank, staged: bool) -> float:
    """Share of the time in which a rank of a pipeline ran no action."""
    return max(0.0, rank.share("forward_backward") - rank.share("forward", "backward", "weight")) if staged else 0.0


def _computing(rank: Rank, staged: bool) -> float:
    """Share of the time in forward and backward, without waits in them."""
    return max(0.0, rank.share("forward_backward") - _idle(rank, staged) - rank.share("gather", *MET))


def beside_tables(run: RecordedRun) -> list[dict[str, Any]]:
    """For the page: seconds of a step; what the first rank holds and moves."""
    timed = [[name, seconds(told), seconds(got), _off(told, got)] for name, (told, got) in step_items(run).items()]
    held = [[name, size(told), size(got), _off(told, got)] for name, told, got in _bytes(run) if told and got]
    head = ["predicted", "measured", "off by"]
    return [
        {"title": "A step, predicted and measured", "head": ["the busiest rank", *head], "rows": timed},
        {"title": "Bytes, predicted and measured", "head": ["rank 0", *head], "rows": held},
    ]


def _off(told: float, got: float) -> str:
    percent = round(100 * (told / got - 1)) if got else 1000
    return "" if abs(percent) >= 1000 else f"{percent:+} %" if percent else "0 %"


def _bytes(run: RecordedRun) -> list[tuple[str, float, float]]:
    predicted = run.about.get("predicted")
    if not predicted or not run.ranks:
        return []
    first, held = run.ranks[0], predicted["held"]
    kept = first.facts.get("memory", {})
    rows = [(kind, held.get(kind, 0), kept.get(kind, 0)) for kind in ("weights", "gradients", "optimizer")]
    if peak := first.most("gpu_peak"):
        stays = sum(told for _, told, _ in rows), sum(got for _, _, got in rows)
        rows.append(("all else, at its most", predicted["most"] - stays[0], peak - stays[1]))
        rows.append(("peak memory", predicted["most"], peak))
    for name, count in first.moved.items():
        measured = count / run.last_step if run.last_step else 0
        rows.append((f"{name.replace('_', '-')} a step", predicted["moved"].get(name, 0), measured))
    return rows
