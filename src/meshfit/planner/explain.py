"""A search in words and numbers: the chosen plan, the best of each family, what was rejected and why, how sure it is.

Intervals are errors of the cost model against published trainings (docs/planner.md, nine of ten predictions of sources
that its constants were not fitted on). meshfit itself was not among those.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshfit.plan import Plan
from meshfit.planner.cluster import Cluster
from meshfit.planner.prediction import Prediction
from meshfit.planner.search import Found
from meshfit.units import seconds as in_words
from meshfit.units import size

SURE = {"dense": 0.18, "experts": 0.38, "traced": 0.4}
"""Nine of ten predictions are within this share of what was measured. "traced": a module that is not described by its
sizes, a guess until its machine has been calibrated."""


@dataclass(frozen=True, kw_only=True)
class WholeJob:
    """So many steps of a prediction."""

    prediction: Prediction
    cluster: Cluster
    steps: int
    """0: not known."""

    @property
    def seconds(self) -> float:
        return self.prediction.seconds * self.steps

    @property
    def price(self) -> float | None:
        """US dollars, where the cluster has a price."""
        hourly = self.cluster.hourly
        return None if hourly is None or not self.steps else hourly * self.seconds / 3600

    @property
    def energy(self) -> float | None:
        """kWh of the devices, at their limit."""
        watts = self.cluster.accelerator.watts
        return None if not watts or not self.steps else watts * self.prediction.plan.devices * self.seconds / 3.6e6


def row(prediction: Prediction, cluster: Cluster, steps: int = 0) -> dict[str, Any]:
    """One line of the table, in SI units."""
    whole = WholeJob(prediction=prediction, cluster=cluster, steps=steps)
    peak = cluster.accelerator.rate(_precision(prediction.plan)) * prediction.plan.devices
    items, total = prediction.items, prediction.seconds
    return {
        "plan": str(prediction.plan),
        "seconds": total,
        "samples_per_second": prediction.samples_per_second,
        "tokens_per_second": prediction.work.tokens / total,
        "share_of_peak": prediction.work.model_flops / total / peak,
        "memory": prediction.memory.device,
        "capacity": prediction.capacity,
        "held": dict(prediction.memory.held),
        "phases": {phase: dict(kinds) for phase, kinds in prediction.kinds.items()},
        "items": dict(items),
        "exposed": items.get("collectives", 0.0) / total,
        "bubble": items.get("bubble", 0.0) / total,
        "price": whole.price,
        "energy": whole.energy,
    }


def _precision(plan: Plan) -> str:
    return plan.precision.removesuffix("-true").removesuffix("-compute")


HEAD = ("plan", "step", "tokens/s", "of peak", "memory", "exposed", "bubble")


def line(about: Mapping[str, Any]) -> list[str]:
    """``row`` as text."""
    speed = about["tokens_per_second"] or about["samples_per_second"]
    cells = [
        about["plan"],
        in_words(about["seconds"]),
        f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
        f"{100 * about['share_of_peak']:.1f} %",
        f"{size(about['memory'][1])} of {size(about['capacity'])}",
        f"{100 * about['exposed']:.0f} %",
        f"{100 * about['bubble']:.0f} %",
    ]
    if about["price"] is not None:
        cells.append(f"{about['price']:,.0f} $")
    elif about["energy"] is not None:
        cells.append(f"{about['energy']:,.0f} kWh")
    return cells


def warnings(plan: Plan, cluster: Cluster) -> list[str]:
    """Axes that talk in every operation, and reach over the slow link."""
    found, stride = [], 1
    for axis in ("tensor", "branch", "context", "expert", "shard"):  # from inner to outer: see axes/mesh.py
        degree = getattr(plan, axis)
        if degree > 1 and degree * stride > cluster.domain and (axis != "shard" or plan.zero == 3):
            found.append(
                f"{axis}={degree} reaches over nodes: {cluster.domain} devices share "
                f"{cluster.inside.kind}, beyond it is {cluster.network.bandwidth / 1e9:.3g} GB/s a device"
            )
        stride *= degree
    return found


def itemised(prediction: Prediction) -> list[str]:
    """Its memory by kind and its seconds by item, the largest first."""
    memory, took = _parts(prediction.memory.held), _parts(prediction.items)
    said = lambda parts, unit: ", ".join(f"{name} {unit(value)}" for name, value in parts)
    low, high = (used - prediction.memory.allocated for used in prediction.memory.device)
    beside = f"; beside these {size(low)} to {size(high)} of the process and its allocator"
    return [f"memory: {said(memory, size)}{beside}", f"a step: {said(took, in_words)}"]


def _parts(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """But for what is less than a hundredth."""
    least = sum(parts.values()) / 100
    return sorted(((name, value) for name, value in parts.items() if value >= least), key=lambda part: -part[1])


def reasons(found: Found, cluster: Cluster) -> list[str]:
    """Why the best plan, in three lines."""
    best = found.best
    if best is None:
        return ["nothing fits", *(family.reason for family in found.rejected[:2])]
    after = next((f.best for f in found.families if f.best is not None and f.best is not best), None)
    beside = "nothing else was allowed or fits"
    if after is not None:
        beside = f"next is {after.plan}, {100 * (after.seconds / best.seconds - 1):.0f} % slower"
    share = row(best, cluster)["share_of_peak"]
    return [
        f"{best.plan}: {in_words(best.seconds)} a step, {100 * share:.0f} % of the peak",
        f"{size(best.memory.device[1])} of {size(best.capacity)}, most of it {largest(best.memory.held)}",
        f"{beside} ({found.written} plans looked at)",
    ]


def largest(held: Mapping[str, float]) -> str:
    return max(held, key=lambda kind: held[kind])


def to_dict(found: Found, cluster: Cluster, *, steps: int, sure: float, batch: int) -> dict[str, Any]:
    """For ``--json``."""
    rows = [row(f.best, cluster, steps) | {"family": f.name} for f in found.families if f.best is not None]
    return {
        "cluster": cluster.name,
        "devices": cluster.devices,
        "batch": batch,
        "best": rows[0] if rows else None,
        "families": rows,
        "rejected": [{"family": f.name, "reason": f.reason, "remedy": f.remedy} for f in found.rejected],
        "within": sure,
        "warnings": warnings(found.best.plan, cluster) if found.best else [],
        "search": {
            "seconds": found.seconds,
            "looked_at": found.written,
            "fitting": found.fitting,
            "simulated": found.priced,
        },
    }
