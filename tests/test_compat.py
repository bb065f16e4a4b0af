"""Every private piece of torch that meshfit leans on is there and does what is expected of it."""

import torch
from torch import nn

from meshfit import torch_compat


def test_fused_optimizers_take_what_they_are_told_on_the_device() -> None:
    """Set after construction; ``found_inf`` skips the step, ``grad_scale`` divides the gradient."""
    for kind in torch_compat.FUSED_OPTIMIZERS:
        weight = nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)
        optimizer.param_groups[0]["fused"] = True
        weight.grad = torch.ones(3) * 4
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
        optimizer.step()
        assert torch.equal(weight, torch.ones(3))
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
        optimizer.step()
        plain = nn.Parameter(torch.ones(3))
        plain.grad = torch.ones(3)
        kind([plain], lr=0.1, fused=False, foreach=False).step()
        torch.testing.assert_close(weight.detach(), plain.detach())


def test_gather_is_there() -> None:
    assert callable(torch_compat.all_gather_single)


def test_loss_scale_kernel_is_there() -> None:
    assert callable(torch._amp_update_scale_)
