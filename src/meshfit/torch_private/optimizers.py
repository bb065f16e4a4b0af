"""Optimizers: hooks of a step, and loss scales on the device."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional

update_loss_scale_ = torch._amp_update_scale_
"""Of ``GradScaler``, on the device."""

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Take ``group["fused"] = True`` after construction, and then ``found_inf`` and ``grad_scale`` as attributes."""


def called_step(optimizer: Any) -> None:
    """Its ``step`` counts as called: or schedulers warn."""
    optimizer._opt_called = True


def step_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Called before and after its ``step``."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(before.values()), list(after.values())


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that hold them."""


def without_step_hooks(optimizer: Any) -> None:
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def takes_loss_scale(optimizer: Any) -> None:
    """A fused one then reads ``found_inf`` and ``grad_scale``; torch sets it in the constructor alone."""
    optimizer._step_supports_amp_scaling = True
