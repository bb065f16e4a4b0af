"""The step: clipping, skipping, scaling, averaging."""

import copy
import math

import pytest
import torch
from torch import nn

from meshfit.axes.precision import LossScale
from meshfit.exchange.update import Average, Update, fuse, total_norm
from meshfit.step import Reading
from meshfit.transfer import HostCopy

CPU = torch.device("cpu")


def with_gradients(seed: int = 0) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model(torch.randn(8, 4)).square().sum().backward()
    return model, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("clip", [0.1, 1e9])
@pytest.mark.parametrize("correction", [1.0, 0.25])
def test_clips_like_torch(optimizer, clip: float, correction: float) -> None:
    model, gradients = with_gradients()
    reference = copy.deepcopy(model)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        p.grad = q.grad * correction
    want = nn.utils.clip_grad_norm_(reference.parameters(), clip)
    optimizer(reference.parameters(), lr=0.1).step()
    updated = Update(optimizer(model.parameters(), lr=0.1), clip=clip)(gradients, torch.tensor(1.0), correction)
    torch.testing.assert_close(torch.tensor(updated.norm), want)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nothing_moves_when_not_finite(where: str, value: float) -> None:
    model, gradients = with_gradients()
    before = copy.deepcopy(model.state_dict())
    update = Update(torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    if where == "gradient":
        gradients[1][0] = value
    updated = update(gradients, torch.tensor(value if where == "loss" else 1.0))
    assert not updated.taken
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_loss_scale_is_taken_out_and_follows_overflow() -> None:
    model, gradients = with_gradients()
    reference = copy.deepcopy(model)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    scale = LossScale(CPU, start=8.0, growth_interval=2)
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), scale=scale, clip=1.0)
    torch._foreach_mul_(gradients, 8.0)
    update(gradients, torch.tensor(1.0))
    assert nn.utils.clip_grad_norm_(reference.parameters(), 1.0) > 1.0
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)
    gradients[0][0] = float("inf")
    update(gradients, torch.tensor(1.0))
    assert scale.value == 4.0
    gradients[0][0] = 0.0
    update(gradients, torch.tensor(1.0))
    update(gradients, torch.tensor(1.0))
    assert scale.value == 8.0


def test_takes_the_fused_kernel_unless_the_user_chose() -> None:
    params = lambda: list(nn.Linear(2, 2).parameters())
    assert fuse(torch.optim.AdamW(params()))
    assert Update(torch.optim.SGD(params(), lr=0.1, fused=True)).fused
    assert not Update(torch.optim.AdamW(params()), may_fuse=False).fused
    assert not fuse(torch.optim.AdamW(params(), foreach=False))
    assert not fuse(torch.optim.AdamW(params(), fused=False))
    assert not fuse(torch.optim.RMSprop(params()))


def test_norm_over_all() -> None:
    parts = [torch.randn(3, 4), torch.randn(5), torch.randn(1)]
    torch.testing.assert_close(total_norm(parts), torch.cat([p.flatten() for p in parts]).norm())
    assert total_norm([]) == 0


def test_average_follows_and_swaps() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = Average(model, 0.9)
    nn.init.constant_(model.weight, 2.0)
    average.update()
    average.swap()
    torch.testing.assert_close(model.weight.item(), 1.1)
    average.swap()
    assert model.weight.item() == 2.0


def test_momentum_of_a_parameter_that_comes_later() -> None:
    """Fused like not fused, when a parameter gets its first gradient after others."""
    ends = []
    for fused in (True, False):
        early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        update = Update(torch.optim.SGD([early, late], lr=0.1, momentum=0.9), may_fuse=fused)
        for step in range(4):
            early.grad, late.grad = torch.full((3,), 1.0 + step), torch.full((2,), 2.0) if step > 1 else None
            update([g for g in (early.grad, late.grad) if g is not None], torch.tensor(1.0))
        ends.append((early.detach(), late.detach()))
    torch.testing.assert_close(*ends)


def test_norm_counts_both_parts_of_complex_gradients() -> None:
    parts = [torch.tensor([3.0 + 4.0j]), torch.tensor([12.0])]
    torch.testing.assert_close(total_norm(parts), torch.tensor(13.0), check_dtype=False)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the branch that GPUs take: the decision stays a tensor."""

    def on_device(self: Update, gradients: list, norm: float, loss: float, factor: float):
        return self._on_device(gradients, torch.tensor(norm), torch.tensor(loss), factor)

    monkeypatch.setattr(Update, "_on_host", on_device)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_skipped_step_does_not_advance_the_schedule() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=1.0)
    update = Update(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert update.fused
    rates = []
    for loss in (1.0, float("nan"), 1.0, float("inf"), 1.0):
        p.grad = torch.ones(3)
        rates.append(update.learning_rate)
        updated = update([p.grad], torch.tensor(loss))
        assert isinstance(updated.taken, torch.Tensor)
    update.settle()
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25]
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.state[p]["step"] == 3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("fused", [True, False])
def test_a_constant_factor_is_applied_on_a_device_too(fused: bool) -> None:
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    Update(torch.optim.SGD([p], lr=1.0), may_fuse=fused)([p.grad], 1.0, 0.25)
    assert p.item() == -0.25


def test_a_reading_lets_go_of_the_device_once_it_is_read() -> None:
    reading = Reading(math.nan, 2.0)
    reading._coming, reading._places = HostCopy(torch.tensor([1.0])), [0]  # as on a GPU, where one is on its way
    assert reading.values == [1.0, 2.0]
    assert reading._coming is None
    assert reading.ready
    assert reading.values == [1.0, 2.0]
