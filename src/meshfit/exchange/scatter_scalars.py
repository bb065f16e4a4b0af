"""What the ranks of a sharded model tell each other in each step, summed in one small all_reduce:

loss, count, stop, squared norm
broken     a slot a rank: its loss is not finite
order      a slot a rank: a number for the order in which its gradients were complete
values     what a step logs
reached    a slot a parameter: whether a backward reached it
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.axes.shard.cost import STEP_SCALARS
from meshfit.events import current
from meshfit.exchange.protocol import StepScalars


class ScatterScalars:
    """``values``: how many numbers are summed beside the loss."""

    def __init__(self, world: dist.ProcessGroup | None, device: torch.device, *, values: int, parameters: int):
        self.world = world
        self.degree = 1 if world is None else dist.get_world_size(world)
        self.rank = 0 if world is None else dist.get_rank(world)
        sizes = [STEP_SCALARS, self.degree, self.degree, values, parameters]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._scalars, self._broken, self._orders, self._values, self._reached = self._numbers.split(sizes)

    def put(self, own: StepScalars) -> None:
        """Of this rank."""
        self._numbers.zero_()
        (broken,) = own.broken
        for slot, number in zip(self._scalars, (own.loss, own.count, own.stop), strict=False):
            slot.fill_(number)  # an assignment of a number would be waited for
        self._broken[self.rank].fill_(broken)
        for slot, number in zip(self._values, own.values, strict=False):
            slot.fill_(number)

    def sum(self, square: Tensor, order: Sequence[int], behind: Sequence[int]) -> None:
        """Over all ranks. ``order``: of units, as their gradients were complete; ``behind``: the parameters that this
        rank did not reach."""
        self._scalars[3] = square.to(self._numbers.device)
        self._orders[self.rank].fill_(_digest(order))
        self._reached.fill_(1.0)
        if behind:
            self._reached[torch.tensor(behind, device=self._numbers.device)] = 0.0
        if self.world is not None:
            current().moved("all_reduce", self._numbers.nbytes)
            dist.all_reduce(self._numbers, group=self.world)

    @property
    def norm(self) -> Tensor:
        return self._scalars[3].sqrt()

    @property
    def one_order(self) -> bool:
        """Whether gradients were complete in one order on all ranks. The host waits."""
        return len(set(self._orders.tolist())) == 1

    def reached(self) -> list[float]:
        """Which parameters any rank reached. The host waits."""
        return self._reached.tolist()

    @property
    def total(self) -> StepScalars:
        said = lambda part: part.tolist() if part.is_cpu else part.unbind()
        loss, count, stop, _ = said(self._scalars)
        return StepScalars(loss, count, stop, said(self._broken), said(self._values))


def _digest(order: Sequence[int]) -> int:
    number = 0
    for index in order:
        number = (number * 31 + index + 1) % 65521
    return number
