"""Gradients of a model that is spread over ranks which work on the same samples: its operations, modules or experts.

``inner`` sums gradients over the ranks that hold the same part of the model, and differ in their samples. What is left
are sums over the parts: of gradients that a rank has only some terms of (a norm's weight used by each rank for its own
channels; an embedding tied to the head, both ends of a pipeline), and of a few numbers that every rank must know before
it steps: the loss, which the last stage alone knows; the norm, in which each element counts once; whether to stop.

    traffic   the gradients of such parameters, once a step; one small all_reduce over all ranks
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.axis import Applied
from meshfit.axes.partition import Partition
from meshfit.comm.group import destroy, groups
from meshfit.cost import CollectiveCall, Cost
from meshfit.events import current
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.scatter import Scatter
from meshfit.exchange.separate import Separate
from meshfit.exchange.update import total_norm
from meshfit.transfer import together

STEP_SCALARS = 4  # squared norm, stop, loss, count; then a slot a share for broken losses, one a shared parameter


class Across:
    """``inner`` sums over samples, ``layers`` say what else there is to sum. ``loss_replicas``: ranks that know the
    loss, for each share of a batch."""

    summed = True

    def __init__(
        self,
        inner: AllReduce | Scatter | Separate,
        layers: Sequence[Applied],
        model: nn.Module,
        device: torch.device,
        *,
        loss_replicas: int,
    ):
        self.inner, self.device, self.loss_replicas = inner, device, loss_replicas
        acting = [layer for layer in layers if type(layer).after_backward is not Applied.after_backward]
        self._after_backward = [layer.after_backward for layer in acting]
        self.norm: Tensor | None = None
        """Of all gradients together, after ``finish``."""
        named = dict(model.named_parameters())
        partitions = [layer for layer in layers if isinstance(layer, Partition)]
        shared = [name for layer in layers for name in layer.partial]
        shared += [name for layer in partitions for name in layer.tied]
        self._shared = [named.get(name) for name in dict.fromkeys(shared)]
        """Parameters whose gradients are sums over ranks, in the same order on all; None where others hold them."""
        self._tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._lines: list[dist.ProcessGroup] = []
        for layer in partitions:
            assert layer.group is not None
            lines = _lines(layer.group, layer.tied.values())
            self._lines += lines.values()
            self._tied += [(named[name], lines[ranks]) for name, ranks in layer.tied.items() if name in named]
        self._weights = {p: prod(layer.weight(p) for layer in layers) for p in inner.parameters}
        """How much of each parameter's squared norm counts on this rank."""
        self._added: list[Tensor] = []
        """Gradients that other ranks have terms of, and this one has not."""

    @property
    def degree(self) -> int:
        """Ranks that share a batch."""
        return self.inner.degree

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.inner.parameters

    def arm(self, own: StepScalars) -> None:
        """The next backward is the last of this step. Ranks that do not know the loss say zero."""
        self.inner.arm(own)

    def finish(self) -> StepScalars:
        """Wait until every gradient, and the scalars of the step, are summed."""
        scalars = self.inner.finish()
        reached = [p is not None and p.grad is not None for p in self._shared]
        for p in self._shared:  # one that this rank did not reach adds nothing to what the others have
            if p is not None and p.requires_grad and p.numel() and p.grad is None:
                p.grad = torch.zeros_like(p)
        for sum_partial in self._after_backward:
            sum_partial()
        for p, line in self._tied:
            if p.grad is not None:
                summed = p.grad.contiguous()
                dist.all_reduce(summed, group=line)
                if summed is not p.grad:
                    p.grad.copy_(summed)
        loss_replicas = self.degree * self.loss_replicas
        summed = [each / loss_replicas for each in (scalars.loss, scalars.count, *scalars.values)]
        known = [*summed, *scalars.broken]
        numbers = together([self._square(), scalars.stop, *known, *reached], self.device, torch.float64)
        current().moved("all_reduce", numbers.nbytes)
        dist.all_reduce(numbers)
        self._drop_unreached(reached, numbers[2 + len(known) :])
        gradients = self.gradients
        self.norm = numbers[0].sqrt().to(gradients[0].device if gradients else self.device)
        told = numbers[: 2 + len(known)]
        _, stop, loss, count, *rest = told.tolist() if told.is_cpu else told.unbind()
        values = len(scalars.values)
        return StepScalars(loss, count, stop, rest[values:], rest[:values])

    def _drop_unreached(self, reached: list[bool], anywhere: Tensor) -> None:
        """Where no rank reached a parameter it has no gradient, as on one device."""
        self._added = []
        shared = [(p, i) for i, p in enumerate(self._shared) if p is not None and p.grad is not None and not reached[i]]
        reached_anywhere = anywhere.tolist() if shared else []  # the host waits: see [Note: unused parameters]
        for p, i in shared:
            assert p.grad is not None
            if reached_anywhere[i]:
                self._added.append(p.grad)
            else:
                p.grad = None

    def _square(self) -> Tensor:
        """This rank's part of the squared norm: elements that several ranks hold count in part on each."""
        kinds: dict[float, list[Tensor]] = defaultdict(list)
        for p, weight in self._weights.items():
            if p.grad is not None:
                kinds[weight].append(p.grad)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for weight, grads in kinds.items():
            total += weight * total_norm(grads).double().square().to(self.device)
        return total

    @property
    def gradients(self) -> list[Tensor]:
        """Tensors that together hold every gradient of this rank once; they may be scaled in place."""
        return [*self.inner.gradients, *self._added]

    def clear(self) -> None:
        """Forget the gradients, ready for the next step; the weights have changed."""
        self._added = []
        self.inner.clear()

    def remove(self) -> None:
        self.inner.remove()
        destroy(self._lines)
        self._lines = []


def _lines(line: dist.ProcessGroup, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of ranks of ``line`` that share a parameter, where this rank is one of them."""
    world, own = dist.get_process_group_ranks(line), dist.get_rank(line)
    named = {members: tuple(sorted(world[r] for r in members)) for members in wanted if own in members}
    made = groups(named.values())
    return {members: made[named[members]] for members in sorted(named, key=lambda members: named[members])}


def cost(shared: int, shares: int) -> Cost:
    """Of what ranks say to each other beside gradients, a step: for ``shared`` parameters, and ``shares`` of a batch.
    What the gradients of those take: see ``tensor_cost`` and ``Pipeline.cost``."""
    said = CollectiveCall(
        "all_reduce", 8 * (STEP_SCALARS + shares + shared), axis="step", dtype="float64", phase="step", once=True
    )
    return Cost(collectives=(said,))
