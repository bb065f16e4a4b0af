"""Refuses what a model cannot have: in the caller, before any process starts, with the nearest plan that works."""

from dataclasses import replace

import torch
from torch import nn

from meshfit.anatomy.probe_optimizer import probe_optimizer
from meshfit.axes.order import ORDER
from meshfit.errors import JobError, PlanError
from meshfit.plan import DEGREES, Plan
from meshfit.torch_private import has_gradient_hooks

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check(plan: Plan, model: nn.Module) -> None:
    """Refuse a plan under which ``model`` cannot be exact, with the nearest plan that works."""
    _check_forward(plan, model)
    for axis in ORDER:
        if axis.word not in DEGREES or axis.on(plan, model, "cpu"):
            axis.refuse(plan, model)
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


def _check_forward(plan: Plan, model: nn.Module) -> None:
    """Refuse a forward that changes weights, since it changes them differently on each rank; and hooks on parameters,
    which are not sent to ranks, and see no gradient of cut parameters."""
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
                "it changes its weights in forward, by each rank's own samples: the replicas would diverge",
                "without max_norm every plan works; one device works as it is",
            )


def check_optimizer(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step what the plan gives it: slices of tensors, some parameters at a time."""
    cuts = not plan.server and (plan.shard > 1 or plan.tensor > 1 or plan.expert > 1)  # servers step what is whole
    if not cuts and plan.offload != "optimizer" and plan.server < 2:
        return
    kind, found = type(optimizer).__name__, probe_optimizer(optimizer)
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
