"""The trace of a batch of any size, from those of two others: whatever a trace counts is linear in the samples."""

from dataclasses import dataclass, field, replace
from typing import Any

from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, Streaming
from meshfit.anatomy.trace import Event, EventCost, StorageUse, Trace, Value

GROWING = {
    MatrixProduct: ("m", "n", "k", "batch", "count"),
    FusedAttention: ("batch", "heads", "length", "keys", "count"),
    Streaming: ("bytes", "kernels"),
    StorageUse: ("bytes", "flops"),
    EventCost: ("flops", "flops_backward", "bytes_read", "bytes_written", "kept", "rounded", "passed"),
}


class Unlike(Exception):
    """The two traces are not of the same forward."""


def at_samples(first: Trace, a: int, second: Trace, b: int, samples: int) -> Trace:
    """``first`` is of ``a`` samples, ``second`` of ``b``. Raises ``Unlike`` where they do other things."""
    if samples in (a, b):
        return first if samples == a else second
    if len(first.events) != len(second.events) or first.values.keys() != second.values.keys():
        raise Unlike
    line = _Line((samples - a) / (b - a))
    costs = lambda xs, ys: tuple(replace(x, cost=line.cost(x.cost, y.cost)) for x, y in zip(xs, ys, strict=True))
    if any(x.name != y.name for x, y in zip(first.events, second.events, strict=True)):
        raise Unlike
    values = {id: line.value(value, second.values[id]) for id, value in first.values.items()}
    events: tuple[Event, ...] = costs(first.events, second.events)
    return replace(first, events=events, values=values, blocks=costs(first.blocks, second.blocks))


@dataclass
class _Line:
    """Values ``share`` of the way from the first of two to the second."""

    share: float
    _known: dict[tuple[int, int], tuple[Operation, ...]] = field(default_factory=dict)

    def __call__(self, x: float, y: float) -> float:
        return x + (y - x) * self.share

    def between(self, x: Any, y: Any) -> Any:
        """``x`` with its growing numbers moved: whole ones stay whole, and counts of an operation at least 1."""
        if type(x) is not type(y):
            raise Unlike
        found = {name: self(getattr(x, name), getattr(y, name)) for name in GROWING[type(x)]}
        if isinstance(x, EventCost | StorageUse):
            return replace(x, **{name: max(0, round(number)) for name, number in found.items()})
        whole = {name: max(1, round(number)) for name, number in found.items() if name != "bytes"}
        return replace(x, **(found | whole))

    def value(self, x: Value, y: Value) -> Value:
        if len(x.shape) != len(y.shape):
            raise Unlike
        shape = tuple(round(self(p, q)) for p, q in zip(x.shape, y.shape, strict=True))
        return replace(x, shape=shape, bytes=round(self(x.bytes, y.bytes)))

    def cost(self, x: EventCost, y: EventCost) -> EventCost:
        parts = {name: self.operations(getattr(x, name), getattr(y, name)) for name in ("forward", "backward")}
        return replace(self.between(x, y), uses=self.each(x.uses, y.uses), again=(), **parts)

    def each(self, xs: tuple[Any, ...], ys: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(xs) != len(ys):
            raise Unlike
        return tuple(map(self.between, xs, ys))

    def operations(self, xs: tuple[Operation, ...], ys: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """Events that share what they list share it afterwards, too."""
        key = (id(xs), id(ys))
        if key not in self._known:
            self._known[key] = self.each(xs, ys)
        return self._known[key]
