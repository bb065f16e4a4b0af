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
    predicted = run.about.get("predicted") or {}
    if "items" not in predicted or not run.step_seconds or not run.ranks:
        return {}
    items, waited = predicted["items"], predicted["waited"]
    inside = {axis: took for axis, took in waited.items() if axis in INSIDE}
    outside = {axis: took for axis, took in waited.items() if axis not in INSIDE}
    staged = run.degree("pipeline") > 1
    rank = max(run.ranks, key=lambda rank: _computing(rank, staged))
    trained = max(1e-9, 1 - rank.share("evaluate", "checkpoint"))
    if run.on_gpu:
        computed = items["computing"] + sum(inside.values()) + items["bubble"]
        shares = {"forward and backward": (computed, rank.share("forward_backward"))}
    else:
        shares = {
            "computing": (items["computing"], _computing(rank, staged)),
            _waiting(inside): (sum(inside.values()), rank.share(*MET)),
            **({"bubble": (items["bubble"], rank.idle)} if staged else {}),
        }
    shares |= {
        _waiting(outside): (sum(outside.values()), rank.share(*FETCHED)),
        "optimizer": (items["update"], rank.share("update")),
        "all else": (items["slack"], max(0.0, trained - rank.share("forward_backward", "exchange", "update"))),
    }
    found = {name: (took, run.step_seconds * share / trained) for name, (took, share) in shares.items()}
    found = {"step": (predicted["seconds"], run.step_seconds), **found}
    return {name: pair for name, pair in found.items() if any(each > 1e-7 for each in pair)}


def learned(run: RecordedRun) -> tuple[Cluster, float]:
    """The machine as it was when the run was predicted, with devices as fast as the run's were; and how many times as
    long as predicted they computed. Links stay as they were: waits tell of late ranks, too."""
    timed = step_items(run)
    predicted, measured = timed.get("computing") or timed.get("forward and backward") or (0.0, 0.0)
    if not predicted or not measured:
        raise JobError(
            f"{run.folder} says nothing about this machine", "no seconds were predicted for it, or no step was timed"
        )
    times = measured / predicted
    return slowed(Cluster.of(run.about["predicted"]["cluster"]), times), times


def _waiting(waited: dict[str, float]) -> str:
    named = [axis for axis in waited if axis != "step"]
    return f"waiting: {' '.join(named) or 'other ranks'}"


def _computing(rank: Rank, staged: bool) -> float:
    """Share of the time in forward and backward, without waits in them."""
    waits = rank.share("gather", *MET) + (rank.idle if staged else 0.0)
    return max(0.0, rank.share("forward_backward") - waits)


def beside_tables(run: RecordedRun) -> list[dict[str, Any]]:
    """For the page: seconds of a step; what the first rank holds and moves."""
    timed = [[name, *map(seconds, pair), _off(*pair)] for name, pair in step_items(run).items()]
    held = [[name, *map(size, pair), _off(*pair)] for name, *pair in _bytes(run) if all(pair)]
    head = ["predicted", "measured", "off by"]
    return [
        {"title": "A step, predicted and measured", "head": ["the busiest rank", *head], "rows": timed},
        {"title": "Bytes, predicted and measured", "head": ["rank 0", *head], "rows": held},
    ]


def _off(predicted: float, measured: float) -> str:
    percent = round(100 * (predicted / measured - 1)) if measured else 1000
    return "" if abs(percent) >= 1000 else f"{percent:+} %" if percent else "0 %"


def _bytes(run: RecordedRun) -> list[tuple[str, float, float]]:
    predicted = run.about.get("predicted")
    if not predicted or not run.ranks:
        return []
    first, held = run.ranks[0], predicted["held"]
    kept = first.facts.get("memory", {})
    rows = [(kind, held.get(kind, 0), kept.get(kind, 0)) for kind in ("weights", "gradients", "optimizer")]
    if peak := first.most("gpu_peak"):
        stays = sum(each for _, each, _ in rows), sum(each for _, _, each in rows)
        rows.append(("all else, at its most", predicted["most"] - stays[0], peak - stays[1]))
        rows.append(("peak memory", predicted["most"], peak))
    for name, count in first.moved.items():
        measured = count / run.last_step if run.last_step else 0
        rows.append((f"{name.replace('_', '-')} a step", predicted["moved"].get(name, 0), measured))
    return rows
