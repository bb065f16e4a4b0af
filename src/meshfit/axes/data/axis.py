"""Data parallelism: every device holds the whole model and takes its share of each batch.

memory    weights, gradients and optimizer state whole on every device
traffic   gradients, all-reduced once a step: see exchange/allreduce.py. BatchNorm: see axes/data/batchnorm.py
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshfit.axes.axis import Applied, Axis, Splits
from meshfit.axes.buffers import check as check_buffers
from meshfit.axes.buffers.step import Buffers
from meshfit.axes.data import batchnorm
from meshfit.axes.expert import balance
from meshfit.axes.mesh import Mesh
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.place import Placed


class DataAxis(Axis):
    """What depends on the samples of other ranks, along whichever axes samples are split, is made global: BatchNorm,
    auxiliary losses, buffers that a forward writes."""

    word = "data"
    splits = frozenset({Splits.SAMPLES})

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return True

    def apply(self, placed: "Placed", finding: Any) -> "Replicated":
        plan, mesh, model = placed.plan, placed.mesh, placed.model
        replicas = Replicated(model, mesh.over("data"))
        if mesh.batch is not None and plan.batchnorm == "global" and plan.exchange == "allreduce":
            batchnorm.apply(model, mesh.batch)
            replicas.meets = bool(batchnorm.untracked(model))
        if mesh.batch is not None and plan.in_step and not balance.is_apart(plan):
            if placed.staged is None:
                replicas.meets |= balance.apply(model, mesh.batch)
            else:
                replicas.meets |= bool(balance.balanced(placed.staged.skeleton))
                placed.staged.recording = partial(balance.recorded, placed.staged.skeleton, mesh.batch)
        if plan.buffers == "exact" and check_buffers.splits(plan):
            replicas.buffers = Buffers(model, placed.written, mesh.batch, microbatches=plan.microbatches)
        return replicas


class Replicated(Applied):
    """One copy of the model, or of its part, among those on other samples."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None):
        self.model, self.group, self.buffers = model, group, Buffers()


def broadcast(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Have the first rank's weights and buffers on all ranks, one at a time by way of ``device``."""
    if mesh.world is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:  # it gets its values later
            continue
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, 0, mesh.world)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
