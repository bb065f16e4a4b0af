"""The first module whose output or gradient differs.

Where a plan keeps modules whole, the first rank's first microbatch holds the first samples of one device's. So the
outputs of its modules, and the gradients there, are compared with the same rows on one device.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.data import tree
from meshfit.passes.whole import Passes
from meshfit.plan import Plan
from meshfit.proof.double import LowerPrecision
from meshfit.run import Run

Call = tuple[str, int]
"""A module's name, and which call of it."""
Tensors = dict[Call, list[Tensor | None]]


@dataclass
class ModuleOutputs:
    """Outputs of modules in the first microbatch of the first step, in the order in which they returned."""

    outputs: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    samples: int = 0
    lower: bool = False
    """Whether activations were computed in less than fp64."""


def keeps_modules(plan: Plan) -> bool:
    """Whether every module runs whole on a rank, on that rank's samples."""
    return plan.in_step and plan.pipeline == plan.tensor == plan.branch == plan.context == plan.expert == 1


class ModuleHooks:
    """Hooks on the modules of a run, until they are removed: they record the order of modules and, with ``keep``, the
    outputs and gradients there."""

    def __init__(self, run: Run, *, keep: bool):
        self.order: list[str] = []
        """Parameters in the order in which a forward reaches their modules."""
        self._kept, self._microbatch = ModuleOutputs(), 0
        self._hooks: list[Any] = []
        # scripted modules take no Python hooks; hooks would change what is compiled
        named = {n: m for n, m in run.model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
        whole = run.world.size == 1 and run.plan.compile == "none"
        for name, module in named.items():
            own = [f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)]
            if whole and own:
                self._hooks.append(module.register_forward_pre_hook(self._note_order(own)))
        if keep and run.share == 0 and isinstance(run.schedule, Passes):
            objective = run.schedule.objective

            def counted(model: nn.Module, content: Any) -> Any:
                self._microbatch += 1
                if self._microbatch > 1:
                    return objective(model, content)
                self._kept.samples = next((len(t) for t in tree.tensors(content) if t.dim()), 0)
                with LowerPrecision() if whole else nullcontext() as precision:
                    loss = objective(model, content)
                self._kept.lower = precision is not None and precision.found
                return loss

            run.schedule.objective = counted
            self._hooks += [module.register_forward_hook(self._keep(name)) for name, module in named.items()]

    def outputs(self, correction: Tensor | float) -> ModuleOutputs:
        """On the CPU; gradients times ``correction``, which makes them those of the mean."""

        def on_cpu(kept: Tensors, times: Tensor | float) -> Tensors:
            return {call: [None if t is None else (t * times).cpu() for t in many] for call, many in kept.items()}

        kept = self._kept
        return replace(kept, outputs=on_cpu(kept.outputs, 1), gradients=on_cpu(kept.gradients, correction))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_order(self, own: list[str]) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if own[0] not in self.order:
                self.order.extend(own)

        return hook

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._microbatch != 1:
                return
            call = name, sum(known == name for known, _ in self._kept.outputs)
            found = [t for t in tree.tensors(output) if t.is_floating_point()]
            self._kept.outputs[call] = [t.detach().clone() for t in found]
            gradients = self._kept.gradients[call] = [None] * len(found)
            for i, tensor in enumerate(found):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad, i=i: gradients.__setitem__(i, grad.detach().clone()))

        return hook


def first_that_differs(want: ModuleOutputs, got: ModuleOutputs, again: ModuleOutputs, limit: float) -> str:
    """In words; nothing where no module does. ``again`` is one device perturbed by a rounding error: ten times that
    distance is no difference."""
    samples = got.samples, want.samples
    backward = reversed(list(got.gradients))
    for which, calls, words in (("outputs", got.outputs, "output"), ("gradients", backward, "gradient at the output")):
        theirs, ours, others = getattr(want, which), getattr(got, which), getattr(again, which)
        for call in calls:
            if call in theirs and _differ(theirs[call], ours[call], others.get(call), limit, samples):
                name, number = call
                return f"the {words} of {name or 'the model'}" + (f", call {number + 1}" if number else "")
    return ""


def _differ(want: list[Any], got: list[Any], again: list[Any] | None, limit: float, samples: tuple[int, int]) -> bool:
    """``samples`` of the rank, and of one device. A tensor that does not have one row, or several, for each sample is
    not compared: it may be of all samples together."""
    distance = lambda a, b: (a.double() - b.double()).norm().item()
    for i, (theirs, ours) in enumerate(zip(want, got, strict=False)):
        if theirs is None or ours is None or theirs.dim() != ours.dim() or theirs.shape[1:] != ours.shape[1:]:
            continue
        if samples[0] != samples[1] and (not ours.dim() or len(ours) * samples[1] != len(theirs) * samples[0]):
            continue
        other = again[i] if again is not None and i < len(again) else None
        if ours.dim():
            theirs, other = theirs[: len(ours)], other if other is None else other[: len(ours)]
        own = 0.0 if other is None else distance(other, theirs)
        if not distance(ours, theirs) <= max(limit * theirs.double().norm().item(), 10 * own):
            return True
    return False
