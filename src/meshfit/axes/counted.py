"""The cost of collectives that were counted once, on a few samples, for a batch of another size."""

from collections import defaultdict
from collections.abc import Iterable

from meshfit.anatomy.trace import Trace
from meshfit.comm.group import Traffic
from meshfit.cost import Cost


def float_bytes(trace: Trace) -> int:
    """Bytes of an element of its activations."""
    return 8 if any(p.dtype == "float64" for p in trace.parameters.values()) else 4


def growth(trace: Trace, samples: int) -> float:
    """How many times ``samples`` the batch of the trace has."""
    there = max((trace.values[v].shape[0] for v in trace.inputs if trace.values[v].shape), default=1)
    return there / (samples or there)


def counted_cost(traffic: Iterable[tuple[int, Traffic]], trace: Trace, *, samples: int, microbatches: int) -> Cost:
    """Of ``traffic``, each so many times a microbatch: it was counted on ``samples``, and the trace is of one
    microbatch. Exact where activations grow with the batch."""
    calls: dict[str, int] = defaultdict(int)
    moved: dict[str, float] = defaultdict(float)
    wide, grown = float_bytes(trace), growth(trace, samples)
    for times, each in traffic:
        calls[each.op] += times * microbatches
        moved[each.op] += times * microbatches * each.bytes(wide) * (grown if each.grows(samples) else 1)
    return Cost(calls=dict(calls), moved={op: round(size) for op, size in moved.items()})
