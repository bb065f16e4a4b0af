"""What a strategy costs on one rank: bytes held, bytes moved, collectives called."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs add up as strategies compose."""

    held: dict[str, int] = field(default_factory=dict)
    """Bytes at rest, by kind: weights, gradients, ..."""

    calls: dict[str, int] = field(default_factory=dict)
    """Collectives called a step, by name."""

    moved: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors handed to those collectives a step."""

    def __add__(self, other: "Cost") -> "Cost":
        def add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}

        return Cost(
            held=add(self.held, other.held),
            calls=add(self.calls, other.calls),
            moved=add(self.moved, other.moved),
        )
