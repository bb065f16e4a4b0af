"""torch.compile, over model and loss together, or over each block.

Compiled as one, the last layer's output and the loss fuse: on one H200 a 124M GPT trains 1.33 times faster
than eager in 0.55 of the memory. It costs tens of seconds once, so "auto" takes it only where the run is
long enough, on GPUs, and says so.

Where something acts inside the model (units are gathered, blocks computed again, stages hand activations on, experts
and BatchNorms talk to other ranks) the whole cannot be compiled, but its blocks can; of a block in which something
acts, those parts in which nothing does.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Applied, Axis
from meshfit.axes.compile.parts import BlockOfParts
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.forward import wrap
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.tensor.cut import untraceable
from meshfit.comm.group import RankGroup
from meshfit.errors import PlanError
from meshfit.launch.peak import peak_flops
from meshfit.plan import Plan
from meshfit.schedule.actions import V_SHAPED, usual_chunks
from meshfit.torch_private.compilation import compiling_alike

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed

INSIDE = ("pipeline", "context", "branch", "tensor", "expert")
"""Axes along which ranks communicate in the middle of a forward."""

BLOCKS_A_STAGE = 2
"""Blocks that a stage of a pipeline has at least, for "auto" to keep them in one piece."""

# What compiling costs and saves: a careful guess from one measured model (a 124M GPT on one H200: about 30 s more to
# start, a quarter of the time saved).
SECONDS_TO_COMPILE = 40.0
SHARE_SAVED = 0.2
EFFICIENCY = 0.4  # of peak, eager
USUAL_PEAK = 312e12  # an A100's, where the device is not known


def pays(word: str, *, device: torch.device, step_seconds: float, steps: int | None, means: str) -> tuple[bool, str]:
    """Whether to compile under ``compile=word``, and why. ``means``: what can be compiled, "whole", "block" or
    "none"."""
    if means == "none" and (word == "block" or (word == "auto" and device.type == "cuda")):
        return False, "compile: no, there is no block in which nothing acts"
    if word != "auto":
        return word != "none", f"compile={word}, as asked"
    if device.type != "cuda":
        return False, "compile: no, on CPUs it rarely pays"
    if steps is None:
        return False, "compile: no, the length of the run is not known"
    saved = step_seconds * steps * SHARE_SAVED
    verdict = saved > SECONDS_TO_COMPILE
    return verdict, (
        f"compile: {f'yes, {means}' if verdict else 'no'}, it would save about {saved:.0f} s"
        f" of {step_seconds * steps:.0f} s and take about {SECONDS_TO_COMPILE:.0f} s"
    )


class CompileAxis(Axis):
    """Compiles blocks, where other axes act inside the model; the whole model is compiled by the run, with its loss."""

    word = "compile"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        acts_inside = plan.cuts or plan.recomputed_blocks == "full" or plan.head_loss or plan.offloads("activations")
        acts_inside = acts_inside or any(getattr(plan, axis) > 1 for axis in INSIDE)
        acts_inside = acts_inside or (plan.joins_batchnorms and bool(batch_norms(model)))
        # these split what is one then; under tensor sums are hidden behind products, which a compiled backward is not
        loses = plan.branch > 1 or plan.tensor > 1 or plan.context > 1
        loses = loses or (plan.pipeline > 1 and plan.schedule in V_SHAPED)
        by_itself = plan.compile == "auto" and device == "cuda" and acts_inside and not loses
        return plan.compile == "block" or by_itself

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        norms = batch_norms(model)
        if plan.compile == "whole":
            inside = {
                f"shard={plan.shard} gathers weights": plan.shard > 1,
                "offload=parameters fetches weights": plan.offloads("parameters"),
                f"tensor={plan.tensor} sums activations over ranks": plan.tensor > 1,
                f"context={plan.context} gathers keys and values": plan.context > 1,
                f"pipeline={plan.pipeline} hands them on": plan.pipeline > 1,
                f"expert={plan.expert} sends them to experts": plan.expert > 1,
                f"branch={plan.branch} hands them round": plan.branch > 1,
                f"recompute={plan.recomputed_blocks} runs blocks twice": plan.recomputed_blocks != "none",
                "recompute=loss takes the logits in chunks": plan.head_loss,
                "offload=activations moves what is saved": plan.offloads("activations"),
                f"{len(norms)} BatchNorms talk to the other ranks": bool(norms) and plan.joins_batchnorms,
            }
            if any(inside.values()):
                raise PlanError(
                    f"{plan}: this model cannot be compiled whole",
                    f"in the middle of the forward {' and '.join(what for what, so in inside.items() if so)}",
                    f"{replace(plan, compile='block')} works"
                    + ("; so does batchnorm=local beside compile=whole" if norms and plan.joins_batchnorms else ""),
                )
        if plan.compile == "block" and plan.recomputed_blocks == "selective":
            raise PlanError(
                f"{plan}: compiled blocks choose for themselves what to compute again",
                f"{replace(plan, recompute=plan.recompute.replace('selective', 'none').replace('none+', ''))} does so;"
                f" {replace(plan, recompute=plan.recompute.replace('selective', 'full'))} keeps least",
            )

    def find(self, study: "Study") -> "FoundBlocks":
        plan, trace = study.plan, study.trace
        if isinstance(trace, TraceError):
            if plan.compile == "block":
                study.notes.append(f"compile: none, because the model cannot be traced ({trace.headline})")
            return FoundBlocks()
        experts = study.found("expert")
        acting = [] if experts is None else [mixture.module for mixture in experts.mixtures]
        acting += [] if (head := study.found("head_loss")) is None else [head]
        acting += [path for path, kind in trace.kinds.items() if "BatchNorm" in kind and plan.joins_batchnorms]
        if (split := study.found("tensor")) is not None:
            acting += [path for region in split.regions for path in untraceable(study.model, region)]
        context = study.found("context")
        found = compilable(trace, acting, () if context is None else context.meeting)
        stages = plan.pipeline * (plan.chunks or usual_chunks(plan.schedule)) if plan.pipeline > 1 else 0
        if plan.compile == "auto" and len(found) < BLOCKS_A_STAGE * stages:
            return FoundBlocks()  # a cut may have to go through one
        return FoundBlocks(found, kept_whole=stages > 0)

    def closed(self, finding: "FoundBlocks") -> Iterable[str]:
        return finding.paths if finding.kept_whole else ()

    def apply(self, placed: "Placed", finding: "FoundBlocks") -> "Blocks | None":
        held = {path for path, module in placed.model.named_modules() if not isinstance(module, Shell)}
        here = tuple(path for path in finding.paths if path in held)
        inside = [RankGroup(group) for axis in ("tensor", "context") if (group := placed.mesh.over(axis)) is not None]
        return Blocks(placed.model, here, inside) if here else None


@dataclass(frozen=True)
class FoundBlocks:
    """Modules that are compiled one by one."""

    paths: tuple[str, ...] = ()
    kept_whole: bool = False
    """Stages are not cut through them."""


class Blocks(Applied):
    """Blocks of a model that can be switched to run compiled."""

    def __init__(self, model: nn.Module, paths: tuple[str, ...], inside: Sequence[RankGroup] = ()):
        """Wraps the blocks' own forwards, so it comes before all other wrappers. ``inside``: groups that act in them,
        or have split what they are given."""
        self._inside = inside
        self._blocks, self._until = [model.get_submodule(path) for path in paths], ExitStack()
        self._compiled = False
        for block in self._blocks:
            wrap(block, partial(self._around, block))

    def compile(self) -> None:
        """From now on. Nothing is compiled before a block is called."""
        # Blocks share their code, and torch recompiles it for each that differs in a constant.
        self._until.enter_context(compiling_alike(len(self._blocks) + 8, own_numbers(self._blocks)))
        self._compiled = True

    def close(self) -> None:
        self._until.close()

    def _around(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if not self._compiled:
                return forward(*args, **kwargs)
            if compiled is None:
                groups = self._inside
                compiled = BlockOfParts(block, forward, groups) if groups else torch.compile(forward)
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


def compilable(trace: Trace, acting: Collection[str], meeting: Collection[str] = ()) -> tuple[str, ...]:
    """Modules to compile one by one, none inside another: blocks with arithmetic in them; not single layers of torch,
    which are one kernel. Of a block that holds a module of ``acting``, at whose calls something acts, the largest parts
    that do not; likewise of ``meeting``, in whose own code something does, but not in all that it calls."""
    called = {event.name for event in trace.events if event.kind == "module"}
    called |= {path for event in trace.events for path in event.within}
    inside = lambda path, other: other == path or other.startswith(f"{path}.")
    found: list[str] = []

    def take(path: str) -> None:
        if any(inside(each, path) for each in acting):
            return
        holds = any(inside(path, each) for each in (*acting, *meeting))
        children = [other for other in trace.kinds if other and other.rpartition(".")[0] == path]
        if holds or path not in called:
            for child in children:
                take(child)
        elif children or not hasattr(nn, trace.kinds[path]):
            found.append(path)

    for block in trace.blocks:
        for path in block.paths:
            if block.cost.flops:
                take(path)
    return tuple(found)


def expected_step_seconds(model: nn.Module, tokens: int, device: torch.device) -> float:
    """A guess before the first step: six flops a weight and token, at a usual share of the device's peak."""
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return 6 * weights * tokens / (EFFICIENCY * (peak_flops(name, "bf16") or USUAL_PEAK))
