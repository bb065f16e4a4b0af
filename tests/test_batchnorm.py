"""Global BatchNorm: over ranks exactly what one device does over the whole batch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.axes.data import batchnorm
from meshfit.axes.forward import unwrap
from meshfit.comm.group import RankGroup
from tests.distributed import distributed


class WithActivation(nn.BatchNorm2d):
    """A subclass with a forward of its own, as image libraries have them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return F.relu(x)


MAKERS = {
    "2d": lambda: nn.BatchNorm2d(5),
    "no affine": lambda: nn.BatchNorm2d(5, affine=False),
    "cumulative": lambda: nn.BatchNorm2d(5, momentum=None),
    "untracked": lambda: nn.BatchNorm2d(5, track_running_stats=False),
    "own forward": lambda: WithActivation(5),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", [(4, 4, 4), (1, 5, 2), (3, 0, 4)])
@distributed(world=3)
def test_like_the_whole_batch(kind: str, rows: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    alone, spread = MAKERS[kind]().double(), MAKERS[kind]().double()
    batchnorm.apply(spread, RankGroup(dist.group.WORLD))
    for step in range(2):
        torch.manual_seed(step)
        whole = torch.randn(sum(rows), 5, 3, 2, dtype=torch.float64) * 3 + 10
        weight = torch.randn_like(whole)
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        x = whole.clone().requires_grad_()
        (alone(x) * weight).sum().backward()
        counted = rows[rank] > 0
        part = (whole[mine] if counted else whole[:2]).clone().requires_grad_()
        with batchnorm.counting(counted):
            out = spread(part)
        (out * (weight[mine] if counted else 0.0)).sum().backward()
        if counted:
            torch.testing.assert_close(part.grad, x.grad[mine])
    for want, got in zip(alone.parameters(), spread.parameters(), strict=True):
        summed = got.grad.clone()
        dist.all_reduce(summed)
        torch.testing.assert_close(summed, want.grad)
    for want, got in zip(alone.buffers(), spread.buffers(), strict=True):
        torch.testing.assert_close(got, want)


@distributed(world=2)
def test_evaluation_talks_to_nobody() -> None:
    norm = nn.BatchNorm1d(3)
    batchnorm.apply(norm, RankGroup(dist.group.WORLD))
    norm.eval()
    if dist.get_rank() == 0:  # the other rank takes no part: a collective would hang
        assert torch.equal(norm(torch.ones(2, 3)), nn.BatchNorm1d(3).eval()(torch.ones(2, 3)))


@distributed(world=2)
def test_undone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    batchnorm.apply(model, RankGroup(dist.group.WORLD))
    unwrap(model)
    assert "forward" not in model[0].__dict__


@pytest.mark.parametrize("plan", ["data=2", "shard=2", "pipeline=2"])
@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_without_running_statistics(plan: str, loss: Callable[..., torch.Tensor]) -> None:
    """The statistics of a batch are taken in eval mode too: they are no reason to refuse the loss, and the last of the
    49 samples of an evaluation leaves a rank without one."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)).double()
    x = torch.randn(49, 3, 4, 4, dtype=torch.float64)
    y = torch.randint(0, 4, (49,)) if loss is F.cross_entropy else torch.randn(49, 4, dtype=torch.float64)

    def train(plan: str) -> list[float]:
        how = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 2, "batch_size": 16, "valid": (x, y)}
        result = meshfit.fit(copy.deepcopy(model), (x, y), loss=loss, plan=plan, **how)
        measured = meshfit.evaluate(result.model, (x, y), loss=loss, batch_size=16, plan=plan)
        outputs = meshfit.predict(result.model, x, batch_size=16, plan=plan)
        return [*(step.loss for step in result.history), result.metrics["loss"], measured["loss"], float(outputs.sum())]

    assert train(plan) == pytest.approx(train("data=1"), rel=1e-12)


def few(samples: int, plan: str, *size: int) -> meshfit.Result:
    torch.manual_seed(0)
    x = torch.randn(samples, 4, *size)
    first, norm = (nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)) if size else (nn.Linear(4, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(first, norm, nn.Flatten(), nn.LazyLinear(2))
    model(x)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    how = {"batch_size": 16, "epochs": 2, "shuffle": False, "devices": "cpu"}
    return meshfit.fit(
        model, (x, torch.arange(samples) % 2), loss=F.cross_entropy, optimizer=optimizer, plan=plan, **how
    )


@pytest.mark.parametrize("plan", ["data=1", "data=2", "shard=2", "server=1 data=2"])
def test_a_last_batch_of_one_sample_is_refused_as_on_one_device(plan: str) -> None:
    """Its variance would make the running one NaN, with nothing to show it before an evaluation."""
    with pytest.raises(Exception, match="Expected more than 1 value per channel when training"):
        few(17, plan)


def test_a_microbatch_that_is_empty_on_all_ranks_changes_no_statistics() -> None:
    """The last batch has one picture: of two microbatches the second has none."""
    for spread, alone in zip(
        *(few(17, f"{p} microbatches=2", 3, 3).model.buffers() for p in ("data=2", "data=1")), strict=True
    ):
        torch.testing.assert_close(spread, alone)
