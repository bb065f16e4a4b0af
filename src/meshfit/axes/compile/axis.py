"""torch.compile, over model and loss together, or over each block.

Compiled as one, the last layer's output and the loss fuse: on one H200 a 124M GPT trains 1.33 times faster
than eager in 0.55 of the memory. It costs tens of seconds once, so "auto" takes it only where the run is
long enough, on GPUs, and says so.

Where something acts inside the model (units are gathered, blocks computed again, global BatchNorm talks to other
ranks) the whole cannot be compiled, but its blocks can: those without such a BatchNorm.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Applied, Axis
from meshfit.axes.compile.pieces import InPieces
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.forward import wrap
from meshfit.errors import PlanError
from meshfit.launch.peak import peak_flops
from meshfit.plan import Plan
from meshfit.torch_private import compiling_alike

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed

INSIDE = ("pipeline", "context", "branch", "tensor", "expert")
"""Axes along which ranks communicate in the middle of a forward."""

# What compiling costs and saves: a careful guess from one measured model (a 124M GPT on one H200: about 30 s more to
# start, a quarter of the time saved).
SECONDS_TO_COMPILE = 40.0
SHARE_SAVED = 0.2
EFFICIENCY = 0.4  # of peak, eager
USUAL_PEAK = 312e12  # an A100's, where the device is not known


@dataclass(frozen=True, slots=True)
class Compile:
    word: str = "auto"
    """"whole", "none", or "auto"."""

    def decide(self, *, device: torch.device, step_seconds: float, steps: int | None, means: str) -> tuple[bool, str]:
        """Whether to compile, and why, in words. ``means``: what can be compiled, "whole", "block" or "none"."""
        if self.word != "auto":
            return self.word != "none", f"compile={self.word}, as asked"
        if device.type != "cuda":
            return False, "compile: no, on CPUs it rarely pays"
        if means == "none":
            return False, "compile: no, global BatchNorm communicates inside every block"
        if steps is None:
            return False, "compile: no, the length of the run is not known"
        saved = step_seconds * steps * SHARE_SAVED
        verdict = saved > SECONDS_TO_COMPILE
        return verdict, (
            f"compile: {f'yes, {means}' if verdict else 'no'}, it would save about {saved:.0f} s"
            f" of {step_seconds * steps:.0f} s and take about {SECONDS_TO_COMPILE:.0f} s"
        )

    @staticmethod
    def apply(objective: Callable, piece_bytes: int | None = None) -> Callable:
        """Model and loss together; in pieces of so many bytes of weights, where gradients are awaited."""
        if piece_bytes is None:
            return torch.compile(objective.__call__)
        return torch.compile(objective.__call__, backend=InPieces(piece_bytes))


class CompileAxis(Axis):
    """Compiles blocks, where other axes act inside the model; the whole model is compiled by the run, with its loss."""

    word = "compile"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        acts_inside = plan.cuts or plan.recompute == "full" or (plan.joins_batchnorms and bool(batch_norms(model)))
        in_blocks = plan.compile == "block" or (plan.compile == "auto" and device == "cuda" and acts_inside)
        return in_blocks and all(getattr(plan, axis) == 1 for axis in INSIDE)

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        norms = batch_norms(model)
        acts = [f"{axis}={getattr(plan, axis)}" for axis in INSIDE if getattr(plan, axis) > 1]
        if plan.compile == "whole":
            inside = {
                f"shard={plan.shard} gathers weights": plan.shard > 1,
                "offload=parameters fetches weights": plan.offload == "parameters",
                f"tensor={plan.tensor} sums activations over ranks": plan.tensor > 1,
                f"context={plan.context} gathers keys and values": plan.context > 1,
                f"pipeline={plan.pipeline} hands them on": plan.pipeline > 1,
                f"expert={plan.expert} sends them to experts": plan.expert > 1,
                f"branch={plan.branch} hands them round": plan.branch > 1,
                f"recompute={plan.recompute} runs blocks twice": plan.recompute != "none",
                f"{len(norms)} BatchNorms talk to the other ranks": bool(norms) and plan.joins_batchnorms,
            }
            if any(inside.values()):
                raise PlanError(
                    f"{plan}: this model cannot be compiled whole",
                    f"in the middle of the forward {' and '.join(what for what, so in inside.items() if so)}",
                    f"{replace(plan, compile='none' if acts else 'block')} works"
                    + ("; so does batchnorm=local beside compile=whole" if norms and plan.joins_batchnorms else ""),
                )
        if plan.compile == "block" and acts:
            raise PlanError(
                f"{plan}: blocks are not compiled where {acts[0]} acts inside them",
                f"{replace(plan, compile='none')} works",
            )
        if plan.compile == "block" and plan.recompute == "selective":
            raise PlanError(
                f"{plan}: compiled blocks choose for themselves what to compute again",
                f"{replace(plan, recompute='none')} does so; {replace(plan, recompute='full')} keeps least",
            )

    def find(self, study: "Study") -> tuple[str, ...]:
        if isinstance(study.trace, TraceError):
            if study.plan.compile == "block":
                study.notes.append(f"compile: none, because the model cannot be traced ({study.trace.headline})")
            return ()
        return compilable(study.trace, global_batchnorm=study.plan.joins_batchnorms)

    def apply(self, placed: "Placed", finding: tuple[str, ...]) -> "Blocks | None":
        return Blocks(placed.model, finding) if finding else None


class Blocks(Applied):
    """Blocks of a model that can be switched to run compiled."""

    def __init__(self, model: nn.Module, paths: tuple[str, ...]):
        """Wraps the blocks' own forwards, so it comes before all other wrappers."""
        self._blocks, self._until = [model.get_submodule(path) for path in paths], ExitStack()
        self._compiled = False
        for block in self._blocks:
            wrap(block, self._around)

    def compile(self) -> None:
        """From now on. Nothing is compiled before a block is called."""
        # Blocks share their code, and torch recompiles it for each that differs in a constant.
        self._until.enter_context(compiling_alike(len(self._blocks) + 8, own_numbers(self._blocks)))
        self._compiled = True

    def undo(self) -> None:
        self._until.close()

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if not self._compiled:
                return forward(*args, **kwargs)
            compiled = compiled or torch.compile(forward)
            return compiled(*args, **kwargs)

        return run


def own_numbers(blocks: Iterable[nn.Module]) -> set[str]:
    """Names of integers that differ between blocks of one class: a block's place in the model, above all."""
    first: dict[tuple[type, str, str], int] = {}
    found: set[str] = set()
    for block in blocks:
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int and first.setdefault((type(block), path, name), value) != value:
                    found.add(name)
    return found


def compilable(trace: Trace, *, global_batchnorm: bool) -> tuple[str, ...]:
    """Blocks that can be compiled one by one, and are worth it: none inside another, without a global BatchNorm."""
    paths = [path for block in trace.blocks if block.cost.flops for path in block.paths]
    called = {event.name for event in trace.events if event.kind == "module"}
    called |= {path for event in trace.events for path in event.within}
    norms = [path for path, kind in trace.kinds.items() if "BatchNorm" in kind] if global_batchnorm else []
    talks = lambda path: any(norm == path or norm.startswith(f"{path}.") for norm in norms)
    return tuple(path for path in paths if path in called and not talks(path))


def expected_step_seconds(model: nn.Module, tokens: int, device: torch.device) -> float:
    """A guess before the first step: six flops a weight and token, at a usual share of the device's peak."""
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return 6 * weights * tokens / (EFFICIENCY * (peak_flops(name, "bf16") or USUAL_PEAK))
