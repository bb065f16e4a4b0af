"""Documents packed into rows: the loss of the documents alone, under every plan."""

import sys
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import meshfit
from meshfit.data.datasets import Recipe, open_source
from meshfit.data.packing import rows_of
from tests.distributed import distributed
from tests.few import more
from tests.ranked import assert_alike, assert_near
from tests.test_collate import Texts, llama

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_rows_hold_every_token_once_and_are_nearly_full() -> None:
    lengths = np.random.default_rng(3).integers(0, 90, 1000)
    lengths[7] = 300  # in pieces of 64
    pieces, firsts = rows_of(lengths, 64)
    seen = [np.zeros(n, int) for n in lengths]
    for document, start, stop in pieces.tolist():
        seen[document][start:stop] += 1
    assert all((one == 1).all() for one in seen)
    sizes = np.add.reduceat(pieces[:, 2] - pieces[:, 1], firsts[:-1])
    assert sizes.max() <= 64
    assert lengths.sum() / (64 * len(sizes)) > 0.95
    again = rows_of(lengths, 64)
    assert np.array_equal(pieces, again[0])


def test_a_row_restarts_positions_and_predicts_no_first_token() -> None:
    data = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, -100]}, {"input_ids": [4] * 7}]
    source = open_source(Recipe(data, pack=6, padding=1))
    row = source.few()
    assert row["input_ids"].tolist() == [[4] * 6, [5, 6, 7, 8, 9, 4]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]]
    assert row["labels"].tolist() == [[-100, 4, 4, 4, 4, 4], [-100, 6, 7, -100, -100, -100]]


def test_the_loss_is_that_of_the_documents_alone() -> None:
    torch.manual_seed(0)
    model = llama()
    how: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "devices": "cpu", "progress": False}
    whole = meshfit.fit(model, Texts(), **how, pack=24, steps=1, batch_size=18, shuffle=False)
    torch.manual_seed(0)
    model = llama()
    total, count = torch.zeros(()), 0
    for i in range(18):
        tokens, labels = (torch.tensor([Texts()[i][key]]) for key in ("input_ids", "labels"))
        targets = int((labels[:, 1:] != -100).sum())
        if targets:
            loss = model(tokens, labels=labels).loss * targets
            loss.backward()
            total, count = total + loss.detach(), count + targets
    assert whole.history[0].loss == pytest.approx(float(total / count), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert whole.history[0].grad_norm == pytest.approx(float(norm / count), rel=1e-4)


PLANS = ["data=2", "shard=2 microbatches=2", "tensor=2", "pipeline=2 microbatches=2", "context=2"]


@pytest.mark.parametrize("plan", PLANS)
@distributed(world=2)
def test_packed_rows_train_like_one_device(plan: str) -> None:
    run = assert_alike(llama, plan, loss=None, data=Texts(), pack=16, batch_size=4)
    assert any("18 documents packed into 9 rows of 16, 94% full" in note for note in run.notes)


class Leaky(nn.Module):
    """Takes position_ids, and attends over the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.PretrainedConfig()
        self.embed, self.out = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids).cumsum(1)
        loss = nn.functional.cross_entropy(self.out(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss)  # type: ignore[arg-type]


FIT: dict[str, Any] = {"optimizer": torch.optim.SGD, "steps": 1, "batch_size": 4, "devices": "cpu", "progress": False}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"model": Leaky()}, "Leaky does not keep the documents of a row apart"),
        ({"collate": list}, "collate= and pack= were both given"),
        ({"data": [{"input_ids": [1, 2], "score": 1.0}] * 4}, "does not know how to pack 'score'"),
        ({"data": [{"input_ids": [1, 2], "attention_mask": [1, 0]}] * 4}, "without padding"),
        ({"data": [(torch.zeros(3), 1)] * 4}, "a sample has no such field"),
    ],
)
def test_what_cannot_be_packed_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(meshfit.MeshfitError, match=words):
        meshfit.fit(**{"model": llama(), "data": Texts(), "pack": 16, **FIT, **how})


def by_lengths(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
    """Causal attention within each document, told by the lengths alone, as flash-attention's kernels are."""
    rows, heads, length, width = query.shape
    flat = lambda t: t.transpose(1, 2).reshape(rows * length, heads, width).transpose(0, 1)
    edges = given["cu_seq_lens_q"].tolist()
    assert max(b - a for a, b in pairwise(edges)) <= given["max_length_q"]
    parts = [
        nn.functional.scaled_dot_product_attention(*(flat(t)[:, a:b] for t in (query, key, value)), is_causal=True)
        for a, b in pairwise(edges)
    ]
    return torch.cat(parts, 1).transpose(0, 1).view(rows, length, heads, width), None


def flashing() -> nn.Module:
    hf.AttentionInterface.register("flash_by_lengths", by_lengths)
    hf.AttentionMaskInterface.register("flash_by_lengths", lambda *args, **kwargs: None)
    model: Any = llama()
    model.config._attn_implementation_internal = "flash_by_lengths"  # by its own way it would look for a package
    return model


@pytest.mark.parametrize("plan", [more("data=2"), "shard=2 microbatches=2"])
@distributed(world=2)
def test_kernels_are_given_the_lengths_of_documents(plan: str) -> None:
    asked = {"loss": None, "data": Texts(), "pack": 16, "batch_size": 4}
    run = assert_alike(flashing, plan, **asked)
    alone = assert_alike(llama, plan, **asked)
    assert_near(dict(run.model.state_dict()), dict(alone.model.state_dict()))


def test_kernels_by_length_are_refused_where_they_would_not_be_given_them() -> None:
    with pytest.raises(meshfit.PlanError, match=r'(?s)context=2: pack=.*attn_implementation="sdpa"'):
        meshfit.fit(flashing(), Texts(), pack=16, plan="context=2", **FIT)
