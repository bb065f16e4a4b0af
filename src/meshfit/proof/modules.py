"""The first module whose output or gradient differs.

Where a plan keeps modules whole, the first rank's first microbatch holds the first samples of one device's, so what
its modules put out, and the gradients there, can be laid beside the same rows on one device.
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

Put = tuple[str, int]
"""A module's name, and the how manieth call of it."""


@dataclass
class Seen:
    """What modules put out in the first microbatch of the first step, in the order in which they ended."""

    outputs: dict[Put, list[Tensor]] = field(default_factory=dict)
    gradients: dict[Put, list[Tensor | None]] = field(default_factory=dict)
    samples: int = 0
    lower: bool = False
    """Whether activations were computed in less than fp64."""


def keeps_modules(plan: Plan) -> bool:
    """Whether every module runs whole on a rank, on that rank's samples."""
    return plan.in_step and plan.pipeline == plan.tensor == plan.branch == plan.context == plan.expert == 1


class Watched:
    """Hooks on the modules of a run, until they are removed: in which order they run, and what they put out."""

    def __init__(self, run: Run, *, keep: bool):
        self.order: list[str] = []
        """Parameters in the order in which a forward comes to their modules."""
        self._seen, self._microbatch, self._calls = Seen(), 0, {}
        self._hooks: list[Any] = []
        named = {name: module for name, module in run.model.named_modules() if not _takes_no_hooks(module)}
        whole = run.world.size == 1 and run.plan.compile == "none"  # hooks would change what is compiled
        for name, module in named.items():
            own = [f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)]
            if whole and own:
                self._hooks.append(module.register_forward_pre_hook(self._ordered(own)))
        if keep and run.share == 0 and isinstance(run.schedule, Passes):
            objective = run.schedule.objective

            def counted(model: nn.Module, content: Any) -> Any:
                self._microbatch += 1
                if self._microbatch > 1:
                    return objective(model, content)
                self._seen.samples = next((len(t) for t in tree.tensors(content) if t.dim()), 0)
                with LowerPrecision() if whole else nullcontext() as precision:
                    loss = objective(model, content)
                self._seen.lower = precision is not None and precision.found
                return loss

            run.schedule.objective = counted
            for name, module in named.items():
                self._hooks.append(module.register_forward_hook(self._kept(name)))

    def seen(self, correction: Tensor | float) -> Seen:
        """On the CPU; gradients times ``correction``, as those of the mean are."""
        held = self._seen
        outputs = {put: [t.cpu() for t in many] for put, many in held.outputs.items()}
        gradients = {
            put: [None if g is None else (g * correction).cpu() for g in many] for put, many in held.gradients.items()
        }
        return replace(held, outputs=outputs, gradients=gradients)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _ordered(self, own: list[str]) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if own[0] not in self.order:
                self.order.extend(own)

        return hook

    def _kept(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._microbatch != 1:
                return
            call = self._calls[name] = self._calls.get(name, -1) + 1
            found = [t for t in tree.tensors(output) if t.is_floating_point()]
            self._seen.outputs[name, call] = [t.detach().clone() for t in found]
            gradients: list[Tensor | None] = [None] * len(found)
            self._seen.gradients[name, call] = gradients
            for i, tensor in enumerate(found):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad, i=i: gradients.__setitem__(i, grad.detach().clone()))

        return hook


def _takes_no_hooks(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)  # takes no Python hooks


def first_that_differs(want: Seen, got: Seen, again: Seen, limit: float) -> str:
    """In words; nothing where no module does. ``again`` is one device perturbed by a rounding: ten times as far apart
    as that is no difference."""
    some = got.samples, want.samples
    for put, ours in got.outputs.items():
        theirs = want.outputs.get(put)
        if theirs is not None and _differ(theirs, ours, again.outputs.get(put), limit, some):
            return f"the output of {_named(put)}"
    for put, ours in reversed(list(got.gradients.items())):  # as backward comes to them
        theirs = want.gradients.get(put)
        if theirs is not None and _differ(theirs, ours, again.gradients.get(put), limit, some):
            return f"the gradient at the output of {_named(put)}"
    return ""


def _named(put: Put) -> str:
    name, call = put
    return (name or "the model") + (f", call {call + 1}" if call else "")


def _differ(want: list[Any], got: list[Any], again: list[Any] | None, limit: float, some: tuple[int, int]) -> bool:
    """``some``: samples of the rank, and of one device. What does not have a row, or several, for each is not compared:
    it may be of all samples together."""
    for i, (theirs, ours) in enumerate(zip(want, got, strict=False)):
        if theirs is None or ours is None or theirs.dim() != ours.dim() or theirs.shape[1:] != ours.shape[1:]:
            continue
        if some[0] != some[1] and (not ours.dim() or len(ours) * some[1] != len(theirs) * some[0]):
            continue
        other = again[i] if again is not None and i < len(again) else None
        if ours.dim():
            theirs, other = theirs[: len(ours)], other if other is None else other[: len(ours)]
        size = theirs.double().norm().item()
        apart = (ours.double() - theirs.double()).norm().item()
        own = 0.0 if other is None else (other.double() - theirs.double()).norm().item()
        if not apart <= max(limit * size, 10 * own):
            return True
    return False
