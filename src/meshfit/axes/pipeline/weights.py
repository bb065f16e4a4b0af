"""Weights from the ranks of a pipeline, one tensor at a time: no rank but one need ever hold the whole model."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.comm.objects import all_gather_object


def collect(
    mine: Mapping[str, Mapping[str, Tensor]], owners: Mapping[str, int], group: dist.ProcessGroup, *, keep: bool
) -> dict[str, dict[str, Tensor]]:
    """Tensors that go with parameters and buffers, of all ranks, on the CPU: by the name of the parameter, then by one
    of their own. Each comes from its owner. Ranks that do not ``keep`` them hold one at a time. All ranks call it."""
    rank = dist.get_rank(group)
    said = {
        name: {key: (tuple(t.shape), t.dtype) for key, t in many.items()}
        for name, many in mine.items()
        if owners.get(name) == rank
    }
    every = all_gather_object(said, group)
    nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    found: dict[str, dict[str, Tensor]] = {}
    for name, owner in owners.items():
        for key, (shape, dtype) in every[owner].get(name, {}).items():
            own = rank == owner
            tensor = mine[name][key].detach() if own else torch.empty(shape, dtype=dtype, device=device)
            tensor = tensor.to(device).contiguous()
            dist.broadcast(tensor, group=group, group_src=owner)
            if keep:
                found.setdefault(name, {})[key] = tensor.cpu().clone()
    return found
