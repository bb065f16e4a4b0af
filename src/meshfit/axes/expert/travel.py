"""Rows on their way to experts that other ranks hold, and back.

Every rank first says how many rows it has for each expert (one small all_gather); then rows go to their experts
(all_to_all, uneven), and what these make of them comes back the same way. Backward goes both ways again. All ranks take
part each time, also those with no row to send or to take: what a rank gets depends on an anchor that needs a gradient,
so autograd comes by on all of them.

    traffic   of R rows of width w, a call: all_to_all of Rw there and Rw back, in forward and again in backward
"""

import torch
from torch import Tensor

from meshfit.axes.data import batchnorm
from meshfit.axes.expert.load import Load
from meshfit.comm.collectives import all_to_all
from meshfit.comm.group import Group
from meshfit.errors import RankError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEADER = 4  # which mixture, whether its samples count, dtype and width of rows; then rows for each expert, and calls


class Travel:
    """The ways of one mixture's rows. ``number``: which of the model's it is; ``share``: experts of each rank."""

    def __init__(self, group: Group, number: int, count: int, load: Load | None = None):
        self.group, self.number, self.count, self.load = group, number, count, load
        self.share = count // group.size
        self.own = range(group.rank * self.share, (group.rank + 1) * self.share)
        """Experts that are here."""
        self._anchor = torch.empty(0, requires_grad=True)

    def meet(self, rows: Tensor | None, counts: Tensor, calls: Tensor) -> "Journey | None":
        """``rows`` lie by expert, ``counts`` for each. None: there is nothing to be sent anywhere."""
        said = [self.number, int(batchnorm.counted()), -1, -1]
        if rows is not None:
            said[2:] = DTYPES.index(rows.dtype), rows.shape[1]
        header = torch.tensor(said, device=counts.device)
        every = self.group.exchange(torch.cat([header, counts, calls]))
        if any(theirs[0] != self.number for theirs in every):
            raise RankError(
                "the ranks called the model's mixtures in different orders, so their tokens were mixed up",
                "something that differs between ranks (its samples, a random number) decides which blocks run",
                "data= in place of expert= would work",
            )
        kinds = {(theirs[2], theirs[3]) for theirs in every if theirs[2] >= 0}
        if not kinds:
            return None
        if len(kinds) > 1:
            raise RankError("the ranks send experts rows of different widths or precisions", f"{sorted(kinds)}")
        numbers = [theirs[HEADER:] for theirs in every]
        if self.load is not None and torch.is_grad_enabled():
            self.load.add(self.number, [n[: self.count] for n, theirs in zip(numbers, every, strict=True) if theirs[1]])
        ((code, width),) = kinds
        if rows is None:
            rows = torch.empty(0, width, dtype=DTYPES[code], device=counts.device)
        return Journey(self, rows, [n[: self.count] for n in numbers], [n[self.count :] for n in numbers])


class Journey:
    """The rows of one call."""

    def __init__(self, travel: Travel, rows: Tensor, counts: list[list[int]], calls: list[list[int]]):
        group, own, share = travel.group, travel.own, travel.share
        self._group, mine = group, counts[group.rank]
        self._sent = [sum(mine[r * share : (r + 1) * share]) for r in range(group.size)]
        self._taken = [sum(theirs[own.start : own.stop]) for theirs in counts]
        self.counts = [theirs[own.start : own.stop] for theirs in counts]
        """Rows that came, by the rank that they are from and the expert they are for; in this order they lie."""
        self.called = [any(theirs[expert] for theirs in calls) for expert in own]
        """Whether anyone called each of the experts that are here, if maybe with no row."""
        self.arrived = all_to_all(rows, self._sent, self._taken, group, travel._anchor)

    def experts(self) -> Tensor:
        """For each row that came, which of the experts that are here it is for."""
        device, share = self.arrived.device, len(self.called)
        local = torch.arange(share, device=device).repeat(len(self.counts))
        return local.repeat_interleave(torch.tensor([n for each in self.counts for n in each], device=device))

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
