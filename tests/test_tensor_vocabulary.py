"""Logits that are cut by their classes give the loss, and all else, that whole ones give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.spec import whole_output
from meshfit.axes.tensor.sliced import SlicedTensor
from meshfit.comm.collectives import copy
from meshfit.comm.group import ThreadGroup, in_threads

CLASSES = 12


def on_threads(work: Callable[[ThreadGroup], Any], degree: int = 2) -> list[Any]:
    return in_threads(ThreadGroup.make(degree), work)


def assert_same(shape: tuple[int, ...], use: Callable[[Tensor], Tensor], *, gathers: bool, degree: int = 2) -> None:
    """``use`` of cut logits gives the result and the gradient of ``use`` of whole ones, with or without a gather."""
    base = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = base.clone().requires_grad_()
    want = use(x)
    want.sum().backward()

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, bool]:
        own = base.clone().requires_grad_()
        part = shape[-1] // degree
        cut = SlicedTensor.of(copy(own, group).narrow(-1, group.rank * part, part), group)
        assert cut.shape == base.shape
        assert cut.size(-1) == shape[-1]
        assert len(cut) == len(base)
        out = use(cut)
        gathered = any(each.op == "all_gather" for each in group.log)
        out = whole_output(out)
        out.sum().backward()
        return out.detach(), own.grad, gathered

    for out, grad, gathered in on_threads(work, degree):
        torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12)
        assert gathered == gathers


Y = torch.tensor([[3, 0, 11, 7, -100], [2, 2, 5, -100, 6]])
WEIGHT = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
SCALE = torch.tensor(1.7, dtype=torch.float64)
STAYS = {
    "flat": lambda x: F.cross_entropy(x.view(-1, CLASSES), Y.view(-1)),
    "reshape": lambda x: F.cross_entropy(x.reshape(-1, x.size(-1)), Y.view(-1)),
    "flatten": lambda x: nn.CrossEntropyLoss()(x.flatten(0, 1), Y.flatten()),
    "sum": lambda x: F.cross_entropy(x.view(-1, CLASSES), Y.view(-1), reduction="sum"),
    "none": lambda x: F.cross_entropy(x.view(-1, CLASSES), Y.view(-1), reduction="none").square(),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), Y),
    "transposed, none": lambda x: F.cross_entropy(x.permute(0, 2, 1), Y, reduction="none") ** 2,
    "ignored": lambda x: F.cross_entropy(x.view(-1, CLASSES), Y.view(-1).clamp(min=0), ignore_index=2),
    "smoothing": lambda x: F.cross_entropy(x.flatten(0, -2), Y.view(-1), label_smoothing=0.1),
    "weights": lambda x: F.cross_entropy(x.flatten(0, 1), Y.view(-1), weight=WEIGHT),
    "weights, smoothing": lambda x: F.cross_entropy(x.flatten(0, 1), Y.view(-1), WEIGHT, label_smoothing=0.2),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, CLASSES), Y[:, 1:].reshape(-1)),
    "shifted, dots": lambda x: F.cross_entropy(x[..., 1:, :].contiguous().view(-1, CLASSES), Y[:, 1:].reshape(-1)),
    "masked": lambda x: F.cross_entropy(x[Y >= 0], Y[Y >= 0]),
    "last": lambda x: F.cross_entropy(x[:, -1], Y[:, 2].clamp(min=0)),
    "soft cap": lambda x: F.cross_entropy((torch.tanh(x / 3.0) * 3.0).float().double().view(-1, CLASSES), Y.view(-1)),
    "by token": lambda x: F.cross_entropy((x * torch.arange(5.0).double().view(5, 1)).flatten(0, 1), Y.view(-1)),
    "one": lambda x: F.cross_entropy(x[0, 0], Y[0, 0]),
    "select": lambda x: F.cross_entropy(x.select(1, 2), Y[:, 2]),
    "chunks": lambda x: sum(F.cross_entropy(c[0], y[0]) for c, y in zip(x.chunk(2), Y.chunk(2), strict=True)),
    "two losses": lambda x: F.cross_entropy(x.view(-1, CLASSES), Y.view(-1)) + F.cross_entropy(x[:, 0], Y[:, 0]),
}


@pytest.mark.parametrize("use", STAYS.values(), ids=STAYS)
def test_cross_entropy_gathers_nothing(use: Callable[[Tensor], Tensor]) -> None:
    assert_same((2, 5, CLASSES), use, gathers=False)
    assert_same((2, 5, CLASSES), use, gathers=False, degree=4)


def changed(x: Tensor) -> Tensor:
    x = x * 1.0
    x[..., -2:] = -5.0
    return F.cross_entropy(x.view(-1, CLASSES), Y.view(-1))


def scaled(x: Tensor) -> Tensor:
    x = x * 1.0
    x.mul_(2.0)
    x /= 3.0
    return x.logsumexp(-1)


GATHERS = {
    "mean": lambda x: x.square().mean(),
    "softmax": lambda x: x.softmax(-1)[..., 3],
    "log softmax": lambda x: F.nll_loss(x.log_softmax(-1).view(-1, CLASSES), Y.view(-1)),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, CLASSES), WEIGHT.expand(10, -1)),
    "squared error": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "product": lambda x: x @ torch.ones(CLASSES, 2).double(),
    "bias": lambda x: F.cross_entropy((x + WEIGHT).view(-1, CLASSES), Y.view(-1)),
    "one class": lambda x: x[..., 3],
    "classes": lambda x: x[:, :, 2:5],
    "other view": lambda x: x.view(2, -1),
    "both": lambda x: F.cross_entropy(x.view(-1, CLASSES), Y.view(-1)) + x.amax(-1).sum(),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "stacked": lambda x: torch.stack([x, 2 * x]),
    "changed": changed,
    "changed twice": scaled,
    "topk": lambda x: x.topk(3, -1).values,
}


@pytest.mark.parametrize("use", GATHERS.values(), ids=GATHERS)
def test_anything_else_reads_the_whole(use: Callable[[Tensor], Tensor]) -> None:
    assert_same((2, 5, CLASSES), use, gathers=True)


def test_a_learned_scale_gets_all_of_its_gradient() -> None:
    def use(x: Tensor) -> Tensor:
        scale = SCALE.clone().requires_grad_()
        loss = F.cross_entropy((x * scale).flatten(0, 1), Y.view(-1))
        (grad,) = torch.autograd.grad(loss, scale, retain_graph=True)
        return loss + grad

    assert_same((2, 5, CLASSES), use, gathers=False)


def test_wrong_targets_are_told() -> None:
    def work(group: ThreadGroup) -> None:
        F.cross_entropy(SlicedTensor.of(torch.randn(2, 6), group), torch.tensor([3, 12]))

    with pytest.raises(IndexError, match="Target 12 is out of bounds"):
        on_threads(work)


def test_a_view_is_not_changed_in_place() -> None:
    def work(group: ThreadGroup) -> None:
        SlicedTensor.of(torch.randn(2, 3, 6), group).view(-1, 12)[0] = 0.0

    with pytest.raises(RuntimeError, match="cut over ranks"):
        on_threads(work)


def test_nothing_is_said_for_a_look() -> None:
    def work(group: ThreadGroup) -> None:
        x = SlicedTensor.of(torch.randn(2, 3, 6), group)
        assert "rank" in repr(x)
        assert (x.shape, x.dtype, x.ndim, x.numel(), x.stride(0)) == ((2, 3, 12), torch.float32, 3, 72, 36)
        assert {x: 1}[x] == 1
        assert not group.log

    on_threads(work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    base = (torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    y = torch.arange(64) % 48
    for auto in (False, True):
        whole = base.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=auto):
            want = F.cross_entropy(whole, y)
        want.backward()

        def work(group: ThreadGroup, auto: bool = auto) -> tuple[Tensor, Tensor]:
            own = base[:, group.rank * 24 :][:, :24].clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=auto):
                out = F.cross_entropy(SlicedTensor.of(own, group), y)
            return out.detach(), torch.autograd.grad(out, own)[0]

        found = on_threads(work)
        assert all(out.dtype == want.dtype for out, _ in found)
        torch.testing.assert_close(found[0][0], want.detach(), rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(torch.cat([grad for _, grad in found], -1), whole.grad, rtol=1e-2, atol=1e-4)
