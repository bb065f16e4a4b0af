"""The trace of a batch of any size, from those of two others: whatever a trace counts is linear in the samples."""

from collections.abc import Callable
from dataclasses import replace

from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, Streaming
from meshfit.anatomy.trace import Event, EventCost, StorageUse, Trace, Value

Line = Callable[[float, float], float]
GROWING = {
    MatrixProduct: ("m", "n", "k", "batch", "count"),
    FusedAttention: ("batch", "heads", "length", "keys", "count"),
    Streaming: ("bytes", "kernels"),
}
NUMBERS = ("flops", "flops_backward", "bytes_read", "bytes_written", "kept", "rounded", "passed")


class Unlike(Exception):
    """The two traces are not of the same forward."""


def at_samples(first: Trace, a: int, second: Trace, b: int, samples: int) -> Trace:
    """``first`` is of ``a`` samples, ``second`` of ``b``. Raises ``Unlike`` where they do other things."""
    if samples in (a, b):
        return first if samples == a else second

    def line(x: float, y: float) -> float:
        return x + (y - x) * (samples - a) / (b - a)

    if len(first.events) != len(second.events) or first.values.keys() != second.values.keys():
        raise Unlike
    known: dict[tuple[int, int], tuple[Operation, ...]] = {}
    events = tuple(_event(x, y, line, known) for x, y in zip(first.events, second.events, strict=True))
    values = {id: _value(value, second.values[id], line) for id, value in first.values.items()}
    blocks = tuple(
        replace(x, cost=_cost(x.cost, y.cost, line, known)) for x, y in zip(first.blocks, second.blocks, strict=True)
    )
    return replace(first, events=events, values=values, blocks=blocks)


def _event(x: Event, y: Event, line: Line, known: dict) -> Event:
    if x.name != y.name:
        raise Unlike
    return replace(x, cost=_cost(x.cost, y.cost, line, known))


def _value(x: Value, y: Value, line: Line) -> Value:
    if len(x.shape) != len(y.shape):
        raise Unlike
    shape = tuple(round(line(p, q)) for p, q in zip(x.shape, y.shape, strict=True))
    return replace(x, shape=shape, bytes=round(line(x.bytes, y.bytes)))


def _cost(x: EventCost, y: EventCost, line: Line, known: dict) -> EventCost:
    if len(x.uses) != len(y.uses):
        raise Unlike
    numbers = {name: max(0, round(line(getattr(x, name), getattr(y, name)))) for name in NUMBERS}
    uses = tuple(_use(p, q, line) for p, q in zip(x.uses, y.uses, strict=True))
    forward = _operations(x.forward, y.forward, line, known)
    backward = _operations(x.backward, y.backward, line, known)
    return replace(EventCost(uses=uses, forward=forward, backward=backward), **numbers)


def _use(x: StorageUse, y: StorageUse, line: Line) -> StorageUse:
    return replace(x, bytes=round(line(x.bytes, y.bytes)), flops=round(line(x.flops, y.flops)))


def _operations(
    first: tuple[Operation, ...], second: tuple[Operation, ...], line: Line, known: dict
) -> tuple[Operation, ...]:
    """Events that share what they list share it afterwards, too."""
    key = (id(first), id(second))
    if key not in known:
        if [type(op) for op in first] != [type(op) for op in second]:
            raise Unlike
        known[key] = tuple(_operation(x, y, line) for x, y in zip(first, second, strict=True))
    return known[key]


def _operation(x: Operation, y: Operation, line: Line) -> Operation:
    numbers = {name: line(getattr(x, name), getattr(y, name)) for name in GROWING[type(x)]}
    return replace(x, **{name: each if name == "bytes" else max(1, round(each)) for name, each in numbers.items()})
