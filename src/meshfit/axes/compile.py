"""torch.compile, over model and loss together, or over each block.

Compiled as one, the last layer's output and the loss fuse: on one H200 a 124M GPT trains 1.33 times faster
than eager in 0.55 of the memory. It costs tens of seconds once, so "auto" takes it only where the run is
long enough, on GPUs, and says so.

Where something acts inside the model (units are gathered, blocks computed again, global BatchNorm talks to other
ranks) the whole cannot be compiled, but its blocks can: those without such a BatchNorm.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.forward import wrap
from meshfit.launch.peak import peak_flops
from meshfit.torch_private import recompile_limit

# What compiling costs and saves: a guess, on the careful side of the one model measured (a 124M GPT on one H200:
# about 30 s more to start, a quarter of the time saved).
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
    def apply(objective: Callable) -> Callable:
        return torch.compile(objective.__call__)


class Blocks:
    """Blocks of a model that run compiled from when they are told to."""

    def __init__(self, model: nn.Module, paths: tuple[str, ...], until: ExitStack):
        """Goes around the blocks' own forwards: before anything else does. What they need of the process is given back
        with ``until``."""
        self.count, self._until = len(paths), until
        self._compiled = False
        for path in paths:
            wrap(model.get_submodule(path), self._around)

    def compile(self) -> None:
        """From now on. Nothing is compiled before a block is called."""
        # Blocks share their code, and torch compiles it anew for each that differs in a number (its place, say); past
        # the limit it would silently leave the rest as they are.
        self._until.enter_context(recompile_limit(self.count + 8))
        self._compiled = True

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if not self._compiled:
                return forward(*args, **kwargs)
            compiled = compiled or torch.compile(forward)
            return compiled(*args, **kwargs)

        return run


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
