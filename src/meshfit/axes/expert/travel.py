"""Rows on their way to experts that other ranks hold, and back.

Every rank first says how many rows it has for each expert (one small all_gather); then rows go to their experts
(all_to_all, uneven), and what these make of them comes back the same way. Backward goes both ways again. All ranks take
part each time, also those with no row to send or to take: what a rank gets depends on an anchor that needs a gradient,
so autograd comes by on all of them.

    traffic   of R rows of width w, a call: all_to_all of Rw there and Rw back, in forward and again in backward
    waits     the host must know how many rows come before memory for them can be taken. Where the router's choices are
              on a GPU it waits for the counts of all ranks, once a call; meanwhile the device puts the rows in order
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshfit.axes.data import batchnorm
from meshfit.comm.collectives import all_to_all, send_rows
from meshfit.comm.group import Group
from meshfit.errors import RankError
from meshfit.event_detail import in_detail
from meshfit.events import Events
from meshfit.torch_private.autograd import in_backward
from meshfit.transfer import HostCopy, upload

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEADER = 4  # which mixture, whether its samples count, dtype and width of rows; then rows for each expert, and calls


class Load:
    """How many rows each expert got, of the samples of one copy of the experts, in steps whose events are kept in
    detail. ``tells``: whether this rank writes."""

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
        """At the end of a step: the rows of each expert, by mixture; and those of the busiest, over their mean."""
        rows, self._rows = self._rows, {}
        if not rows or not events.kept or not in_detail(events.step):
            return
        events.instant("expert_load", rows={self.paths[i]: each for i, each in sorted(rows.items())})
        busiest = [max(each) * len(each) / sum(each) for each in rows.values() if sum(each)]
        if busiest:
            events.scalar("busiest_expert", max(busiest))


class Travel:
    """The ways of one mixture's rows. ``number``: which of the model's it is; ``share``: experts of each rank."""

    def __init__(self, group: Group, number: int, count: int, load: Load | None = None):
        self.group, self.number, self.count, self.load = group, number, count, load
        self.share = count // group.size
        self.own = range(group.rank * self.share, (group.rank + 1) * self.share)
        """Experts that are here."""
        self._anchor = torch.empty(0, requires_grad=True)

    def announce(self, like: Tensor, counts: Tensor) -> Callable[[Tensor, Callable[[], None]], "Journey"]:
        """Tell the others how many rows there are for each expert; ``counts`` are on the device. ``like``: the rows.

        Returns what then sends the rows, which lie by expert; behind those that have an expert others may lie. The
        host waits there for the counts of all ranks: what is given to the device before that runs meanwhile. What it
        takes beside the rows is called while they are on their way."""
        every = self.group.all_gather(torch.cat([upload(self._header(like), counts.device), counts]))
        coming = HostCopy(every)

        def send(rows: Tensor, meanwhile: Callable[[], None]) -> Journey:
            numbers = coming.tolist()
            self._kind_of_rows(numbers)
            counts = [theirs[HEADER:] for theirs in numbers]
            sent = sum(counts[self.group.rank])
            own = every[:, HEADER + self.own.start : HEADER + self.own.stop]
            return Journey(self, rows if sent == len(rows) else rows[:sent], counts, counts, own, meanwhile)

        return send

    def meet(
        self, rows: Tensor | None, counts: Sequence[int], calls: Sequence[int], device: torch.device
    ) -> "Journey | None":
        """``rows`` lie by expert, ``counts`` for each, which the host knows. None: there is nothing to be sent."""
        every = self.group.exchange([*self._header(rows), *counts, *calls])
        kind = self._kind_of_rows(every)
        if kind is None:
            return None
        if rows is None:
            rows = torch.empty(0, kind[1], dtype=DTYPES[kind[0]], device=device)
        numbers = [theirs[HEADER:] for theirs in every]
        return Journey(self, rows, [n[: self.count] for n in numbers], [n[self.count :] for n in numbers])

    def _header(self, rows: Tensor | None) -> tuple[int, ...]:
        kind = (-1, -1) if rows is None else (DTYPES.index(rows.dtype), rows.shape[1])
        return self.number, int(batchnorm.counted()), *kind

    def _kind_of_rows(self, every: list[list[int]]) -> tuple[int, int] | None:
        """Dtype and width of the rows of all ranks; None where nobody has any."""
        if any(theirs[0] != self.number for theirs in every):
            raise RankError(
                "the ranks called the model's mixtures in different orders, so their tokens were mixed up",
                "something that differs between ranks (its samples, a random number) decides which blocks run",
                "data= in place of expert= would work",
            )
        kinds = {(theirs[2], theirs[3]) for theirs in every if theirs[2] >= 0}
        if len(kinds) > 1:
            raise RankError("the ranks send experts rows of different widths or precisions", f"{sorted(kinds)}")
        if kinds and self.load is not None and torch.is_grad_enabled():
            counted = [theirs[HEADER : HEADER + self.count] for theirs in every if theirs[1]]
            self.load.add(self.number, counted)
        return kinds.pop() if kinds else None


class Journey:
    """The rows of one call."""

    def __init__(
        self,
        travel: Travel,
        rows: Tensor,
        counts: list[list[int]],
        calls: list[list[int]],
        own_counts: Tensor | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        group, own, share = travel.group, travel.own, travel.share
        self._group, mine = group, counts[group.rank]
        self._sent = [sum(mine[r * share : (r + 1) * share]) for r in range(group.size)]
        self._taken = [sum(theirs[own.start : own.stop]) for theirs in counts]
        self.counts = [theirs[own.start : own.stop] for theirs in counts]
        """Rows that came, by the rank that they are from and the expert they are for; in this order they lie."""
        self._own_counts = own_counts
        """The same on the device."""
        self.called = [any(theirs[expert] for theirs in calls) for expert in own]
        """Whether anyone called each of the experts that are here, if maybe with no row."""
        arrive = send_rows(rows, self._sent, self._taken, group, travel._anchor)
        meanwhile()
        self.arrived = arrive()

    def experts(self) -> Tensor:
        """For each row that came, which of the experts that are here it is for."""
        device, counts = self.arrived.device, self._own_counts
        if counts is None:
            counts = upload([n for each in self.counts for n in each], device)
        local = torch.arange(len(self.called), device=device).repeat(len(self.counts))
        return local.repeat_interleave(counts.flatten(), output_size=len(self.arrived))

    def by_expert_order(self) -> tuple[Tensor, Tensor]:
        """Where each of the rows sorted by expert lies among those that came, and the inverse."""
        order = self.experts().sort(stable=True)[1]
        return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    def by_expert(self) -> list[Tensor]:
        """The rows that came for each of the experts that are here."""
        parts = self.arrived.split([n for each in self.counts for n in each])
        share = len(self.called)
        return [torch.cat(parts[expert::share]) for expert in range(share)]

    def in_order(self, made: list[Tensor]) -> Tensor:
        """What ``by_expert`` undoes."""
        pieces = [rows.split([theirs[i] for theirs in self.counts]) for i, rows in enumerate(made)]
        return torch.cat([each[rank] for rank in range(len(self.counts)) for each in pieces])

    def back(self, made: Tensor) -> Tensor:
        """``made``, a row for each that came, to where they came from."""
        return all_to_all(made, self._taken, self._sent, self._group, self.arrived[:0])
