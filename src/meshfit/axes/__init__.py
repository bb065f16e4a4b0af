"""Where each tensor lives. One file per axis, each a verb on a plain module, in place, keeping names.

They are applied in this order (``place``), each to the model as those before left it:

1. replicate    every rank starts from the same weights, still in host memory. Then the optimizer is made: it sees
                whole shapes
2. pipeline     a rank keeps the modules of its own stages, and lets go of the rest;
   or branch    those of its own branches, and of what all run alike
3. batchnorm    is made global, over the ranks that hold the same modules; auxiliary losses of mixtures too
4. compile      of blocks: inside everything below, so that what is compiled is plain arithmetic on whole weights
5. tensor       weights are cut by channels, and modules told how many of them they have
6. expert       of each mixture a rank keeps some experts, and rows travel between ranks
7. shard        what is left of each is cut as rows of memory, and gathered around the calls that use it, into what the
                tensor axis left. Only parts of the weights ever go to a device
8. recompute    around the gathering: what is computed again in backward is gathered again, not kept
9. context      around what is left: from where sequences begin, activations are cut
10. precision   around it all, for as long as a forward runs: nothing about the weights
11. offload     last: it moves what the optimizer holds beside the parameters it was left
12. compile     of the whole: model and loss together, where nothing above acts inside the model

``check`` says what a model cannot take, in the caller, before any process starts.
"""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.errors import JobError, PlanError
from meshfit.exchange.probe_optimizer import nature
from meshfit.plan import Plan
from meshfit.schedule.actions import schedule
from meshfit.torch_private import has_gradient_hooks

INSIDE = ("pipeline", "context", "branch", "tensor", "expert")
"""Axes along which ranks talk in the middle of a forward."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check(plan: Plan, model: nn.Module) -> None:
    """Refuse what ``model`` cannot take, with the nearest plan that works."""
    _check_forward(plan, model)
    _check_experts(plan)
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
    if plan.branch > 1:
        _check_branch(plan)
    if plan.context > 1:
        _check_context(plan)
    if plan.pipeline > 1:
        schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks or None)  # refuses what it cannot take
    if plan.compile == "block" and plan.recompute == "selective":
        raise PlanError(
            f"{plan}: compiled blocks choose for themselves what to compute again",
            f"{replace(plan, recompute='none')} does so; {replace(plan, recompute='full')} keeps least",
        )
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise JobError("there is nothing to train", f"all {count} parameters of the model are frozen")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    if sparse and plan.devices > 1:
        raise PlanError(
            f"{plan}: {sparse[0] or 'the model'} makes sparse gradients, which are not summed over ranks",
            "sparse=False works under every plan; one device works as it is",
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise PlanError(
            f"{lazy[0]} has no shape yet: it is a lazy parameter", "run the model once on a batch before fit"
        )


def _check_context(plan: Plan) -> None:
    """What sequences are not cut beside."""
    whole: dict[str, Any] = {"branch": 1, "expert": 1}
    whole["sequence"] = "auto" if plan.sequence == "split" else plan.sequence
    beside = [f"{key}={getattr(plan, key)}" for key, usual in whole.items() if getattr(plan, key) != usual]
    if beside:
        raise PlanError(
            f"{plan}: sequences are not cut beside {beside[0]}",
            f"{replace(plan, **whole)} works; so does {replace(plan, context=1, data=plan.data * plan.context)}",
        )


def _check_experts(plan: Plan) -> None:
    """Refuse what does not go with experts that are spread."""
    if plan.expert == 1:
        return
    beside = [axis for axis in ("pipeline", "context", "branch") if getattr(plan, axis) > 1]
    if beside:
        degrees = {axis: getattr(plan, axis) for axis in beside}
        words = ("schedule", "chunks", "cut")  # of those axes
        without: dict[str, Any] = {word: getattr(Plan(), word) for word in (*beside, *words)}
        other = replace(plan, **without, data=plan.data * prod(degrees.values()))
        raise PlanError(
            f"{plan}: experts are not spread beside {beside[0]}={degrees[beside[0]]}",
            f"{other} works",
        )
    if plan.offload == "parameters":
        raise PlanError(
            f"{plan}: experts that are spread stay on their devices",
            f"{replace(plan, offload='optimizer')} works",
        )


def _check_branch(plan: Plan) -> None:
    """A branch is recorded on whole sequences and whole batches: what changes those between its modules does not go
    with it."""
    whole: dict[str, Any] = {"pipeline": 1, "schedule": "1f1b", "chunks": 0, "cut": "", "context": 1, "expert": 1}
    whole["sequence"] = "auto" if plan.sequence == "split" else plan.sequence
    others = [f"{key}={getattr(plan, key)}" for key, usual in whole.items() if getattr(plan, key) != usual]
    if others:
        raise PlanError(
            f"{plan}: branch= does not go together with {others[0]}",
            f"{replace(plan, **whole)} works",
            f"without branch=, {replace(plan, branch=1)} may",
        )


def _check_forward(plan: Plan, model: nn.Module) -> None:
    """A forward that changes weights changes them differently on each rank; hooks on parameters do not travel to ranks,
    and see no gradient where parameters are cut."""
    hooked = [name for name, p in model.named_parameters() if has_gradient_hooks(p)]
    if hooked and (plan.devices > 1 or plan.offload == "parameters"):
        raise PlanError(
            f"{plan}: {hooked[0]} has a hook on its gradient, which would not be called",
            "clip= and the optimizer see summed gradients; step= can change a loss",
            "without the hook every plan works; one device works as it is",
        )
    for name, module in model.named_modules():
        if plan.devices > 1 and getattr(module, "max_norm", None) is not None and isinstance(module, EMBEDDINGS):
            raise PlanError(
                f"{plan}: {name or 'the model'} has max_norm={module.max_norm}",
                "it changes its weights in forward, on each rank those of its own samples: copies would drift apart",
                "without max_norm every plan works; one device works as it is",
            )


def check_optimizer(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step what the plan leaves it: slices of tensors, some parameters at a time."""
    cuts = not plan.server and (plan.shard > 1 or plan.tensor > 1 or plan.expert > 1)  # servers step what is whole
    if not cuts and plan.offload != "optimizer" and plan.server < 2:
        return
    kind, found = type(optimizer).__name__, nature(optimizer)
    if plan.server > 1 and not found.separate:
        raise PlanError(
            f"{plan}: each server steps a part of the model, which {kind} cannot",
            found.why,
            f"{replace(plan, server=1)} works",
        )
    if plan.offload == "optimizer" and not found.separate:
        raise PlanError(
            f"{plan}: {kind} cannot have its state in host memory", found.why, f"{replace(plan, offload='none')} works"
        )
    if cuts and not (found.elementwise and found.separate):
        raise PlanError(
            f"{plan}: {kind} cannot step parameters that are cut over devices",
            found.why,
            f"{replace(plan, shard=1, tensor=1, expert=1, zero=3, data=plan.shares * plan.tensor)} works: all then "
            "hold them whole",
        )
