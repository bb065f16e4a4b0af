"""``verify`` tells rounding from a bug: equal, different, or that it cannot be told; and where it begins."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import meshfit
from meshfit.data.datasets import open_source
from meshfit.job import Job
from meshfit.proof.compare import LIMITS, Quantity, compare, raised
from meshfit.proof.double import doubled
from meshfit.proof.training import Trained, Variant, train
from meshfit.verify import Verdict

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + 2 * (X[:, 1] > 0)


def verified(model: Any, plan: str = "data=2", data: Any = (X, Y), **how: Any) -> Verdict:
    defaults = {"loss": F.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "batch_size": 16}
    return meshfit.verify(model, data, plan=plan, devices="cpu", **(defaults | how))


def is_spread() -> bool:
    return dist.is_initialized()


class Scaled(torch.autograd.Function):
    """A bug: on one of several ranks, gradients are too large."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad * ctx.times if is_spread() and dist.get_rank() == 1 else grad, None


class ScalesGradients(nn.Module):
    def __init__(self, times: float):
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.times)  # type: ignore[no-any-return]


def steep(*inside: nn.Module) -> nn.Module:
    """Twelve layers that magnify a rounding until fp32 is of no use, with ``inside`` after the first."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers[:2], *inside, *layers[2:], nn.Linear(8, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0)
    return model


# Rounding


def test_rounding_that_a_training_magnifies_is_told_from_a_bug_in_fp64() -> None:
    verdict = verified(steep)
    assert (verdict.answer, verdict.decided_in, verdict.exit_code) == ("equal", "fp64", 0), verdict
    assert any(note.startswith("in fp32 rounding could hide a bug: ") for note in verdict.notes)
    assert all(row.limit < 1e-5 for row in verdict.rows)


def test_a_difference_in_fp32_that_is_none_in_fp64_is_called_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfit.proof.compare.BEYOND", 0.0)  # as if one device had been measured nearer to itself
    verdict = verified(steep)
    assert verdict.answer == "equal", verdict
    assert verdict.notes[-1].endswith("is equal: in fp32 rounding grew over the steps"), verdict.notes


@pytest.mark.parametrize("times", [1.01, 1.0005])
def test_a_bug_is_found_where_rounding_is_as_large(times: float) -> None:
    verdict = verified(lambda: steep(ScalesGradients(times)))
    assert (verdict.answer, verdict.decided_in, verdict.exit_code) == ("different", "fp64", 1), verdict
    assert verdict.first == "the gradient of 0.weight"  # rank 0's own modules are right


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer))
        self.around = nn.Conv2d(inner, outer, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.around(x))


def resnet() -> nn.Module:
    return nn.Sequential(Residual(3, 8), Residual(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def test_a_residual_network_is_equal_and_biases_before_batchnorm_are_rounding() -> None:
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    verdict = verified(resnet, data=(images, Y), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    assert verdict.equal, verdict
    assert verdict.noise == [f"{i}.{which}.0.bias" for i in (0, 1) for which in ("first", "second")]


def test_a_limit_is_raised_by_what_was_measured_tenfold_at_most() -> None:
    assert raised(1e-4, 1e-6) == 1e-4
    assert raised(1e-4, 2e-4) == pytest.approx(6e-4)
    assert raised(1e-4, 0.5) == pytest.approx(1e-3)
    assert Quantity("weights", 5e-4, raised(1e-4, 2e-4), rounding=2e-4, fixed=1e-4).equal
    assert not Quantity("weights", 5e-3, raised(1e-4, 0.5), rounding=0.5, fixed=1e-4).equal
    assert not Quantity("weights", 5e-3, raised(1e-4, 0.5), rounding=0.5, fixed=1e-4).beyond_rounding
    assert Quantity("weights", 5e-3, raised(1e-4, 1e-6), rounding=1e-6, fixed=1e-4).beyond_rounding
    assert Quantity("weights", float("nan"), 1e-4, fixed=1e-4).beyond_rounding


def trained(gradients: dict[str, float], weights: dict[str, float] | None = None) -> Trained:
    kept = {name: torch.full((4,), value) for name, value in (weights or gradients).items()}
    made = {name: torch.full((4,), value) for name, value in gradients.items()}
    state = {(name, "exp_avg"): tensor for name, tensor in kept.items()}
    return Trained([1.0], [1.0], made, kept, {}, {}, state, False, list(gradients))


def test_a_tensor_is_left_out_by_its_whole_name() -> None:
    """p.1's gradient is rounding; p.10 is wrong."""
    names = [f"p.{i}" for i in range(11)]
    gradients = dict.fromkeys(names, 1.0) | {"p.1": 1e-8}
    again = trained(gradients | {"p.1": -3e-8})
    right = dict.fromkeys(names, 1.0)
    want = trained(gradients, right)
    noisy = trained(gradients | {"p.1": 2e-8}, right | {"p.1": 1.5})
    found = compare(want, noisy, [again], LIMITS["fp32"])
    assert found.noise == ["p.1"]
    assert found.equal
    wrong = compare(want, trained(gradients, right | {"p.10": 1.5}), [again], LIMITS["fp32"])
    firsts = {row.name: row.first for row in wrong.rows if not row.equal}
    assert firsts == {"weights": "p.10", "optimizer": "p.10.exp_avg"}


def test_what_is_rounding_on_one_device_must_be_small_under_the_plan() -> None:
    gradients = {"a": 1.0, "b": 1e-8}
    want, again = trained(gradients), trained(gradients | {"b": -1e-8})
    assert compare(want, trained(gradients | {"b": 3e-8}), [again], LIMITS["fp32"]).equal
    row = next(r for r in compare(want, trained(gradients | {"b": 1e-5}), [again], LIMITS["fp32"]).rows if not r.equal)
    assert (row.name, row.first) == ("each gradient", "b")


def test_zero_on_both_is_compared_and_rounding_of_zero_is_not() -> None:
    want = trained({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0})
    same = trained({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.5})  # a LoRA's A has no gradient in the first step
    assert not compare(want, same, [want], LIMITS["fp32"]).equal
    assert compare(
        want, replace(same, gradients={"a": torch.ones(4), "b": torch.full((4,), 1e-9)}), [want], LIMITS["fp32"]
    ).equal


def test_a_step_that_fp16_skips_on_both_sides_is_equal() -> None:
    inf = float("inf")
    want = replace(trained({"a": 1.0, "b": inf}, {"a": 1.0, "b": 1.0}), norms=[inf])
    found = compare(want, want, [replace(want, norms=[1.0])], LIMITS["fp16"])
    assert found.equal, found
    assert not compare(want, replace(want, norms=[1.0]), [want], LIMITS["fp16"]).equal
    assert not compare(want, trained({"a": 1.0, "b": 1.0}), [want], LIMITS["fp16"]).equal


# Where it begins


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad * 0.5 if is_spread() else grad


class SmallBias(nn.Module):
    """Its bias has so small a part of the model's gradient that the whole hardly shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-7 * Halves.apply(self.bias)


def test_the_wrong_gradient_of_one_small_tensor_is_found() -> None:
    verdict = verified(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), SmallBias()))
    assert verdict.answer == "different"
    assert verdict.first == "the gradient of 3.bias"
    rows = {row.name: row for row in verdict.rows}
    assert rows["gradients"].equal
    assert (rows["each gradient"].difference, rows["each gradient"].first) == (pytest.approx(0.5), "3.bias")


class Shifts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 if is_spread() else x


@pytest.mark.parametrize("plan", ["data=2", "shard=2 recompute=full microbatches=2"])
def test_the_first_module_whose_output_differs_is_named(plan: str) -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Tanh(), Shifts()), nn.Linear(16, 4))
    verdict = verified(model, plan)
    assert (verdict.answer, verdict.first) == ("different", "the output of 1.1")


def test_the_last_module_whose_gradient_is_wrong_is_the_first_in_backward() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return grad * 1.5 if is_spread() else grad

    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Wrong.apply(x)  # type: ignore[no-any-return]

    verdict = verified(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Grows(), nn.Linear(16, 4)))
    assert (verdict.answer, verdict.first) == ("different", "the gradient at the output of 1")


def test_where_modules_are_taken_apart_a_parameter_is_named() -> None:
    verdict = verified(lambda: nn.Sequential(nn.Linear(8, 16), Shifts(), nn.Tanh(), nn.Linear(16, 4)), "pipeline=2")
    assert verdict.answer == "different"
    assert verdict.first == "the gradient of 0.weight"


# What cannot be told


class Moody(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * float(np.random.default_rng().random()))


def test_a_training_that_is_not_equal_to_itself_cannot_be_decided() -> None:
    verdict = verified(lambda: nn.Sequential(nn.Linear(8, 4), Moody()))
    assert (verdict.answer, verdict.exit_code) == ("undecided", 3)
    assert "even in fp64 one device is not equal to itself" in verdict.notes[-1]


class AlwaysDrops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def test_random_numbers_that_cannot_be_turned_off_leave_it_undecided() -> None:
    verdict = verified(lambda: nn.Sequential(nn.Linear(8, 4), AlwaysDrops()))
    assert verdict.answer == "undecided"
    assert "own random numbers even in eval mode" in verdict.notes[-1]


class Casts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_where_fp64_cannot_be_run_it_is_undecided() -> None:
    verdict = verified(lambda: steep(Casts()))
    assert (verdict.answer, verdict.decided_in) == ("undecided", "fp32")
    assert verdict.notes[-1].startswith("it cannot be repeated in fp64: ")
    gross = verified(lambda: nn.Sequential(nn.Linear(8, 8), Casts(), Shifts(), nn.Linear(8, 4)))
    assert (gross.answer, gross.decided_in, gross.first) == ("different", "fp32", "the output of 2")


class Rows(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


class Flow(IterableDataset):
    def __iter__(self) -> Any:
        return ((x.numpy(), int(y)) for x, y in zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "data", [(X, Y), Rows(), Flow(), lambda: Rows()], ids=["tensors", "rows", "stream", "function"]
)
def test_a_job_in_fp64_has_all_that_floats_in_double(data: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    asked = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": nn.CrossEntropyLoss(torch.ones(4)), "steps": 1}
    job = Job(**{"model": model, "data": data, "plan": "data=1", "devices": "cpu", **asked})
    wide = doubled(job)
    floats, whole = open_source(wide.data).few(4)
    assert (floats.dtype, whole.dtype) == (torch.float64, torch.int64)
    assert all(t.dtype is torch.float64 for t in wide.model.state_dict().values() if t.is_floating_point())
    assert all(t.dtype is torch.float32 for t in model.state_dict().values() if t.is_floating_point())
    made = train(wide, Variant())
    assert made.gradients["0.weight"].dtype is torch.float64
    assert abs(made.losses[0] - train(job, Variant()).losses[0]) < 1e-6


# Dropout


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.5, training=self.training))


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2 microbatches=2", "tensor=2"])
def test_functional_dropout_is_off_under_every_plan(plan: str) -> None:
    verdict = verified(FunctionalDropout, plan)
    assert verdict.equal, verdict
    assert verdict.notes == ["dropout was off for the comparison: each rank draws its own random numbers"]


def test_batchnorms_that_the_user_froze_stay_so() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    model[1].eval()
    verdict = verified(model)
    assert verdict.equal
    assert next(row for row in verdict.rows if row.name == "buffers").difference == 0.0
