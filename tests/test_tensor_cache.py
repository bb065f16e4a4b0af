"""Tensor plans are found once: kept by what the model computes, and found on short sequences where it does the same."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.tensor import cache
from meshfit.axes.tensor.cache import planned
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.program import SHORT, program_of, shorter
from meshfit.axes.tensor.region import TensorPlan
from meshfit.launch.folders import CACHE, cache_folder


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    scale: Tensor

    def __init__(self, *, layers: int = 2, look: Callable[[Tensor], Any] = lambda x: None, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.look = nn.Embedding(40, 16), look
        self.register_buffer("scale", torch.tensor([scale]))
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(layers))
        self.head = nn.Linear(16, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        self.look(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Placed(Net):
    places: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.randn(100, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[None, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def tokens(length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(40, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path))
    return tmp_path / "tensor-plans"


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the batches that were planned with."""
    found: list[tuple[int, ...]] = []

    def noted(model: nn.Module, run: Any, degree: int, *, by_rows: bool = False) -> TensorPlan:
        def seen(twin: nn.Module) -> Any:
            twin.register_forward_pre_hook(lambda m, args: found.append(tuple(args[0].shape)))
            return run(twin)

        return plan_tensor(model, seen, degree, by_rows=by_rows)

    monkeypatch.setattr(cache, "plan_tensor", noted)
    return found


def test_a_second_start_plans_nothing(kept: Path, plans: list) -> None:
    first = planned(Net(), loss, tokens(8), 2, by_rows=False)
    assert plans
    assert first.share > 0.9
    (file,) = kept.iterdir()
    plans.clear()
    assert planned(Net(), loss, tokens(8), 2, by_rows=False) == first
    assert not plans
    for broken in (file.read_bytes()[:-20], b"", pickle.dumps(first.regions), pickle.dumps(os.getcwd)):
        file.write_bytes(broken)
        plans.clear()
        assert planned(Net(), loss, tokens(8), 2, by_rows=False) == first
        assert plans
    assert [each.name for each in kept.iterdir()] == [file.name]


def test_whatever_differs_is_planned_again(kept: Path, plans: list) -> None:
    def doubled(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * 2

    def by_heads(factors: list[float]) -> Net:  # a constant of the code
        return Net(look=lambda x: x * torch.tensor(factors))

    ways: list[tuple[Net, Any, int, int, bool]] = [
        (Net(), loss, 8, 2, False),
        (Net(), loss, 8, 4, False),
        (Net(), loss, 8, 2, True),
        (Net(), loss, 9, 2, False),
        (Net(), doubled, 8, 2, False),
        (Net(layers=3), loss, 8, 2, False),
        (Net(scale=2.0), loss, 8, 2, False),
        (Net().requires_grad_(False), loss, 8, 2, False),
        (Net(look=lambda x: x.sin()), loss, 8, 2, False),
        (Net(look=torch.no_grad()(lambda x: x.sin())), loss, 8, 2, False),
        (by_heads([1.0]), loss, 8, 2, False),
        (by_heads([2.0]), loss, 8, 2, False),
    ]
    ways[7][0].head.requires_grad_()
    for count, (model, objective, length, degree, by_rows) in enumerate(ways):
        assert len(list(kept.glob("*"))) == count
        planned(model, objective, tokens(length), degree, by_rows=by_rows)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Clipped(Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 / grad.norm()


def test_the_same_operations_elsewhere_are_planned_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan says what happens where modules are called, and holds for the backward that it was tried with."""

    def apart(self: Block, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias)

    planned(Net(), loss, tokens(8), 2, by_rows=False)
    monkeypatch.setattr(Block, "forward", apart)
    found = planned(Net(), loss, tokens(8), 2, by_rows=False)
    assert found == plan_tensor(Net(), lambda twin: loss(twin, tokens(8)), 2, by_rows=False)
    digests = {program_of(Net(look=each.apply), loss, tokens(8)).shaped for each in (Scaled, Clipped)}  # type: ignore
    assert len(digests) == 2


def test_hashes_are_of_one_process(kept: Path, plans: list) -> None:
    for number in (1, 2):  # transformers keeps one in the configuration of what a model generates
        model = Net()
        model.settings = SimpleNamespace(vocabulary=40, _object_hash=number)  # type: ignore[assignment]
        planned(model, loss, tokens(8), 2, by_rows=False)
    assert len(list(kept.iterdir())) == 1
    model.settings = SimpleNamespace(vocabulary=41, _object_hash=2)  # type: ignore[assignment]
    planned(model, loss, tokens(8), 2, by_rows=False)
    assert len(list(kept.iterdir())) == 2


def test_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: list) -> None:
    for said in ("0", ""):
        monkeypatch.setenv(CACHE, said)
        assert cache_folder() is None
    planned(Net(), loss, tokens(8), 2, by_rows=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))  # a folder that cannot be made
    assert planned(Net(), loss, tokens(8), 2, by_rows=False).regions
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "meshfit"


@pytest.mark.parametrize("by_rows", [False, True])
def test_long_sequences_are_planned_on_short_ones(by_rows: bool, plans: list) -> None:
    """As on long ones, to the last collective."""
    found = planned(Net(), loss, tokens(100), 2, by_rows=by_rows)
    assert {shape[1] for shape in plans} == {SHORT + 100 % SHORT}
    want = plan_tensor(Net(), lambda twin: loss(twin, tokens(100)), 2, by_rows=by_rows)
    without = [tuple(replace(region, traffic=()) for region in plan.regions) for plan in (found, want)]
    assert without[0] == without[1]
    assert (found.why, found.notes, found.samples) == (want.why, want.notes, want.samples)
    for ours, theirs in zip(found.collectives, want.collectives, strict=True):
        assert (ours[0], ours[1].op, ours[1].elements) == (theirs[0], theirs[1].op, theirs[1].elements)


def test_the_first_rows_of_a_table_are_no_other_operation(plans: list) -> None:
    """Positions up to the longest sequence: of all of them a slice is no operation, of some it is."""
    net = Placed()
    planned(net, loss, tokens(100), 2, by_rows=False)
    assert {shape[1] for shape in plans} == {SHORT + 100 % SHORT}


def test_what_depends_on_the_length_is_planned_as_it_is(plans: list) -> None:
    planned(Net(look=lambda x: x.sin() if x.shape[1] > 64 else None), loss, tokens(100), 2, by_rows=False)
    assert {shape[1] for shape in plans} == {100}


def test_what_reads_its_values(kept: Path, plans: list) -> None:
    """Is run with them, and planned on short sequences if that makes no difference."""
    model = Net(look=lambda x: bool(x.sum() > 1e9))
    found = planned(model, loss, tokens(100), 2, by_rows=False)
    assert {shape[1] for shape in plans} == {36}
    plans.clear()
    assert planned(model, loss, tokens(100), 2, by_rows=False) == found
    assert not plans


def test_what_cannot_be_run_twice_is_planned_as_it_is(kept: Path, plans: list) -> None:
    calls: list[int] = []

    def picky(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) < 3:
            raise ValueError("not yet")
        return loss(model, batch)

    assert program_of(Net(), picky, tokens(8)) is None
    calls.clear()
    assert planned(Net(), picky, tokens(100), 2, by_rows=False).regions
    assert {shape[1] for shape in plans} == {100}
    assert not kept.exists()


def test_what_is_cut_short() -> None:
    images, mask = torch.zeros(2, 3, 100, 100), torch.zeros(2, 100, 7)
    short = shorter({"x": images, "more": [mask, 5]})
    assert short["x"].shape == (2, 3, 36, 36)
    assert (short["more"][0].shape, short["more"][1]) == ((2, 36, 7), 5)
    assert shorter((torch.zeros(100, 64),)) is None
