"""Large models: what a context plan is proven on, what that takes, and that it is found once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.context import axis, check, few_blocks
from meshfit.axes.context.axis import plan_context
from meshfit.axes.context.few_blocks import with_few_blocks
from meshfit.axes.context.piece import RULES, Piece
from meshfit.axes.prove import Refused
from meshfit.launch.folders import CACHE

WIDTH = 24


class Block(nn.Module):
    """Attention and an MLP, or what a wrong rule is known of."""

    def __init__(self, index: int, *, scale: float = 1.0, wrong: bool = False):
        super().__init__()
        self.layer_idx, self.scale, self.wrong, self.act = index, scale, wrong, torch.tanh
        self.qkv, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=mask is None).transpose(1, 2).flatten(2)
        if self.wrong:
            made = F.layer_norm(made, (WIDTH,))
        return (x + self.scale * self.act(self.mlp(made)),)


class Net(nn.Module):
    def __init__(self, blocks: list[Block]):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            (x,) = block(x)
        return self.head(x)


def other_function() -> Net:
    """The fourth block differs by a function alone."""
    model = Net([Block(i) for i in range(6)])
    setattr(model.blocks[3], "act", torch.sigmoid)  # noqa: B010
    return model


class LooksInside(Net):
    def forward(self, ids: Tensor) -> Tensor:
        assert all(block.get_submodule("mlp") for block in self.blocks)
        return super().forward(ids)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def tokens(length: int = 32) -> tuple[Tensor, Tensor]:
    ids = torch.randint(40, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def left(model: nn.Module) -> set[str]:
    """Blocks that still have their weights."""
    return {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("blocks.")}


@pytest.fixture
def _wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes back from a norm."""
    rule = lambda func, x, *args, **kwargs: Piece(func(x.local.detach(), *args, **kwargs), x.span, x.group)
    monkeypatch.setitem(RULES, "layer_norm", rule)


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has weights is."""
    torch.manual_seed(0)
    monkeypatch.setattr(few_blocks, "SMALL", 0)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize(
    ("model", "stay"),
    [
        (lambda: Net([Block(i) for i in range(6)]), {"0", "5"}),
        (lambda: Net([Block(i, scale=0.5 + i % 2) for i in range(6)]), {"0", "1", "4", "5"}),
        (other_function, {"0", "3", "5"}),
        (lambda: Net([Block(i) for i in range(2)]), {"0", "1"}),
        (lambda: LooksInside([Block(i) for i in range(4)]), {"0", "1", "2", "3"}),
    ],
    ids=["alike", "of two kinds", "another function", "too few", "the model looks into them"],
)
def test_of_blocks_that_are_alike_the_first_and_the_last_stay(model: Any, stay: set[str]) -> None:
    whole = model()
    thin = with_few_blocks(whole, loss, tokens())
    assert left(thin) == stay
    assert left(whole) == {str(i) for i in range(len(whole.blocks))}
    assert left(with_few_blocks(whole, loss, tokens(), ["blocks.1.mlp"])) == stay | {"1"}


def test_a_small_model_is_tried_as_a_whole() -> None:
    whole = Net([Block(i) for i in range(6)])
    assert with_few_blocks(whole, loss, tokens()) is whole


@pytest.mark.usefixtures("_large", "_wrong")
@pytest.mark.parametrize("wrong", [range(1), range(3, 4), range(5, 6), range(6)], ids=str)
def test_a_block_that_is_wrong_is_found_wherever_it_is(wrong: range) -> None:
    """One that differs from the others by its attributes is a kind of its own."""
    with pytest.raises(Refused, match=r"is off by|has no gradient"):
        plan_context(Net([Block(i, wrong=i in wrong) for i in range(6)]), loss, tokens(), 2)


def test_a_second_start_neither_finds_nor_proves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    first = plan_context(Net([Block(0)]), loss, tokens(), 2)
    assert first.beginnings
    with monkeypatch.context() as patched:
        for name in ("find", "check"):
            patched.setattr(axis, name, lambda *args: pytest.fail("found again"))
        assert plan_context(Net([Block(0)]), loss, tokens(), 2) == first
    for other in (
        lambda: plan_context(Net([Block(0)]), loss, tokens(), 4),
        lambda: plan_context(Net([Block(0)]), loss, tokens(64), 2),
        lambda: plan_context(Net([Block(0)]), loss, tokens(), 2, (), "ulysses"),
        lambda: plan_context(Net([Block(0, scale=2.0)]), loss, tokens(), 2),
    ):
        before = len(list((tmp_path / "context-plans").iterdir()))
        assert other().beginnings
        assert len(list((tmp_path / "context-plans").iterdir())) == before + 1


@pytest.mark.usefixtures("_wrong")
def test_what_is_refused_is_tried_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    for _ in range(2):
        with pytest.raises(Refused):
            plan_context(Net([Block(0, wrong=True)]), loss, tokens(), 2)


@pytest.mark.parametrize("large", [False, True])
def test_a_large_model_is_tried_in_single_precision(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.dtype] = []
    compare = check._compare
    monkeypatch.setattr(check, "LARGE", 0 if large else 2**27)
    monkeypatch.setattr(
        check, "_compare", lambda *args: (tried.append(args[2].left["head.weight"].dtype), compare(*args))
    )
    plan_context(Net([Block(0)]), loss, tokens(), 2)
    assert set(tried) == {torch.float32 if large else torch.float64}


def test_gradients_of_ranks_are_not_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    part = check._part

    def noted(step: Any, batch: Any, ranks: int, dtype: Any, rest: Any, model: nn.Module, group: Any) -> float:
        made = part(step, batch, ranks, dtype, rest, model, group)
        held.append(sum(p.grad is not None for p in model.parameters()))
        return made

    monkeypatch.setattr(check, "_part", noted)
    plan_context(Net([Block(0)]), loss, tokens(), 4)
    assert len(held) >= 8
    assert not any(held)
