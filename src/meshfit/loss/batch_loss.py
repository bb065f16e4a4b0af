"""A loss of the whole batch, where the batch is cut over ranks or microbatches: contrastive, ranking, over statistics.

Outputs and targets of all parts are gathered, in the order of the samples, and every rank computes the loss of all of
them. Each counts it by its share of the samples; shares add up to one, and backward sums over ranks what came to each
rank's outputs: the gradient of one device. What the loss uses beside outputs and targets needs no care for that reason.

Of several microbatches, all outputs must be there before the first gradient is known. So all run forward twice: once
without a graph, for the outputs; the loss is computed, and its gradient with respect to them kept; then again, each
followed by its backward from there. Random numbers and buffers are put back in between.

    memory    outputs and targets of the whole batch; activations of one microbatch, as ever
    traffic   an all_gather of outputs and targets, an all_reduce of the outputs' gradients
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from meshfit import generators
from meshfit.axes.data import batchnorm
from meshfit.comm.group import Group
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.loss import gather as gathering
from meshfit.loss.objective import LossDenominator, Objective, call, split
from meshfit.plan import Plan
from meshfit.units import size


class Outputs:
    """What a model returns for a batch: takes the place of the objective, where the loss comes after."""

    def __call__(self, model: nn.Module, content: Any) -> Any:
        return call(model, split(content)[0])


@dataclass(frozen=True)
class BatchLoss:
    """``loss`` of the outputs and targets of all who share a batch."""

    loss: Callable[..., Any]
    over: LossDenominator
    group: Group | None
    """The ranks that share the batch; None: this one has all of it."""
    device: torch.device

    @classmethod
    def of(
        cls, objective: Objective | None, over: LossDenominator, group: Group | None, device: torch.device
    ) -> "BatchLoss | None":
        """None where the loss is a mean, or has its rows gathered by itself."""
        if over.kind != "batch" or objective is None or objective.loss is None:
            return None
        return cls(objective.loss, over, group, device)

    def __call__(self, parts: Sequence[tuple[Any, Any, bool]]) -> Any:
        """The loss of all samples; ``parts``: outputs, content and whether it counts, of each microbatch."""
        outputs, targets = [], []
        for made, content, counted in parts:
            with batchnorm.counting(counted):
                outputs.append(self._all_rows(made, self.over.dims))
                targets.append(self._all_rows(split(content)[1], repeat(0)))
        with self._same_draws():
            return self.loss(_joined(outputs, self.over.dims), _joined(targets, repeat(0)))

    def _all_rows(self, content: Any, dims: Iterable[int | None]) -> Any:
        """``content`` with the rows of all ranks in place of this one's; ``dims``: of the samples, by tensor."""
        gather, left = gathering.over(self.group), iter(dims)

        def leaf(x: Any) -> Any:
            dim = next(left)
            if gather is None or dim is None or not isinstance(x, Tensor) or not x.dim():
                return x
            return gather(x.movedim(dim, 0)).movedim(0, dim)

        return tree.map_leaves(leaf, content)

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Within it every rank draws what the first one does; the others' own numbers go on as if nothing had been."""
        if self.group is None or not self.over.draws:
            yield
            return
        own = generators.Generators(self.device)
        state = self.group.all_gather(generators.as_tensor(self.device).to(self.device))
        generators.from_tensor(state[0], self.device)
        try:
            yield
        finally:
            if self.group.rank:
                own.restore()


def _joined(parts: Sequence[Any], dims: Iterable[int | None]) -> Any:
    """The outputs or targets of all microbatches as those of one batch."""
    left = iter(dims)

    def leaf(*each: Any) -> Any:
        dim, first = next(left), each[0]
        if len(each) == 1 or dim is None or not isinstance(first, Tensor) or not first.dim():
            return first
        return torch.cat(each, dim)

    return tree.map_leaves(leaf, *parts)


def leaves_of(made: Any) -> tuple[Any, list[Tensor]]:
    """The same outputs as leaves of a graph of their own, and those of them that get a gradient."""
    held: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        if x.is_floating_point() or x.is_complex():
            held.append(x := x.clone().requires_grad_())
        return x

    return tree.map_leaves(leaf, made), held


def backward_from(made: Any, held: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of the second forward to go backward from, and their gradients as the loss left them in ``held``."""
    floats = [t for t in tree.tensors(made) if t.is_floating_point() or t.is_complex()]
    both = [(t, h) for t, h in zip(floats, held, strict=True) if t.requires_grad]
    return [t for t, _ in both], [torch.zeros_like(h) if h.grad is None else h.grad for _, h in both]


def no_gather(plan: Plan) -> tuple[str, ...]:
    """Why ``meshfit.gather`` does not work where ``plan`` cuts a batch, and what does; empty where it works."""
    if not plan.in_step:
        return f"{_apart(plan)}: each device steps by its own samples", _in_step(plan)
    if plan.microbatches > 1:
        return (
            f"microbatches={plan.microbatches}: when the first is worked on, the rows of the others are not there yet",
            f"{replace(plan, microbatches=1)} works; so does loss=, a function of outputs and targets",
        )
    if plan.partitions_modules:
        return (
            f"{'pipeline' if plan.pipeline > 1 else 'branch'}= runs a recording of the step, cut over ranks",
            f"{plan.without('pipeline', 'branch')} works; so does loss=, a function of outputs and targets",
        )
    if plan.lost != "redo":
        return (
            f"lost={plan.lost} leaves out samples that the others have counted",
            f"{replace(plan, lost='redo')} works",
        )
    return ()


def _apart(plan: Plan) -> str:
    return f"staleness={plan.staleness:g}" if plan.staleness else f"exchange={plan.exchange}"


def _in_step(plan: Plan) -> str:
    return f"{replace(plan, staleness=0, late='none', exchange='allreduce', every=1, overlap=0)} works"


def check(plan: Plan, over: LossDenominator, objective: Objective) -> None:
    """Refuse a loss of the whole batch where ``plan`` cuts the batch and it cannot be computed exactly."""
    if over.gathers and (why := no_gather(plan)):
        raise PlanError(f"{plan}: the loss calls meshfit.gather, which does not work here", *why)
    if over.kind != "batch":
        return
    whole = "plans that leave batches whole take it as it is: no data=, shard=, expert= or microbatches="
    if over.untried:
        raise PlanError(
            f"{plan}: whether this loss is a mean over samples cannot be tried",
            "the model or the loss draws random numbers of NumPy or Python, others for a part than for the whole",
            "draw them with torch, whose draws are followed",
            whole,
        )
    if over.remembers:
        raise PlanError(
            f"{plan}: the loss depends on {over.remembers}, which is kept from one batch to the next",
            "an attribute or variable of Python that depends on the samples: each part of a batch has its own",
            "a buffer of the model (register_buffer) that a sum, mean or extreme updates is that of the whole batch",
            whole,
        )
    if over.mixes and objective.step is None:
        raise PlanError(
            f"{plan}: what the model makes of a sample depends on the others of its batch",
            over.why,
            "a part of a batch comes out otherwise: its own mean, its own first sample, its own longest",
            "statistics over a batch are those of all devices in nn.BatchNorm alone",
            whole,
        )
    headline = f"{plan}: this loss is not a mean over samples, and cannot be put together from parts of a batch"
    weighted = "a mean by weights or a mask is exact as a pair: return (l * w).sum(), w.sum()"
    gather = "gather what it compares: meshfit.gather(features) in step= gives the rows of all devices"
    if objective.step is not None:
        raise PlanError(headline, over.why, weighted, gather, "or give loss=, a function of outputs and targets", whole)
    if objective.loss is None:
        own = "the model computes it itself, so its outputs cannot be gathered before"
        raise PlanError(
            headline,
            over.why,
            own,
            "give loss=, a function of outputs and targets, and they are",
            f"or {gather}",
            whole,
        )
    if not plan.in_step:
        raise PlanError(headline, over.why, f"{_apart(plan)}: each device steps by its own samples", _in_step(plan))
    if plan.lost != "redo":
        raise PlanError(headline, over.why, *no_gather(plan.without("pipeline", "branch", microbatches=1)))
    if over.unfit:
        raise PlanError(
            headline,
            over.why,
            f"outputs and targets of all devices would be gathered, but {over.unfit}",
            "let the model return one row a sample (features, not a matrix of all against all)",
            whole,
        )


def notes(plan: Plan, over: LossDenominator, batch_size: int) -> list[str]:
    """What is done about a loss of the whole batch, in words."""
    if over.kind != "batch":
        return []
    done = []
    if plan.shares > 1:
        done.append(f"outputs and targets of all ranks are gathered, {size(batch_size * sum(over.moved))} a step")
    if plan.microbatches > 1:
        done.append("microbatches go forward twice")
    return [f"loss: of the whole batch, since it is not a mean over samples ({over.why}): {'; '.join(done)}"]
