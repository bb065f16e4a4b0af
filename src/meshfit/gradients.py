"""No gradient is lost under a plan: looked at in the first step, before any weight is changed.

A parameter whose gradient is missing or exactly zero on all ranks may be one that has none on one device either (LoRA's
B is zero at first, so A has none; an expert that no token reached; a head that nobody calls). Or a layout lost it, and
weight decay alone would move it. So where there is such a parameter, and only there, the first rank runs the whole
model once more, by itself, on samples of that step: one that has a gradient there stops the run, by its name.

What is decided by random numbers may differ from run to run. Where the first rank finds that it does, parameters are
watched for some steps more, and stop the run if they never have a gradient.

    cost    one small all_reduce in the first step; where a gradient is missing, two forwards and backwards of one
            microbatch on one rank
"""

import copy
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit import generators
from meshfit.anatomy.copies import twin
from meshfit.axes.find import as_number
from meshfit.comm.objects import broadcast_object
from meshfit.data import tree
from meshfit.data.loader import Batch
from meshfit.errors import PlanError
from meshfit.python_state import python_state_kept

if TYPE_CHECKING:
    from meshfit.phases import TrainedPhase
    from meshfit.run import Run

NEAR = 1e-6
"""Of the largest gradient: what is smaller may be the rounding of a sum that is zero."""

LARGEST = 2**30
"""Bytes of parameters up to which a model is run whole in host memory."""

TRIES = 4
"""Runs of the whole model where random numbers matter."""

WATCHED = (3, 10)
"""Steps for which a parameter is watched: where all tries gave it a gradient, and where some did."""


class Guard:
    """Called after the backward of each step; ``blank`` is the model without weights, on the first rank."""

    def __init__(self, run: "Run", blank: nn.Module | None, phase: "TrainedPhase"):
        self.run, self.blank, self.phase = run, blank, phase
        with phase.alone():
            self.names = tuple(name for name, p in run.placed.shape.named_parameters() if p.requires_grad)
        self.watched: dict[str, int] | None = None
        """Parameters that had no gradient so far, and for how many steps they may go on so; None: before any step."""
        self.steps = 0

    def __call__(self, batch: Batch) -> None:
        missing = self._missing()
        self.steps += 1
        if self.watched is None:
            self.watched = self._judged(missing, batch) if missing else {}
            self.blank = None
        self.watched = {name: left - 1 for name, left in self.watched.items() if name in missing}
        lost = [name for name, left in self.watched.items() if left < 1]
        if lost:
            raise self._error(lost)
        if not self.watched:
            self.phase.guard = None

    def _missing(self) -> set[str]:
        """Parameters that have no gradient, or one of zeros, on any rank."""
        device = self.run.world.device
        found = torch.zeros(len(self.names), device=device)
        own = {name: p.grad for name, p in self.run.model.named_parameters() if p.grad is not None and p.grad.numel()}
        at = [i for i, name in enumerate(self.names) if name in own]
        if at:
            found[at] = torch.stack([_largest(own[self.names[i]]).to(device) != 0 for i in at]).to(found)
        if self.run.mesh.world is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.run.mesh.world)
        return {name for name, there in zip(self.names, found.tolist(), strict=True) if not there}

    def _judged(self, missing: set[str], batch: Batch) -> dict[str, int]:
        """Of those, the ones that have a gradient on one device, and for how many steps to watch them. All ranks call
        it together."""
        first = self.run.mesh.rank == 0
        parameters = sum(p.numel() * p.element_size() for p in self.run.placed.shape.parameters())
        if not self._fits(parameters):
            self.run.notes.append(f"gradients: {len(missing)} are zero, in a model too large to see if it loses them")
            return {}
        weights = self.run.placed.tensors(keep=first)
        said: dict[str, int] | None = None
        if first and self.blank is not None:
            try:
                said = self._tried(self.blank, weights, batch, missing)
            except Exception as error:  # it cannot be run by itself here: nothing is known
                self.run.notes.append(f"gradients: not compared with one device's ({type(error).__name__}: {error})")
        if self.run.mesh.world is not None:
            said = broadcast_object(said, self.run.mesh.world)
        return said or {}

    def _fits(self, size: int) -> bool:
        device = self.run.world.device
        fits = size <= LARGEST or (device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 4 * size)
        if self.run.mesh.world is None:
            return fits
        every = torch.tensor(float(fits), device=device)
        dist.all_reduce(every, op=dist.ReduceOp.MIN, group=self.run.mesh.world)
        return bool(every)

    def _tried(self, blank: nn.Module, weights: dict[str, Tensor], batch: Batch, missing: set[str]) -> dict[str, int]:
        part = next((part for part in batch.microbatches if part.samples), None)
        if part is None:
            return {}
        device = self.run.world.device
        model = _filled(blank, weights, device)
        state = python_state_kept(model, *self.phase.asked.objective.code)
        with generators.kept(device), warnings.catch_warnings(), state:
            warnings.simplefilter("ignore")  # those of the step itself were heard
            tries = [self._once(model, part.content, missing, seed) for seed in range(2)]
            if tries[0] != tries[1]:
                tries += [self._once(model, part.content, missing, seed) for seed in range(2, TRIES)]
        alike, always = tries[0] == tries[1], set.intersection(*(reached for _, reached in tries))
        sometimes = set.union(*(reached for _, reached in tries)) - always
        return dict.fromkeys(always, 0 if alike else WATCHED[0]) | dict.fromkeys(sometimes, WATCHED[1])

    def _once(self, model: nn.Module, content: Any, missing: set[str], seed: int) -> tuple[float, set[str]]:
        """The loss, and which of ``missing`` have a gradient."""
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = as_number(self.phase.asked.objective(model, tree.map_tensors(torch.clone, content)))
        loss.backward()
        sizes = {name: float(_largest(p.grad)) for name, p in model.named_parameters() if p.grad is not None}
        limit = NEAR * max(sizes.values(), default=0.0)
        return float(loss.detach()), {name for name in missing if sizes.get(name, 0.0) > limit}

    def _error(self, lost: list[str]) -> PlanError:
        plan, shown = self.run.plan, ", ".join(sorted(lost)[:8]) + (", ..." if len(lost) > 8 else "")
        steps = "before any weight was changed" if self.steps == 1 else f"in all of the first {self.steps} steps"
        return PlanError(
            f"{plan}: no gradient arrives at {shown}",
            f"seen {steps}: it is missing or exactly zero on all ranks; one device has it, on the same samples",
            "so the training would not be that of one device; data= instead of what cuts the model may work",
        )


def blank_of(model: nn.Module) -> nn.Module | None:
    """A copy without weights; None where it cannot be made."""
    try:
        return twin(model, meta=True)
    except Exception:
        return None


def _filled(blank: nn.Module, weights: dict[str, Tensor], device: torch.device) -> nn.Module:
    """A copy of ``blank`` with ``weights``."""
    memo: dict[int, Any] = {}
    for name, p in blank.named_parameters():
        memo[id(p)] = nn.Parameter(weights[name].to(device), requires_grad=p.requires_grad)
    for name, buffer in blank.named_buffers():
        memo[id(buffer)] = weights[name].to(device)
    return copy.deepcopy(blank, memo)


def _largest(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return values.abs().amax() if values.numel() else torch.zeros(())
