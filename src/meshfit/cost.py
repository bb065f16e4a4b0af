"""What a strategy costs on one rank: bytes held, collectives one by one, arithmetic done twice.

Each strategy's ``cost`` maps the trace of what a rank runs to the trace of what it runs under that strategy (smaller
parameters, fewer kept activations), and says what it adds beside. So costs compose in the order of ``apply``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """``count`` calls of one collective a step (in the work of a pipeline's stage: a microbatch), or copies between
    device and host, or messages to a model server."""

    name: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send; host_to_device or device_to_host; push,
    pull or meet."""

    bytes: float
    """Of the tensor handed to one call: the larger side of a gather or scatter."""

    degree: int = 1
    """Ranks that call it together."""

    stride: int = 1
    """Ranks from one member of the group to the next: what decides which link joins them."""

    count: float = 1
    """Below 1 for what is done every few steps."""

    axis: str = ""
    dtype: str = "bfloat16"
    phase: str = "forward"
    """forward, backward or step: after the last backward."""

    copies: int = 1
    """all_to_all: members that each row goes to. Those of one node get it in one message over the network."""

    hidden: str | bool = ""
    """What it runs beside, in words ("backward", "products"); empty: it is waited for."""

    once: bool = False
    """In a step, not in each microbatch: a hidden one has the last backward, or the first forward, to run beside."""


Counted = TypeVar("Counted")


def tallied(some: Iterable[Counted]) -> tuple[Counted, ...]:
    """Equal ones as one, with the sum of their ``count``; none of which there is none."""
    counts: dict[Any, float] = {}
    for each in some:
        one: Any = replace(each, count=1)  # type: ignore[type-var]
        counts[one] = counts.get(one, 0) + each.count  # type: ignore[attr-defined]
    return tuple(replace(one, count=count) for one, count in counts.items() if count)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs add up as strategies compose."""

    held: dict[str, int] = field(default_factory=dict)
    """Bytes on the device, by kind: weights, gradients, optimizer, activations, gathered."""

    passed: int = 0
    """Bytes beside, when there are most: gradients of activations on their way, less those of weights that are yet to
    come."""

    host: dict[str, int] = field(default_factory=dict)
    """Bytes in host memory instead, by the same kinds."""

    collectives: tuple[CollectiveCall, ...] = ()
    """Of a step, one by one."""

    flops: int = 0
    """Arithmetic beside that of the model's own forward and backward, a step."""

    @property
    def calls(self) -> dict[str, int]:
        """How many of ``collectives`` there are in a step, by name."""
        return self._sums(lambda call: call.count)

    @property
    def moved(self) -> dict[str, int]:
        """Bytes of the tensors handed to those a step, by name."""
        return {name: size for name, size in self._sums(lambda call: call.count * call.bytes).items() if size}

    def _sums(self, of: Callable[[CollectiveCall], float]) -> dict[str, int]:
        found: dict[str, float] = {}
        for call in self.collectives:
            found[call.name] = found.get(call.name, 0) + of(call)
        return {name: round(total) for name, total in found.items()}

    @property
    def most(self) -> int:
        """Bytes on the device, when there are most."""
        return sum(self.held.values()) + self.passed

    def __add__(self, other: "Cost") -> "Cost":
        def add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}

        return Cost(
            held=add(self.held, other.held),
            passed=self.passed + other.passed,
            host=add(self.host, other.host),
            collectives=self.collectives + other.collectives,
            flops=self.flops + other.flops,
        )
