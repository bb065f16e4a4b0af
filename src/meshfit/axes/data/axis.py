"""Data parallelism: every device holds the whole model and takes its share of each batch.

memory    weights whole on every device (gradients and optimizer state too: see exchange)
traffic   none of its own; exchange sums the gradients. BatchNorm: see axes/data/batchnorm.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.mesh import Mesh
from meshfit.cost import Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicate:
    degree: int

    def apply(self, model: nn.Module, mesh: Mesh, *, same: bool, device: torch.device | None = None) -> None:
        """``same`` says that the ranks' weights are known to be equal; else the first rank's are sent, one at a time
        by way of ``device``."""
        if mesh.world is None or same:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, 0, mesh.world)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)

    def cost(self, trace: Trace) -> tuple[Trace, Cost]:
        """Of the weights alone: gradients belong to the exchange."""
        return trace, Cost(held={"weights": trace.parameter_bytes})


def tied(model: nn.Module) -> dict[str, str]:
    """Parameters that are one tensor: each further name, and the name it is first known by."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return ties


def check_ties(model: nn.Module, ties: dict[str, str]) -> None:
    """A tie that a transform undid would train silently wrong."""
    now = tied(model)
    assert now == ties, f"tied parameters came apart: {sorted(ties.items() ^ now.items())}"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, tied ones under each of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}
