"""Refuses what a model cannot have: in the caller, before any process starts, with the nearest plan that works."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.probe_optimizer import probe_optimizer
from meshfit.axes.order import ORDER
from meshfit.errors import JobError, PlanError
from meshfit.optimizers import Optimizers, needs_closure
from meshfit.plan import DEGREES, Plan
from meshfit.torch_private.modules import has_backward_hooks
from meshfit.torch_private.tensors import has_gradient_hooks
from meshfit.transfer import NO_FLOAT64

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
    if sparse and (plan.devices > 1 or plan.microbatches > 1):
        raise PlanError(
            f"{plan}: {sparse[0] or 'the model'} makes sparse gradients, which no plan sums",
            "sparse=False works under every plan; one device and one microbatch work as it is",
        )
    made_of_others = [name for name, p in model.named_parameters() if hasattr(p, "__tensor_flatten__")]
    if made_of_others and (plan.devices > 1 or plan.server or plan.offloads("parameters")):
        kind = type(model.get_parameter(made_of_others[0])).__name__
        raise PlanError(
            f"{plan}: {made_of_others[0]} is a {kind}, a tensor that is made of others",
            "ranks hold and send plain tensors",
            "one device works as it is; base weights in 4 bits work under every plan as bitsandbytes has them",
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise PlanError(
            f"{lazy[0]} has no shape yet: it is a lazy parameter", "run the model once on a batch before fit"
        )


def check_device(plan: Plan, model: nn.Module, devices: Any) -> None:
    """Refuse what a kind of device has not."""
    if getattr(devices, "kind", "") not in NO_FLOAT64:
        return
    named = (*model.named_parameters(), *model.named_buffers())
    if wide := [name for name, tensor in named if tensor.dtype in (torch.float64, torch.complex128)]:
        raise JobError(
            f"{wide[0]} is in float64, which Apple's GPUs have not", 'model.float(), or devices="cpu", works'
        )
    if plan.precision == "fp16":
        raise PlanError(
            f"{plan}: fp16 needs a loss scale, which was never tried on Apple's GPUs", "precision=bf16, or fp32"
        )


def _check_forward(plan: Plan, model: nn.Module) -> None:
    """Refuse a forward that changes weights, since it changes them differently on each rank; and hooks on parameters,
    which are not sent to ranks, and see no gradient of cut parameters."""
    hooked = [name for name, p in model.named_parameters() if has_gradient_hooks(p)]
    if hooked and (plan.devices > 1 or plan.microbatches > 1 or plan.offloads("parameters")):
        called = "which would not be called" if plan.microbatches == 1 else "which would see that of each microbatch"
        raise PlanError(
            f"{plan}: {hooked[0]} has a hook on its gradient, {called}",
            "clip= and the optimizer see summed gradients; step= can change a loss",
            "without the hook every plan works; one device and one microbatch work as it is",
        )
    backward = [name for name, module in model.named_modules() if has_backward_hooks(module)]
    if backward and plan.partitions_modules:
        raise PlanError(
            f"{plan}: {backward[0] or 'the model'} has a hook on its backward, which would not be called",
            "stages run what was recorded of the forward, not the modules themselves",
            "a torch.autograd.Function in the forward can change a gradient under every plan",
            f"data={plan.devices} works as it is",
        )
    compiled = [name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule"]
    if compiled and plan.tensor > 1:
        raise PlanError(
            f"{plan}: {compiled[0] or 'the model'} is compiled by torch.compile, and cannot be looked into",
            f"compile=block in the plan compiles blocks after they are cut: {replace(plan, compile='block')},",
            "with a model on which torch.compile was not called",
        )
    for name, module in model.named_modules():
        if plan.devices > 1 and getattr(module, "max_norm", None) is not None and isinstance(module, EMBEDDINGS):
            raise PlanError(
                f"{plan}: {name or 'the model'} has max_norm={module.max_norm}",
                "it changes its weights in forward, by each rank's own samples: the replicas would diverge",
                "without max_norm every plan works; one device works as it is",
            )


def check_phases(plan: Plan, names: Sequence[str]) -> None:
    """Refuse phases of a step where a plan can run one loss alone."""
    if len(names) == 1:
        return
    asked = f"{plan}: the step has phases ({', '.join(names)})"
    if plan.server:
        raise PlanError(asked, "a server takes one step for each batch", f"data={plan.data} works")
    if plan.partitions_modules:
        raise PlanError(
            asked,
            f"{'pipeline' if plan.pipeline > 1 else 'branch'}= runs a recording of one loss, cut over ranks",
            f"{plan.without('pipeline', 'branch')} works",
        )
    if plan.exchange != "allreduce":
        raise PlanError(
            asked,
            f"exchange={plan.exchange} averages weights after so many steps of one optimizer",
            f"{replace(plan, exchange='allreduce', every=1, overlap=0)} works",
        )
    if plan.precision == "fp16":
        raise PlanError(
            asked,
            "precision=fp16 scales the loss by one number, and an overflow in one phase would change it for the others",
            f"{replace(plan, precision='bf16')} works",
        )


def check_optimizer(plan: Plan, optimizers: torch.optim.Optimizer | Optimizers) -> None:
    for each in Optimizers.of(optimizers).each:
        (_check_closure if needs_closure(each) else _check_optimizer)(plan, each)


def _check_closure(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that evaluates the loss itself has all gradients at hand, each time, or is not exact."""
    whole = plan.devices == plan.data and not plan.server and plan.exchange == "allreduce"
    if whole and plan.offload in ("none", "activations") and plan.precision != "fp16" and not plan.rounds:
        return
    rounded = ["it steps all parameters at once, where those held in bf16 are stepped some at a time"] * plan.rounds
    raise PlanError(
        f"{plan}: {type(optimizer).__name__} evaluates the loss several times a step",
        "it takes products over all parameters in between, so every device must hold all of them and step itself",
        *rounded,
        f"data={plan.devices} works",
    )


def _check_optimizer(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step what the plan gives it: some parameters at a time, or slices of
    tensors where nobody puts them together, as whole_step.py does."""
    cuts = not plan.server and (plan.shard > 1 or plan.tensor > 1 or plan.expert > 1)  # servers step what is whole
    parts = not plan.server and plan.partitions_modules
    if not cuts and not parts and not plan.offloads("optimizer") and plan.server < 2 and not plan.rounds:
        return
    found = probe_optimizer(optimizer)
    if found.separate:
        return
    kind, why = type(optimizer).__name__, found.why
    if plan.server > 1:
        works = f"{replace(plan, server=1)} works"
        raise PlanError(f"{plan}: each server steps a part of the model, which {kind} cannot", why, works)
    if plan.offloads("optimizer"):
        works = f"{replace(plan, offload='none')} works"
        raise PlanError(f"{plan}: {kind} cannot have its state in host memory", why, works)
    if plan.rounds:
        master = replace(plan, precision=plan.precision.removesuffix("-true"), states="fp32")
        raise PlanError(
            f"{plan}: {kind} cannot step what is held in bf16",
            f"parameters are stepped in fp32, some at a time; {why}",
            f"{master} works",
        )
    whole = plan.without("shard", "tensor", "expert", "pipeline", "branch", offload="none")
    works = f"{whole} works: all then hold them whole"
    if parts:
        raise PlanError(f"{plan}: each rank steps its own modules, which {kind} cannot", why, works)
    raise PlanError(f"{plan}: {kind} cannot step parameters that are cut over devices", why, works)
