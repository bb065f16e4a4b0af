"""Gradients of a model that is spread over ranks which work on the same samples: its operations, modules or experts.

``inner`` sums gradients over the ranks that hold the same part of the model, and differ in their samples. What is left
are sums over the parts: of gradients that a rank has only some terms of (a norm's weight used by each rank for its own
channels; an embedding tied to the head, both ends of a pipeline), and of a few numbers that every rank must know before
it steps: the loss, which the last stage alone knows; the norm, in which each element counts once; whether to stop.
Gradients of experts, which have seen the samples of several ranks, are summed over fewer ranks than the rest.

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
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.scatter import Scatter
from meshfit.exchange.update import STEP_SCALARS, StepScalars, sum_scalars, total_norm


class Across:
    """``inner`` sums over samples, ``experts`` those parameters that are complete for the samples of several ranks
    already; ``layers`` say what else there is to sum. ``loss_replicas``: ranks that know the loss, for each share of a
    batch."""

    summed = True

    def __init__(
        self,
        inner: AllReduce | Scatter,
        layers: Sequence[Applied],
        model: nn.Module,
        device: torch.device,
        *,
        experts: Sequence[AllReduce] = (),
        loss_replicas: int,
    ):
        self.inner, self.experts, self.device, self.loss_replicas = inner, experts, device, loss_replicas
        self.degree = inner.degree
        self.parameters = [p for each in (inner, *experts) for p in each.parameters]
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
        self._tied_groups: list[dist.ProcessGroup] = []
        for layer in partitions:
            assert layer.group is not None
            made = _groups_within(layer.group, layer.tied.values())
            self._tied_groups += made.values()
            self._tied += [(named[name], made[ranks]) for name, ranks in layer.tied.items() if name in named]
        self._weights = {p: prod(layer.weight(p) for layer in layers) for p in self.parameters}
        """How much of each parameter's squared norm counts on this rank."""
        self._added: list[Tensor] = []
        """Gradients that other ranks have terms of, and this one has not."""

    def arm(self, own: StepScalars) -> None:
        """The next backward is the last of this step. Ranks that do not know the loss say zero."""
        self.inner.arm(own)

    def finish(self) -> StepScalars:
        """Wait until every gradient, and the scalars of the step, are summed."""
        scalars = self.inner.finish()
        for each in self.experts:  # after all of backward, in one order: which experts got a row, and when, differs
            each.arm(StepScalars())
            each.finish()
        reached = [p is not None and p.grad is not None for p in self._shared]
        for p in self._shared:  # one that this rank did not reach adds nothing to what the others have
            if p is not None and p.requires_grad and p.numel() and p.grad is None:
                p.grad = torch.zeros_like(p)
        for sum_partial in self._after_backward:
            sum_partial()
        for p, group in self._tied:
            if p.grad is not None:
                summed = p.grad.contiguous()
                dist.all_reduce(summed, group=group)
                if summed is not p.grad:
                    p.grad.copy_(summed)
        replicas = self.degree * self.loss_replicas
        loss, count, *values = (each / replicas for each in (scalars.loss, scalars.count, *scalars.values))
        own = StepScalars(loss, count, scalars.stop, scalars.broken, values)
        scalars, others = sum_scalars(own, [self._square(), *reached], dist.group.WORLD, self.device)
        self._drop_unreached(reached, others[1:])
        gradients = self.gradients
        self.norm = others[0].sqrt().to(gradients[0].device if gradients else self.device)
        return scalars

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
        return [grad for each in (self.inner, *self.experts) for grad in each.gradients] + self._added

    def clear(self) -> None:
        """Forget the gradients, ready for the next step; the weights have changed."""
        self._added = []
        for each in (self.inner, *self.experts):
            each.clear()

    def remove(self) -> None:
        for each in (self.inner, *self.experts):
            each.remove()
        destroy(self._tied_groups)
        self._tied_groups = []


def _groups_within(
    group: dist.ProcessGroup, wanted: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of ranks of ``group`` that share a parameter, where this rank is one of them."""
    world, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    named = {members: tuple(sorted(world[r] for r in members)) for members in wanted if own in members}
    made = groups(named.values())
    return {members: made[named[members]] for members in sorted(named, key=lambda members: named[members])}


def cost(shared: int, shares: int) -> Cost:
    """Of what ranks tell each other beside gradients, a step: the scalars with ``shares`` flags, the squared norm, and
    whether each of ``shared`` parameters was reached. The gradients of those: ``tensor_cost`` and ``Pipeline.cost``."""
    size = 8 * (STEP_SCALARS + shares + 1 + shared)
    told = CollectiveCall("all_reduce", size, axis="step", dtype="float64", phase="step", once=True)
    return Cost(collectives=(told,))
