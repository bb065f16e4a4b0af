"""How many rows each expert got, in the steps that events tell of in detail."""

from collections.abc import Sequence

from meshfit.event_detail import in_detail
from meshfit.events import Events
from meshfit.torch_private.autograd import in_backward


class Load:
    """Rows by mixture and expert, of the samples of one copy of the experts. ``tells``: whether this rank writes."""

    def __init__(self, paths: Sequence[str], tells: bool):
        self.paths, self.tells = paths, tells
        self._rows: dict[int, list[int]] = {}

    def add(self, mixture: int, counts: Sequence[Sequence[int]]) -> None:
        """``counts`` of each rank; what is computed again was counted already."""
        if not self.tells or in_backward():
            return
        before = [self._rows[mixture]] if mixture in self._rows else []
        self._rows[mixture] = [sum(each) for each in zip(*before, *counts, strict=True)]

    def tell(self, events: Events) -> None:
        """At the end of a step: the rows of each expert, and how many times the mean the busiest of a mixture got."""
        rows, self._rows = self._rows, {}
        if not rows or not events.kept or not in_detail(events.step):
            return
        events.instant("expert_load", rows={self.paths[i]: each for i, each in sorted(rows.items())})
        busiest = [max(each) * len(each) / sum(each) for each in rows.values() if sum(each)]
        if busiest:
            events.scalar("busiest_expert", max(busiest))
