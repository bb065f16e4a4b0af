"""Gradients of a model some of whose parameters are complete for the samples of several ranks already, as those of
experts are: they are summed over fewer ranks than the rest.

Their sums start when all of backward is done, in one order on all ranks: which experts got a row, and when, differs.

    traffic   those gradients once over the ranks that hold the same parameters; the rest as ``rest`` has it
"""

from torch import Tensor, nn

from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.scatter import Scatter


class Separate:
    """``rest`` sums over all that share the batch, ``others`` each over a group of their own."""

    def __init__(self, rest: AllReduce | Scatter, others: list[AllReduce]):
        self.rest, self.others = rest, others
        self.norm: Tensor | None = None
        """Not known here: see ``Across``."""

    @property
    def degree(self) -> int:
        """Ranks that share a batch."""
        return self.rest.degree

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.rest.parameters, *(p for other in self.others for p in other.parameters)]

    def arm(self, own: StepScalars) -> None:
        self.rest.arm(own)

    def finish(self) -> StepScalars:
        scalars = self.rest.finish()
        for other in self.others:
            other.arm(StepScalars())
            other.finish()
        return scalars

    @property
    def gradients(self) -> list[Tensor]:
        return [*self.rest.gradients, *(grad for other in self.others for grad in other.gradients)]

    def clear(self) -> None:
        for each in (self.rest, *self.others):
            each.clear()

    def remove(self) -> None:
        for each in (self.rest, *self.others):
            each.remove()
