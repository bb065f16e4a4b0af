"""What a strategy costs on one rank: bytes held, bytes moved, collectives called, arithmetic done twice.

Each strategy's ``cost`` maps the trace of what a rank runs to the trace of what it runs under that strategy (smaller
parameters, fewer kept activations), and says what it adds beside. So costs compose in the order of ``apply``.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs add up as strategies compose."""

    held: dict[str, int] = field(default_factory=dict)
    """Bytes on the device, by kind: weights, gradients, optimizer, activations, gathered."""

    host: dict[str, int] = field(default_factory=dict)
    """Bytes in host memory instead, by the same kinds."""

    calls: dict[str, int] = field(default_factory=dict)
    """Collectives (and copies between device and host) called a step, by name."""

    moved: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors handed to those a step: the larger side of a gather or scatter."""

    flops: int = 0
    """Arithmetic beside that of the model's own forward and backward, a step."""

    def __add__(self, other: "Cost") -> "Cost":
        def add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}

        return Cost(
            held=add(self.held, other.held),
            host=add(self.host, other.host),
            calls=add(self.calls, other.calls),
            moved=add(self.moved, other.moved),
            flops=self.flops + other.flops,
        )
