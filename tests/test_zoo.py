"""The zoo is fit to judge by: the same on every call, and sensitive to the mistakes it is there to find."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.parity import LOSS_LIMIT, TRIALS, WEIGHT_LIMIT, Trial, distance, judge, reference
from benchmarks.zoo import CASES, IGNORED, ZOO, Case, batches, mean_loss, size, take, train_alone
from tests.few import few

PADDED = ("gpt2", "mixtral", "t5", "tied-gpt", "token-sum", "lstm")

every_case = pytest.mark.parametrize("case", few(CASES, "gpt2", "batchnorm-cnn", "partial"))


def built(case: Case) -> nn.Module:
    try:
        return case.build().train()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


def tensors(data: object) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    return [leaf for part in (data.values() if isinstance(data, dict) else data) for leaf in tensors(part)]


def off(losses: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@every_case
def test_is_the_same_on_every_call(case: Case) -> None:
    first, data = built(case).state_dict(), case.data(12)
    torch.rand(7)  # whatever random numbers were drawn in between
    second = case.build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(len(tensor) == 12 for tensor in tensors(data))
    assert all(torch.equal(a, b) for a, b in zip(tensors(data), tensors(case.data(12)), strict=True))


@every_case
def test_has_the_dtype_it_states(case: Case) -> None:
    floats = [t for t in (*built(case).parameters(), *tensors(case.data(2))) if t.is_floating_point()]
    assert {t.dtype for t in floats} == {case.dtype}


@every_case
def test_draws_no_random_numbers(case: Case) -> None:
    model, batch = built(case), case.data(12)
    before = torch.get_rng_state()
    assert mean_loss(case, model, batch).item() == mean_loss(case, model, batch).item()
    assert torch.equal(before, torch.get_rng_state())


@every_case
def test_learns(case: Case) -> None:
    built(case)
    losses, state = reference(case.name, 18, 8)  # three batches an epoch
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    assert sum(losses[15:18]) < sum(losses[:3])
    assert all(torch.isfinite(value).all() for value in state.values())


@every_case
def test_reference_is_deterministic_and_sums_in_any_order(case: Case) -> None:
    """The limits leave room for rounding: what is beyond them is a mistake."""
    norms, names = batch_norms(built(case)), [name for name, _ in built(case).named_parameters()]
    short = {"samples": 18, "batch_size": 8, "steps": 3}
    losses, state = train_alone(case, **short)
    again, same = train_alone(case, **short)
    assert losses == again
    assert all(torch.equal(state[name], same[name]) for name in state)
    for other in [{"flip": True}] + ([] if norms else [{"parts": 2}, {"parts": 3}]):
        summed, weights = train_alone(case, **short, **other)
        assert off(summed, losses) < LOSS_LIMIT / 10
        assert distance(weights, state, names) < WEIGHT_LIMIT / 5


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_uneven(name: str) -> None:
    """Some batch of every trial has shares whose labels are far from proportional to their samples."""
    case = ZOO[name]
    for samples, batch_size, devices in {(trial.samples, trial.batch_size, trial.devices) for trial in TRIALS}:
        data, worst = case.data(samples), 0.0
        for _, index in zip(range(4), batches(samples, batch_size), strict=False):
            weights = [case.weight_of(take(data, part)) for part in index.tensor_split(devices)]
            shares = [len(part) / len(index) for part in index.tensor_split(devices)]
            assert sum(weights) == case.weight_of(take(data, index))
            worst = max(worst, *(abs(w / sum(weights) - share) for w, share in zip(weights, shares, strict=True)))
        assert worst > 0.05


@pytest.mark.parametrize("name", few([*PADDED, "class-weights", "masked"], "gpt2", "class-weights", "masked"))
def test_weighting_by_samples_is_found_out(name: str) -> None:
    built(ZOO[name])
    wrong = dataclasses.replace(ZOO[name], weight_of=size)
    wanted, _ = reference(name, 18, 8)
    losses, _ = train_alone(wrong, samples=18, batch_size=8, parts=2)
    assert not off(losses, wanted) < 10 * LOSS_LIMIT  # NaN where a part has no label at all


def test_masked_leaves_a_rank_without_labels() -> None:
    for trial in TRIALS:
        targets = ZOO["masked"].data(trial.samples)[1]
        parts = [
            part
            for _, index in zip(range(3), batches(trial.samples, trial.batch_size), strict=False)
            for part in targets[index].tensor_split(min(trial.devices, len(index)))
        ]
        assert any((part == IGNORED).all() for part in parts)
        assert all((targets[index] != IGNORED).any() for index in torch.arange(trial.samples).split(8))


def test_partial_is_partly_trained() -> None:
    case = ZOO["partial"]
    before, (_, after) = case.build().state_dict(), reference("partial", 18, 8)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"frozen.weight", "frozen.bias", "unused"}
    model, data = case.build(), case.data(18)
    used = []
    for _, index in zip(range(3), batches(18, 8), strict=False):
        model.zero_grad()
        mean_loss(case, model, take(data, index)).backward()
        used.append(model.branch.weight.grad is not None)
    assert used == [False, True, False]


def test_zeros_in_place_of_missing_gradients_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted = reference("partial", 18, 8)

    class Zeros(torch.optim.AdamW):
        def step(self, closure=None):
            for parameter in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Zeros)
    _, got = train_alone(ZOO["partial"], samples=18, batch_size=8)
    assert distance(got, wanted, list(wanted)) > WEIGHT_LIMIT


def test_batchnorm_of_each_part_is_found_out() -> None:
    wanted, _ = reference("batchnorm-cnn", 18, 8)
    losses, _ = train_alone(ZOO["batchnorm-cnn"], samples=18, batch_size=8, parts=2)
    assert off(losses, wanted) > 10 * LOSS_LIMIT


def test_tied_gpt_is_tied() -> None:
    model = ZOO["tied-gpt"].build()
    assert model.head.weight is model.token.weight
    _, after = reference("tied-gpt", 18, 8)
    assert torch.equal(after["head.weight"], after["token.weight"])


def test_batches_wrap_after_a_short_one() -> None:
    seen = [index.tolist() for _, index in zip(range(4), batches(18, 8), strict=False)]
    assert [len(index) for index in seen] == [8, 8, 2, 8]
    assert seen[0] == seen[3] == list(range(8))
    assert seen[2] == [16, 17]


def test_judge_tells_apart() -> None:
    case, trial = ZOO["batchnorm-cnn"], Trial(plan="data=3", samples=18)
    losses, state = reference(case.name, 18, 8)
    model = case.build()
    model.load_state_dict(state)

    def spoil(name: str, factor: float) -> nn.Module:
        other = copy.deepcopy(model)
        other.state_dict()[name].mul_(factor)
        return other

    def outcome(losses: list[float], model: nn.Module) -> bool:
        return judge(case, trial, lambda *_: (losses, model)).ok

    assert outcome(losses, model)
    assert not outcome(losses[:-1] + [losses[-1] * (1 + 1e-4)], model)
    assert not outcome(losses[:-1] + [math.nan], model)
    assert not outcome(losses[:-1], model)
    assert not outcome(losses, spoil("0.weight", 1.001))
    assert not outcome(losses, spoil("5.running_mean", 1.01))
    assert not outcome(losses, spoil("5.num_batches_tracked", 2))
    assert not outcome(losses, nn.Sequential(model))


def test_judge_reports_what_was_raised() -> None:
    def raises(case: Case, trial: Trial):
        raise ValueError("no such plan")

    outcome = judge(ZOO["two-inputs"], Trial(plan="data=3", samples=18), raises)
    assert not outcome.ok
    assert outcome.remarks == ("ValueError: no such plan",)
