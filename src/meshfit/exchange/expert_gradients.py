"""Gradients of a model some of whose parameters (experts) lie over the ranks that share a batch: those are complete for
all their samples already, and summed only over ranks that hold the same ones.

Their sums start when all of backward is done, in one order on all ranks: which experts got a row, and when, differs.

    traffic   the experts' gradients once over the ranks that hold the same; the rest as ``rest`` has it
"""

from torch import Tensor, nn

from meshfit.axes.expert.load import Load
from meshfit.events import current
from meshfit.exchange.allreduce import AllReduce, StepScalars
from meshfit.exchange.scatter import Scatter


class Apart:
    """``rest`` sums over all that share the batch, ``experts`` over those with the same experts."""

    def __init__(self, rest: AllReduce | Scatter, experts: AllReduce, load: Load):
        self.rest, self.experts, self.load = rest, experts, load
        self.norm: Tensor | None = None
        """Not known here: see ``Across``."""

    @property
    def degree(self) -> int:
        """Ranks that share a batch."""
        return self.rest.degree

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.rest.parameters, *self.experts.parameters]

    def arm(self, loss: Tensor | float, count: Tensor | float, *, stop: bool, broken: Tensor | bool) -> None:
        self.rest.arm(loss, count, stop=stop, broken=broken)

    def finish(self) -> StepScalars:
        scalars = self.rest.finish()
        self.experts.arm(0.0, 0.0, stop=False, broken=False)
        self.experts.finish()
        self.load.tell(current())
        return scalars

    @property
    def gradients(self) -> list[Tensor]:
        return [*self.rest.gradients, *self.experts.gradients]

    def clear(self) -> None:
        self.rest.clear()
        self.experts.clear()

    def remove(self) -> None:
        self.rest.remove()
        self.experts.remove()
