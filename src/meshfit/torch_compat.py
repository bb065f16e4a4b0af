"""Every private or version-dependent piece of torch that meshfit leans on, in one place; tests/test_compat.py
checks each. Supported: torch 2.11 to 2.13."""

import torch
import torch.distributed as dist

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Take ``group["fused"] = True`` after construction, and then ``found_inf`` and ``grad_scale`` as attributes."""

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""``all_gather_into_tensor`` until torch 2.12."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""``reduce_scatter_tensor`` until torch 2.12."""


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: what it calls is computed again."""
    return torch._C._current_graph_task_id() != -1
