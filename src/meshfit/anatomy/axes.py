"""Along which axes a model can be spread, as far as its trace can tell, and why not along the others."""

import re
from dataclasses import dataclass
from math import gcd

from meshfit.anatomy.blocks import blocks
from meshfit.anatomy.branches import branches
from meshfit.anatomy.cuts import cuts, stages
from meshfit.anatomy.pairs import Pairs
from meshfit.anatomy.recompute import after_recompute, recomputed_blocks
from meshfit.anatomy.record_known import above
from meshfit.anatomy.trace import Trace

EVEN = 0.25
"""Imbalance up to which a pipeline is worth naming."""

AXES = ("data", "shard", "pipeline", "branch", "tensor", "context", "expert", "recompute")


@dataclass(frozen=True, slots=True)
class AxisVerdict:
    """What a trace says of an axis."""

    takes: bool | None
    """None: it is not analysed, or the trace cannot tell."""

    why: str
    most: int | None = None
    """The largest degree that makes sense, where one is known."""


def axes(trace: Trace, split: Pairs | None = None) -> dict[str, AxisVerdict]:
    """A verdict for each axis. ``split`` is what ``find_pairs`` found; without it little can be said of tensor."""
    if not any(parameter.trained for parameter in trace.parameters.values()):
        return dict.fromkeys(AXES, AxisVerdict(False, "it has no parameter that is trained"))
    return {
        "data": _data(trace),
        "shard": _shard(trace),
        "pipeline": _pipeline(trace),
        "branch": _branch(trace),
        "tensor": _tensor(trace) if split is None else _pairs(split),
        "context": _context(trace),
        "expert": _expert(trace),
        "recompute": _recompute(trace),
    }


def norms(trace: Trace) -> tuple[str, ...]:
    """Paths of the modules that keep statistics of the batch."""
    held = {name.rpartition(".")[0] for name in trace.buffers if name.endswith("running_mean")}
    return tuple(path for path, kind in trace.kinds.items() if path in held or "BatchNorm" in kind)


def _data(trace: Trace) -> AxisVerdict:
    if count := len(norms(trace)):
        what = f"its {count} BatchNorms" if count > 1 else "its BatchNorm"
        return AxisVerdict(True, f"{what} normalise over all ranks; microbatches would change them")
    return AxisVerdict(True, "no module of it keeps statistics over the batch")


def _shard(trace: Trace) -> AxisVerdict:
    units = blocks(trace)
    count = sum(len(unit.paths) for unit in units)
    if not count:
        return AxisVerdict(True, "as one unit: it has no blocks to gather one by one")
    largest = max(unit.parameters for unit in units)
    share = largest / max(trace.parameter_bytes, 1)
    return AxisVerdict(True, f"{count} units, the largest with {share:.1%} of the bytes")


def _pipeline(trace: Trace) -> AxisVerdict:
    for found in trace.dynamic:
        whole = any(event.kind == "module" and event.name == found.module for event in trace.events)
        if found.depends_on in ("activations", "random") and not whole:
            return AxisVerdict(False, f"{found.what} at {found.line} decides on {found.depends_on}", 1)
    for found in trace.dynamic:
        if found.depends_on == "inputs":
            return AxisVerdict(None, f"only while {found.what} at {found.line} comes out as it was traced")
    legal = len(cuts(trace))
    if not legal:
        return AxisVerdict(False, "there is no place to cut it", 1)
    most = 1
    while 2 * most <= min(legal + 1, 1024) and stages(trace, 2 * most).imbalance <= EVEN:
        most *= 2
    if most == 1:
        lump = stages(trace, 2).imbalance
        return AxisVerdict(True, f"but two stages are already {lump:.0%} out of balance", legal + 1)
    split = stages(trace, most)
    tied = f"; {len(split.ties)} parameters are used in several stages" if split.ties else ""
    tied = tied.replace("1 parameters are", "1 parameter is")
    return AxisVerdict(True, f"up to {most} stages of about even cost{tied}", most)


def _branch(trace: Trace) -> AxisVerdict:
    found = [branch for branch in branches(trace) if branch.group == 0]
    if not found:
        return AxisVerdict(False, "everything waits for what is before it: no two parts of 5 % each are independent", 1)
    shares = " and ".join(f"{branch.share:.0%}" for branch in found[:4])
    shared = {name for branch in found for name in branch.shared}
    tied = f"; they share {len(shared)} parameters".replace(" 1 parameters", " a parameter") if shared else ""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return AxisVerdict(True, f"{len(found)} branches with {shares}{more} of the cost{tied}", len(found))


def _pairs(split: Pairs) -> AxisVerdict:
    count = f"{len(split.pairs)} pair{'s' * (len(split.pairs) != 1)}"
    if not split.pairs:
        return AxisVerdict(False, "no pair of weights can be split column then row; by gathering alone")
    narrow = min(split.pairs, key=lambda pair: pair.limit)
    why = f"{count} of weights, column then row, hold {split.cover:.0%} of the bytes"
    return AxisVerdict(True, f"{why}; up to tensor={narrow.limit} ({narrow.narrowest.parameter})", narrow.limit)


def _tensor(trace: Trace) -> AxisVerdict:
    repeated = {path for unit in blocks(trace) if len(unit.paths) > 1 for path in unit.paths}
    widths = [
        size
        for name, parameter in trace.parameters.items()
        if len(parameter.shape) == 2 and (not repeated or not repeated.isdisjoint(above(name)))
        for size in parameter.shape
    ]
    if not widths:
        return AxisVerdict(None, "not tried at this size; it has no matrices")
    divisor = gcd(*widths)
    if divisor == 1:
        return AxisVerdict(None, "not tried at this size; the widths of its matrices have no divisor in common")
    return AxisVerdict(None, f"not tried at this size; the widths of its matrices all divide by {divisor}")


def _context(trace: Trace) -> AxisVerdict:
    lengths = [trace.values[value].shape for value in trace.inputs if len(trace.values[value].shape) > 1]
    if not lengths:
        return AxisVerdict(False, "its inputs have no dim but that of the samples", 1)
    return AxisVerdict(None, "tried when it is asked for, by running a step on a few samples")


def _expert(trace: Trace) -> AxisVerdict:
    found = [
        path for path, kind in trace.kinds.items() if re.search(r"(?i)experts?$|moe", kind) or path.endswith("experts")
    ]
    if not found:
        return AxisVerdict(False, "no module of it looks like experts", 1)
    return AxisVerdict(None, f"{len(found)} modules look like experts, {found[0]} first; tried when it is asked for")


def _recompute(trace: Trace) -> AxisVerdict:
    cost, found = trace.cost, recomputed_blocks(trace)
    if not cost.kept:
        return AxisVerdict(False, "nothing is kept for backward")
    if not found:
        return AxisVerdict(False, "no module of it would keep much less")
    kept, again = after_recompute(trace, found)
    left, more = sum(kept.values()) / cost.kept, sum(again.values()) / max(cost.flops + cost.flops_backward, 1)
    return AxisVerdict(True, f"{len(found)} modules: {left:.0%} of the bytes kept stay, for {more:.0%} more flops")
