"""Who may go on, and on which batch: the decisions of a server, as plain values.

``Tickets`` number the batches. A worker works on the batch of its ticket; what it took and did not finish, because it
died, is given out again: so every batch is worked on once, by whoever is free.

``Clocks`` count each worker's own steps. Under a bound of k a worker that is k steps ahead of the slowest at work
waits: so it never has done more than k steps more. Of w workers a gradient is then at most 2k(w-1) updates late.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Tickets:
    total: int | None = None
    """Batches in all; None: as many as are asked for."""
    next: int = 0
    returned: list[int] = field(default_factory=list)
    out: dict[int, int] = field(default_factory=dict)
    """By worker: what it works on."""

    def take(self, worker: int) -> int | None:
        """The next batch for ``worker``; None: nothing is left to take, at least for now. Asked again before it is
        done, the same."""
        if worker in self.out:
            return self.out[worker]
        if self.returned:
            self.returned.sort()
            ticket = self.returned.pop(0)
        elif self.total is None or self.next < self.total:
            ticket, self.next = self.next, self.next + 1
        else:
            return None
        self.out[worker] = ticket
        return ticket

    def done(self, worker: int) -> None:
        self.out.pop(worker, None)

    def give_back(self, worker: int) -> None:
        if worker in self.out:
            self.returned.append(self.out.pop(worker))

    def close(self) -> None:
        """Give out no more."""
        self.total, self.returned = self.next, []

    @property
    def finished(self) -> bool:
        """Nothing left to take, and nothing under way."""
        return self.total is not None and self.next >= self.total and not self.returned and not self.out

    def facts(self) -> dict[str, object]:
        return {"total": self.total, "next": self.next, "returned": sorted([*self.returned, *self.out.values()])}

    @classmethod
    def after(cls, first: int, applied: Collection[int], total: int | None) -> "Tickets":
        """From ``first`` on, without those that are ``applied``."""
        upto = max(applied, default=first - 1) + 1
        return cls(total, upto, [ticket for ticket in range(first, upto) if ticket not in applied])

    @classmethod
    def of(cls, facts: dict) -> "Tickets":
        return cls(facts["total"], facts["next"], list(facts["returned"]))


@dataclass
class Clocks:
    bound: float = math.inf
    steps: dict[int, int] = field(default_factory=dict)
    """By worker at work."""

    def join(self, worker: int) -> None:
        """Start beside the slowest: a worker that comes late holds nobody up for what it missed."""
        self.steps[worker] = min(self.steps.values(), default=0)

    def leave(self, worker: int) -> None:
        self.steps.pop(worker, None)

    def advance(self, worker: int) -> None:
        if worker in self.steps:
            self.steps[worker] += 1

    def may_go(self, worker: int) -> bool:
        return worker not in self.steps or self.steps[worker] - min(self.steps.values()) < self.bound
