"""A model that a function builds on meta: its tensors, made one by one, are bit for bit those of the function."""

import copy
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import meshfit
from benchmarks.zoo import CASES, Case
from meshfit.axes import fill
from meshfit.checkpoint.export import export
from meshfit.deferred import Deferred, Unfollowable


def both(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor], Deferred]:
    """What the function gives run plainly, and by parts."""
    torch.manual_seed(3)
    want = build()
    torch.manual_seed(3)
    deferred = Deferred(build)
    values = dict(deferred.values())
    named = dict(deferred.model.named_parameters(remove_duplicate=False))
    made = {name: values[p] if p.is_meta else p.detach() for name, p in named.items()}
    made |= dict(deferred.model.named_buffers())
    wanted = {**dict(want.named_parameters(remove_duplicate=False)), **dict(want.named_buffers())}
    return {name: t.detach() for name, t in wanted.items()}, made, deferred


def assert_same(build: Callable[[], nn.Module]) -> Deferred:
    want, made, deferred = both(build)
    assert list(want) == list(made)
    for name, tensor in want.items():
        assert torch.equal(tensor, made[name]), name
        assert tensor.stride() == made[name].stride(), name
    return deferred


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_zoo_is_built_bit_for_bit(case: Case) -> None:
    try:
        deferred = assert_same(case.build)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    assert all(p.is_meta for p in deferred.model.parameters())


def seeded_inside() -> nn.Module:
    first = nn.Linear(3, 5)
    torch.manual_seed(11)
    second = nn.Linear(5, 4)
    with torch.random.fork_rng():
        torch.manual_seed(12)
        third = nn.Linear(4, 4)
    state = torch.get_rng_state()
    fourth = nn.Linear(4, 4)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, third, fourth, nn.Linear(4, 2))


def own_generator() -> nn.Module:
    random = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 3))
    for p in model.parameters():
        nn.init.normal_(p, generator=random)
    return model


def several_inits() -> nn.Module:
    model = nn.Sequential(
        *(nn.Linear(20, 20) for _ in range(5)), nn.Embedding(7, 20, padding_idx=2), nn.Conv2d(3, 8, 3)
    )
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[1].weight, std=0.5)
    nn.init.sparse_(model[2].weight, 0.3)
    nn.init.eye_(model[3].weight)
    with torch.no_grad():
        model[4].weight[:10] = model[3].weight[10:] + torch.randn(10, 20)
        model[0].weight.mul_(2).clamp_(-0.3, 0.3)
    return model.to(memory_format=torch.channels_last).bfloat16()


def as_in_old_code() -> nn.Module:
    model = nn.Linear(8, 8)
    model.first = nn.Parameter(torch.Tensor(5, 6))
    nn.init.xavier_uniform_(model.first)
    model.second = nn.Parameter(torch.FloatTensor(4, 4).uniform_(-1, 1))
    model.weight.data /= model.weight.data.norm()
    return model


def memory_that_is_shared() -> nn.Module:
    """On the CPU ``cpu()`` and ``to("cpu")`` return the tensor itself."""
    model = nn.Sequential(nn.Linear(20, 20), nn.LSTM(5, 6))
    model[0].weight.data.cpu().normal_()
    model[0].bias.data.to("cpu", torch.float32).fill_(3.0)
    model[0].weight.data.to(device="cpu", non_blocking=True)[3:].mul_(2)
    other = copy.deepcopy(model[0])
    nn.init.normal_(model[0].weight)
    return nn.Sequential(model.to("cpu"), other).half().to("cpu", torch.float64)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.5, 4)] + torch.arange(3).tolist()
        self.first = nn.Linear(8, 4 + len(rates))
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.tied = nn.Linear(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.tied.weight = nn.Parameter(self.head.weight.detach().t())
        self.register_buffer("noise", torch.rand(6))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.rates = torch.linspace(0, 1, 3)
        nn.utils.parametrizations.weight_norm(self.first)
        assert self.first.bias.device.type == "cpu"


def another_default_dtype() -> nn.Module:
    """As scripts build a model in double precision, or in half: numbers are drawn, and rounded, in that."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(3, 4)
        model.table = nn.Parameter(torch.randn(5, 4) / 3)
        model.register_buffer("scale", torch.full((2,), 0.1) * (torch.arange(2) / 3))
        return model
    finally:
        torch.set_default_dtype(before)


BUILDS = (
    another_default_dtype,
    seeded_inside,
    own_generator,
    several_inits,
    as_in_old_code,
    memory_that_is_shared,
    Odd,
)


@pytest.mark.parametrize("build", BUILDS)
def test_random_numbers_come_in_their_order(build: Callable[[], nn.Module]) -> None:
    deferred = assert_same(build)
    if build is Odd:
        assert torch.equal(deferred.model.rates, torch.linspace(0, 1, 3))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_parameter_at_a_time() -> None:
    """Also where all are initialised a second time at the end, as transformers does."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
        for p in model.parameters():
            nn.init.normal_(p) if p.dim() > 1 else nn.init.zeros_(p)
        return model

    before = resident()
    deferred, most = Deferred(build), 0
    for _, value in deferred.values():
        most = max(most, resident() - before)
        assert value.isfinite().all()
    assert most < 5 * 2048 * 2048 * 4  # of twelve


@functools.cache
def table(size: int) -> tuple[Tensor, ...]:
    return torch.arange(size) * 2.0, torch.ones(size)


@functools.lru_cache(maxsize=4)
def bounded(size: int) -> Tensor:
    return torch.arange(size) * 3.0


def uses_caches() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", table(4)[0] + bounded(4))
    return layer


def test_caches_of_functions_keep_no_tensor_without_values() -> None:
    """They outlive the model on meta, and the next one is built with them (e3nn's Clebsch-Gordan coefficients)."""
    Deferred(uses_caches)
    assert table.cache_info().currsize == bounded.cache_info().currsize == 0
    assert_same(uses_caches)
    assert uses_caches().table.tolist() == [0.0, 5.0, 10.0, 15.0]


def reads_weights() -> nn.Module:
    layer = nn.Linear(4, 4)
    if layer.weight.sum() > 0:
        layer.bias.data.zero_()
    return layer


def changes_what_it_was_given() -> nn.Module:
    given = torch.from_numpy(torch.zeros(4, 4).numpy())
    given.normal_()
    return nn.Linear(4, 4)


def writes_by_numpy() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight)
    layer.weight.data.numpy()[:] = 2
    return layer


@pytest.mark.parametrize("build", [reads_weights, changes_what_it_was_given, writes_by_numpy])
def test_what_cannot_be_put_off_is_said(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(Unfollowable):
        Deferred(build)


def test_plans_for_a_large_model_are_tried_on_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    deferred = Deferred(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 2)))
    whole = fill.rehearsal(deferred)
    assert torch.equal(whole[2].weight, dict(deferred.values())[deferred.model[2].weight])
    monkeypatch.setattr(fill, "LARGEST", 10)
    few = fill.rehearsal(deferred)
    assert few[0].weight is not few[3].weight
    assert few[0].weight.data_ptr() == few[3].weight.data_ptr()
    assert few(torch.randn(3, 16)).isfinite().all()


@pytest.mark.parametrize("saved", ["one file", "several files", "state dict"])
def test_weights_of_a_file_are_read_when_they_are_needed(saved: str, tmp_path: Path) -> None:
    trained = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
    trained(torch.randn(8, 30))
    path = tmp_path / "weights.pt"
    torch.save(trained.state_dict(), path)
    if saved != "state dict":
        target = tmp_path / ("weights.safetensors" if saved == "one file" else "folder")
        export(path, target, shard=2000)
        path.unlink()
        path = target

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
        assert not meshfit.load_weights(model, path)
        return model

    deferred = assert_same(build)
    values = dict(deferred.values())
    assert torch.equal(values[deferred.model[0].weight], trained[0].weight)
    assert torch.equal(deferred.model[1].running_mean, trained[1].running_mean)
