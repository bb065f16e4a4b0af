"""The cost of collectives that were counted once, on a few samples, for a batch of another size."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from meshfit.anatomy.trace import Trace
from meshfit.comm.group import Traffic
from meshfit.cost import CollectiveCall, Cost, tallied


def float_bytes(trace: Trace) -> int:
    """Bytes of an element of its activations."""
    return 8 if any(p.dtype == "float64" for p in trace.parameters.values()) else 4


HALVES = {**dict.fromkeys(("bf16", "bf16-compute", "bf16-true", "fp8"), "bfloat16"), "fp16": "float16"}
"""By the plan's precision, the dtype of what products make."""


def growth(trace: Trace, samples: int) -> float:
    """How many times ``samples`` the batch of the trace has."""
    there = max((trace.values[v].shape[0] for v in trace.inputs if trace.values[v].shape), default=1)
    return there / (samples or there)


def counted_cost(
    traffic: Iterable[tuple[int, Traffic]],
    trace: Trace,
    *,
    samples: int,
    microbatches: int,
    axis: str,
    degree: int,
    hidden: Mapping[tuple[str, str], str] = MappingProxyType({}),
    half: str = "",
) -> Cost:
    """Of ``traffic``, each so many times a microbatch: it was counted on ``samples``, and the trace is of one
    microbatch. Exact where activations grow with the batch. ``hidden``: by name and phase, what some run beside;
    ``half``: what autocast makes of fp32."""
    grown = growth(trace, samples)
    calls = [
        listed(each, trace, times * microbatches, axis, degree, grown if each.grows(samples) else 1, hidden, half)
        for times, each in traffic
    ]
    return Cost(collectives=tallied(calls))


def listed(
    each: Traffic,
    trace: Trace,
    count: int,
    axis: str,
    degree: int,
    grown: float = 1,
    hidden: Mapping[tuple[str, str], str] = MappingProxyType({}),
    half: str = "",
) -> CollectiveCall:
    """One that was counted, ``grown`` times as large."""
    wide, phase = float_bytes(trace), "backward" if each.backward else "forward"
    wide = 2 if half and wide == 4 else wide
    dtype = {8: "float64", 4: "float32", 2: half}[wide] if not each.itemsize else f"int{8 * each.itemsize}"
    return CollectiveCall(
        *(each.op, round(each.bytes(wide) * grown), degree),
        count=count,
        axis=axis,
        dtype=dtype,
        phase=phase,
        hidden=hidden.get((each.op, phase), ""),
    )
