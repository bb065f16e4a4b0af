"""The step: from summed gradients to new weights; and the scalars that ranks sum beside gradients.

In order: the true global norm, the factor (loss scale, true count, clipping) in one multiplication, the
decision whether the step counts, the optimizer, the schedule, the averaged weights. All ranks hold the same
gradients here, so all decide alike without a word.

On a GPU nothing waits: with a fused optimizer the factor and the decision are handed to its kernel, and the
host reads what happened one step later, before the next update. The schedule goes on then, if the step was taken.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.offload.optimizer import Offloads
from meshfit.axes.precision import LossScale
from meshfit.events import current
from meshfit.optimizers import Optimizers, needs_closure
from meshfit.step import Reading
from meshfit.torch_private.kernels import foreach_lerp_, foreach_mul_, foreach_norm
from meshfit.torch_private.optimizers import FUSED_OPTIMIZERS, takes_loss_scale
from meshfit.torch_private.tensors import grad_dtype
from meshfit.transfer import together, wide

STEP_SCALARS = 3  # loss, count, stop; then a slot a rank for broken losses, and those of values to log


@dataclass(frozen=True, slots=True)
class StepScalars:
    """What travels with the gradients of a step, of one rank or summed over ranks: on GPUs tensors, which the host does
    not wait for."""

    loss: Tensor | float = 0.0
    count: Tensor | float = 0.0
    """What the loss is a mean over."""
    stop: Tensor | float = 0.0
    broken: Sequence[Tensor | float] = (0.0,)
    """One flag a rank: its loss was not finite."""
    values: Sequence[Tensor | float] = ()
    """What a step logs."""

    def of_rank(self, rank: int, degree: int) -> Self:
        """Those of one of ``degree`` ranks, to be summed: its flag in a slot of its own."""
        (flag,) = self.broken
        return replace(self, broken=[flag if r == rank else 0.0 for r in range(degree)])

    @property
    def numbers(self) -> list[Tensor | float]:
        return [self.loss, self.count, self.stop, *self.broken, *self.values]

    @classmethod
    def from_numbers(cls, numbers: Tensor, degree: int) -> Self:
        """The inverse, with ``degree`` flags."""
        loss, count, stop, *rest = numbers.tolist() if numbers.is_cpu else numbers.unbind()
        return cls(loss, count, stop, rest[:degree], rest[degree:])


def sum_scalars(
    own: StepScalars, more: Sequence[Tensor | float], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[StepScalars, Tensor]:
    """This rank's scalars, and ``more`` numbers, summed over ``group`` in one small all_reduce."""
    numbers = together([*own.numbers, *more], device, torch.float64)
    if group is not None:
        current().moved("all_reduce", numbers.nbytes)
        dist.all_reduce(numbers, group=group)
    scalars, others = numbers.split([len(own.numbers), len(more)])
    return StepScalars.from_numbers(scalars, len(own.broken)), others


@dataclass(frozen=True, slots=True)
class Updated:
    """What a step did: tensors on GPUs, numbers on CPUs."""

    norm: Tensor | float
    """Of the gradient, before clipping."""

    taken: Tensor | bool
    """False: loss or gradient was not finite, and the weights are as they were."""


class Update:
    span = "update"
    """What a rank does meanwhile, in its events."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Optimizers,
        scheduler: Any = None,
        *,
        clip: float | None = None,
        scale: LossScale | None = None,
        average: "Average | None" = None,
        may_fuse: bool = True,
        offload: Offloads | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.optimizers, self.scheduler = Optimizers.of(optimizer).each, scheduler
        self.clip, self.scale, self.average = clip, scale, average
        self.around = around
        """Around the steps of the optimizers: see whole_step.py."""
        self.offload = offload
        """Steps the optimizers in their stead, part by part."""
        self._closes = needs_closure(self.optimizers[0])
        """Whether the one optimizer evaluates the loss itself."""
        self._again: Callable[[], Evaluated] | None = None
        self._taken: Reading | None = None
        """Whether the last step was, while the schedule does not know it yet."""
        fused = [_is_fused(one) or (may_fuse and fuse(one)) for one in self.optimizers]
        self.fused = all(fused)
        """Whether all can be told on the device to leave a step out."""

    @property
    def learning_rate(self) -> float:
        self.settle()
        return float(self.optimizers[0].param_groups[0]["lr"])

    def settle(self) -> None:
        """Let the schedule go on if the last step was taken; waits for the device where it has not come that far."""
        taken, self._taken = self._taken, None
        if taken is not None and taken.values[0]:
            self.scheduler.step()

    def __call__(
        self,
        gradients: list[Tensor],
        loss: Tensor | float,
        correction: Tensor | float = 1.0,
        norm: Tensor | None = None,
        *,
        last: bool = True,
        again: "Callable[[], Evaluated] | None" = None,
    ) -> Updated:
        """``correction`` is what the gradients must be multiplied by to be those of the true mean; ``norm`` theirs
        over all ranks, where each holds only some of them. ``last``: it ends a training step.
        ``again`` computes them once more, for an optimizer that evaluates the loss several times."""
        self.settle()
        self._again = again
        if self.scale is not None:
            correction = correction / self.scale.value
        norm = total_norm(gradients) if norm is None else norm
        if norm.is_cpu:
            updated = self._on_host(gradients, norm.item() * float(correction), float(loss), float(correction))
        else:
            updated = self._on_device(gradients, norm * correction, torch.as_tensor(loss), correction)
        if self.scale is not None:
            taken = updated.taken
            self.scale.update(~taken if isinstance(taken, Tensor) else torch.full_like(self.scale.value, not taken))
        if self.scheduler is not None:
            self._taken = Reading(updated.taken)
            if not isinstance(updated.taken, Tensor):
                self.settle()
        if self.average is not None and last:
            self.average.update()
        return updated

    def _on_host(self, gradients: list[Tensor], norm: float, loss: float, factor: float) -> Updated:
        taken = math.isfinite(norm) and math.isfinite(loss)
        if taken:
            if self.clip is not None:
                factor *= min(1.0, self.clip / (norm + 1e-6))
            if factor != 1.0 and gradients:
                foreach_mul_(gradients, factor)
            self._step(loss)
        return Updated(norm, taken)

    def _on_device(self, gradients: list[Tensor], norm: Tensor, loss: Tensor, factor: Tensor | float) -> Updated:
        taken = norm.isfinite() & loss.isfinite()
        if self.clip is not None:
            factor = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.fused:
            scaled = isinstance(factor, Tensor) or factor != 1.0  # a constant would have to go to the device, too
            found_inf, grad_scale = (~taken).float(), (torch.ones_like(norm) / factor).float() if scaled else None
            told: list[Any] = self.optimizers
            for optimizer in told:
                optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale
            try:
                self._step()
            finally:
                for optimizer in told:
                    del optimizer.found_inf, optimizer.grad_scale
            return Updated(norm, taken)
        if go := bool(taken):  # the host waits: only fused kernels can be told on the device to leave a step out
            if gradients and (isinstance(factor, Tensor) or factor != 1.0):
                foreach_mul_(gradients, factor.to(gradients[0].dtype) if isinstance(factor, Tensor) else factor)
            self._step(loss)
        return Updated(norm, go)

    def _step(self, loss: Tensor | float = 0.0) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.SGD) and _is_fused(optimizer):
                _begin_momentum(optimizer)
        if self._closes:
            self.optimizers[0].step(self._closure(loss))
            return
        with self.around():
            for each in self.optimizers if self.offload is None else self.offload.each:
                each.step()

    def _closure(self, loss: Tensor | float) -> Any:
        """The loss of this step; from the second call on computed anew, with its gradients."""
        known: list[Tensor | float] = [loss]

        def evaluate() -> Tensor | float:
            if known:
                return known.pop()
            assert self._again is not None
            now = self._again()
            gradients = list(now.gradients)
            norm = total_norm(gradients) if now.norm is None else now.norm
            factor = float(now.correction)
            if self.clip is not None:
                factor *= min(1.0, self.clip / (float(norm) * factor + 1e-6))
            if factor != 1.0 and gradients:
                foreach_mul_(gradients, factor)
            return now.loss

        return evaluate


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A loss and its gradients, as ``Update`` is given them."""

    gradients: Sequence[Tensor]
    loss: Tensor | float
    correction: Tensor | float
    norm: Tensor | None


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Give a parameter that gets its first gradient after others a momentum of zero, which is the same: torch's
    fused kernel cannot step those that have one together with those that have none."""
    for group in optimizer.param_groups:
        reached = [p for p in group["params"] if p.grad is not None] if group["momentum"] else []
        begun = [p for p in reached if optimizer.state[p].get("momentum_buffer") is not None]
        if 0 < len(begun) < len(reached):
            for p in reached:
                if optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together, summed in fp32 at least."""
    if not gradients:
        return torch.zeros(())
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if len(gradients) == 1:
        return torch.linalg.vector_norm(gradients[0], dtype=dtype)
    if len({g.dtype for g in gradients}) > 1:
        return torch.stack([wide(g).norm() for g in gradients]).norm()
    return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, 2.0, dtype=dtype)))


def fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Let torch's own optimizers take their fused kernel unless the user chose otherwise: the same numbers up to
    rounding, one call instead of several for each parameter. True if it does."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    chosen = any(
        group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
        for group in groups
    )
    if chosen or type(optimizer) not in FUSED_OPTIMIZERS:
        return False
    if any(group.get("dampening") for group in groups):  # see _begin_momentum: with it the first step is another
        return False
    if not all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters):
        return False
    for group in groups:
        group["fused"] = True
    takes_loss_scale(optimizer)
    return True


class Average:
    """An exponential moving average of the weights: ``ema=0.999``. Buffers, and integers, are as they are."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        with torch.no_grad():
            self.weights = [p.detach().to(grad_dtype(p), copy=True) for p in model.parameters()]
            """In fp32 where the model's own are rounded after each step (``precision=bf16-true``)."""
        self._rounded: dict[nn.Parameter, Tensor] = {}
        """While swapped: the model's own weights of another dtype than their average."""

    @torch.no_grad()
    def update(self) -> None:
        pairs = zip(self.weights, self.model.parameters(), strict=True)
        pairs = [(mine, p) for mine, p in pairs if p.is_floating_point() or p.is_complex()]
        alike = [(mine, p) for mine, p in pairs if mine.dtype == p.dtype]
        if alike:
            foreach_lerp_([mine for mine, _ in alike], [p for _, p in alike], 1.0 - self.decay)
        for mine, p in pairs:
            if mine.dtype != p.dtype:
                mine.lerp_(p.to(mine.dtype), 1.0 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights and the averaged ones; call again to undo."""
        for mine, theirs in zip(self.weights, self.model.parameters(), strict=True):
            held = theirs.detach().clone()
            if mine.dtype == theirs.dtype:
                theirs.copy_(mine)
                mine.copy_(held)
            elif theirs in self._rounded:
                theirs.copy_(self._rounded.pop(theirs))
            else:
                self._rounded[theirs] = held
                theirs.copy_(mine)
