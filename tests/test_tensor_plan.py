"""A plan is found by looking at each kind of block once, and says in a few lines what it does."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo import ZOO, mean_loss
from meshfit.axes.tensor import find as tensor_find
from meshfit.axes.tensor.claim import around
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.region import Cut, TensorPlan
from meshfit.comm.group import ThreadGroup, in_threads
from tests.odd_blocks import NormedHeads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def plan_of(name: str, degree: int = 2) -> TensorPlan:
    case = ZOO[name]
    batch = case.data(4)
    return plan_tensor(case.build(), lambda model: mean_loss(case, model, batch), degree)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "tied-gpt", "mixtral", "bert"])
def test_blocks_by_themselves_give_the_plan_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_of(name)
    monkeypatch.setattr(tensor_find, "SMALL", 0)
    blocks = plan_of(name)
    assert blocks.cuts == whole.cuts
    assert sorted(map(str, blocks.regions)) == sorted(map(str, whole.regions))


def test_each_kind_of_block_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    find_pairs = tensor_find.find_pairs

    def counted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        looked.append(type(model).__name__)
        return find_pairs(model, *args, **kwargs)

    monkeypatch.setattr(tensor_find, "SMALL", 0)
    monkeypatch.setattr(tensor_find, "find_pairs", counted)
    plan = plan_of("llama")
    assert looked == ["LlamaDecoderLayer"]
    assert sum(region.kind == "attention" for region in plan.regions) == 3


def test_weights_are_neither_copied_nor_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_find, "SMALL", 0)
    case = ZOO["llama"]
    model, batch = case.build(), case.data(4)
    before, kept = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    versions = {name: p._version for name, p in kept.items()}
    plan_tensor(model, lambda m: mean_loss(case, m, batch), 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p is kept[name] and p.grad is None for name, p in model.named_parameters())
    assert versions == {name: p._version for name, p in model.named_parameters()}


def test_a_deep_model_is_explained_in_a_few_lines() -> None:
    plan = plan_of("llama")
    lines = plan.explain()
    assert lines[0].startswith("99.3% of the parameters are cut over tensor=2")
    assert "3 x attention  q_proj, k_proj, v_proj by columns, o_proj by rows; sums: 1 forward, 1 backward" in lines
    assert "3 x mlp  gate_proj, up_proj by columns, down_proj by rows; sums: 1 forward, 1 backward" in lines
    assert "embedding  model.embed_tokens along the vocabulary" in lines
    assert "head  lm_head along the vocabulary; its loss is computed from slices of the logits" in lines
    assert any(line.startswith("whole  ") and "layernorm" in line for line in lines)
    assert len(lines) < 9
    copied = plan_of("llama", 4).explain()
    assert any("k_proj, v_proj by columns (each share on 2 ranks)" in line for line in copied), copied


def test_notes_name_the_degrees_that_divide() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.blocks = nn.Embedding(111, 32), nn.Sequential(nn.LayerNorm(32), NormedHeads())
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 111)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.token(x)
            return self.head(self.norm(x + self.blocks(x)))

    torch.manual_seed(0)
    ids = torch.randint(0, 111, (4, 8))
    plan = plan_tensor(Model(), lambda m: F.cross_entropy(m(ids).flatten(0, 1), ids.flatten()), 8)
    assert "blocks.*: 4 heads: tensor=2 or 4" in plan.notes, plan.notes
    assert any("111 entries: tensor=3 or 37" in note for note in plan.notes), plan.notes
    assert "111 entries: tensor=3 or 37" in plan.why["head.weight"]


def test_a_cut_with_copies() -> None:
    cut = Cut("k", 0, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
    whole = torch.arange(12.0).view(4, 3)
    parts = [cut.of(whole, rank) for rank in range(4)]
    assert (cut.copies, cut.size, cut.own) == (2, 4, 2)
    every = in_threads(ThreadGroup.make(4), lambda group: cut.whole(parts[group.rank], group))
    assert all(torch.equal(found, whole) for found in every)


def test_the_module_around_others_by_whole_names() -> None:
    assert around(["blocks.enc/dec.fc1", "blocks.enc/dec.fc2"]) == "blocks.enc/dec"
    assert around(["blocks.10.fc", "blocks.1.fc"]) == "blocks"
    assert around(["a", "b.c"]) == ""
