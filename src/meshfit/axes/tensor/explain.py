"""A tensor plan in words: like regions as one line, whatever their number."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshfit.axes.tensor.region import Region, TensorPlan

MOST_DEGREES = 64
MOST_NAMES = 6
MOST_REASONS = 4


def as_degrees(sizes: Iterable[int]) -> str:
    """ "tensor=2, 3 or 6": numbers of ranks, of those up to 64."""
    found = [str(n) for n in sizes if 1 < n <= MOST_DEGREES]
    if not found:
        return f"no tensor degree up to {MOST_DEGREES} divides them"
    return f"tensor={' or '.join(part for part in (', '.join(found[:-1]), found[-1]) if part)}"


def explain(plan: "TensorPlan") -> list[str]:
    groups: dict[str, int] = {}
    for region in plan.regions:
        line = _line(region)
        groups[line] = groups.get(line, 0) + 1
    lines = [f"{plan.share:.1%} of the parameters are cut over tensor={plan.degree}, the rest is whole on every rank"]
    lines += [f"{count} x {line}" if count > 1 else line for line, count in groups.items()]
    return lines + _whole(plan) + list(plan.notes)


def _line(region: "Region") -> str:
    if region.lookups or region.slices:
        said = "; its loss is computed from slices of the logits" if region.slices else ""
        if region.slices and any(each.op == "all_gather" for each in region.traffic):
            said = "; its logits are gathered"
        names = [path for path in (*region.lookups, *region.slices) if path] or [region.module]
        return f"{region.kind}  {', '.join(names)} along the vocabulary{said}"
    if region.rows:
        return f"rows  {_some(map(numberless, region.rows))}: each rank its share, put together for regions"
    if region.gathers:
        return f"layer  {numberless(region.module)} by output channels, gathered"
    rows = tuple(leave.module for leave in region.leaves)
    parts: dict[str, list[str]] = {}
    for cut in region.cuts:
        path, _, own = cut.name.rpartition(".")
        if own == "bias" or "running_" in own:
            continue
        role = "by rows" if path in rows and path else "by columns"
        role += f" (each share on {cut.copies} ranks)" if cut.copies > 1 else ""
        parts.setdefault(role, []).append(numberless(path if own == "weight" and path else cut.name))
    roles = []
    for role in sorted(parts, key=lambda role: "rows" in role):
        roles.append(f"{_some(parts[role])} {role}")
    ahead = sum(not each.backward for each in region.traffic)
    back = len(region.traffic) - ahead
    return f"{region.kind or 'pair'}  {', '.join(roles)}; sums: {ahead} forward, {back} backward"


def _whole(plan: "TensorPlan") -> list[str]:
    """What stays whole, by the reason, the largest first."""
    total = max(sum(plan.elements.values()), 1)
    reasons: dict[str, dict[str, int]] = {}
    for name, reason in plan.why.items():
        held = reasons.setdefault(numberless(reason), {})
        held[numberless(name)] = held.get(numberless(name), 0) + plan.elements.get(name, 0)
    lines = []
    ordered = sorted(reasons.items(), key=lambda item: -sum(item[1].values()))
    for reason, held in ordered[:MOST_REASONS]:
        names = _some(sorted(held, key=lambda name: -held[name]), 3)
        lines.append(f"whole  {names} ({sum(held.values()) / total:.1%}): {reason}")
    return lines


def _some(names: Iterable[str], most: int = MOST_NAMES) -> str:
    """ "a, b and 3 more": each name once."""
    every = list(dict.fromkeys(names))
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def numberless(name: str) -> str:
    """ "layers.*.norm" for "layers.3.norm"."""
    return re.sub(r"(?<![\w])\d+(?=\.)|(?<=\.)\d+(?![\w])", "*", name)
