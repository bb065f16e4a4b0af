"""Which samples make a batch: by their lengths, by a budget of tokens, as a DataLoader says."""

import random
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import meshfit
from meshfit.data.batching import ByLength, ListedBatches
from meshfit.data.datasets import Recipe, open_source
from meshfit.data.loader import Loader
from tests.distributed import distributed
from tests.ranked import assert_alike
from tests.test_collate import Texts, llama, longest

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTHS = np.random.default_rng(3).integers(1, 60, 1003)


def waste(batches: list[np.ndarray]) -> float:
    """Padding, as a part of all."""
    return 1 - LENGTHS.sum() / sum(int(LENGTHS[ids].max()) * len(ids) for ids in batches)


@pytest.mark.parametrize("tokens", [None, 600])
def test_an_epoch_has_every_sample_once_and_little_padding(tokens: int | None) -> None:
    order = ListedBatches(ByLength(LENGTHS, tokens), 16, seed=1, shuffle=True)
    plain = [order(0, i) for i in range(order.count(0))]
    assert sorted(np.concatenate(plain).tolist()) == list(range(1003))
    assert waste(plain) < 0.1 < waste([np.arange(i, min(i + 16, 1003)) for i in range(0, 1003, 16)])
    other = [order(1, i) for i in range(order.count(1))]
    assert {frozenset(ids.tolist()) for ids in plain}.isdisjoint(frozenset(ids.tolist()) for ids in other)
    firsts = [int(LENGTHS[ids].max()) for ids in plain[:20]]
    assert firsts != sorted(firsts)
    assert all(order.at(0, order.before(0, i)) == i for i in range(order.count(0)))
    if tokens is not None:
        assert max(int(LENGTHS[ids].max()) * len(ids) for ids in plain) <= tokens
    else:
        assert [len(ids) for ids in plain] == [16] * 62 + [11]


def test_without_shuffling_a_budget_keeps_the_order() -> None:
    order = ListedBatches(ByLength(LENGTHS, 600), 16, seed=1, shuffle=False)
    assert np.array_equal(np.concatenate([order(0, i) for i in range(order.count(0))]), np.arange(1003))


def test_a_sample_longer_than_the_budget_is_named() -> None:
    with pytest.raises(meshfit.DataError, match=r"sample \d+ has a length of 59, more than batch_tokens=40"):
        ByLength(LENGTHS, 40)


OWN: dict[str, Any] = {"loss": None, "data": Texts(), "length": "input_ids"}


@pytest.mark.parametrize("plan", ["data=2", "shard=2 microbatches=2", "tensor=2", "pipeline=2 microbatches=2"])
@distributed(world=2)
def test_a_budget_of_tokens_trains_like_one_device(plan: str) -> None:
    run = assert_alike(llama, plan, **OWN, batch_tokens=40, batch_size=None, steps=4)
    sizes = [len(run.loader.order(0, i)) for i in range(run.loader.order.count(0))]
    assert len(set(sizes)) > 1


@distributed(world=3)
def test_buckets_train_like_one_device() -> None:
    assert_alike(llama, "data=3", **{**OWN, "length": lambda sample: len(sample["input_ids"])}, collate=longest)


def fitted(data: Any, **how: Any) -> meshfit.Result:
    torch.manual_seed(0)
    model = how.pop("model", None) or nn.Linear(6, 3)
    given = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "epochs": 2, "devices": "cpu", "progress": False}
    return meshfit.fit(model, data, **{**given, "loss": F.cross_entropy, **how})


def test_a_budget_of_tokens_resumes_at_the_very_sample(tmp_path: Any) -> None:
    how = {"loss": None, "length": "input_ids", "batch_tokens": 40, "epochs": 3}
    torch.manual_seed(0)
    want = fitted(Texts(), model=llama(), **how)
    first = fitted(Texts(), model=llama(), **{**how, "epochs": None}, steps=5, out=tmp_path / "run", checkpoint=5)
    torch.manual_seed(0)
    rest = fitted(Texts(), model=llama(), **how, out=tmp_path / "run", resume=True, plan="data=2")
    series = [step.loss for step in want.history]
    assert [step.loss for step in first.history] == pytest.approx(series[:5], rel=1e-5)
    assert [step.loss for step in rest.history] == pytest.approx(series[5:], rel=1e-4)
    with pytest.raises(meshfit.MeshfitError, match="batching"):
        fitted(Texts(), model=llama(), **{**how, "batch_tokens": 50}, out=tmp_path / "run", resume=True)


X, Y = torch.randn(22, 6, generator=torch.Generator().manual_seed(1)), torch.arange(22) % 3
PAIRS = TensorDataset(X, Y)


def losses(result: meshfit.Result) -> list[float]:
    return [step.loss for step in result.history]


def test_a_loader_is_taken_over() -> None:
    result = fitted(DataLoader(PAIRS, batch_size=8, shuffle=True))
    assert losses(result) == losses(fitted((X, Y), batch_size=8))
    assert "taken from the DataLoader: batches of 8, shuffled" in "\n".join(result.notes)
    result = fitted(DataLoader(PAIRS, batch_size=8, drop_last=True), plan="data=2", valid=DataLoader(PAIRS))
    assert losses(result) == pytest.approx(losses(fitted((X[:16], Y[:16]), batch_size=8, shuffle=False)), rel=1e-5)
    assert "in order, without a short last batch" in "\n".join(result.notes)


def test_a_loaders_collate_is_taken_over() -> None:
    loader = DataLoader(Texts(), batch_size=6, collate_fn=longest)  # type: ignore[arg-type]
    torch.manual_seed(0)
    want = fitted(Texts(), model=llama(), loss=None, batch_size=6, collate=longest, shuffle=False)
    torch.manual_seed(0)
    assert losses(fitted(loader, model=llama(), loss=None, plan="data=2")) == pytest.approx(losses(want), rel=1e-5)
    with pytest.raises(meshfit.DataError, match="a DataLoader with a collate_fn, and collate= is given too"):
        fitted(loader, model=llama(), loss=None, collate=longest)


SAMPLERS: dict[str, Any] = {
    "weighted": {"sampler": WeightedRandomSampler([1.0] * 11 + [0.0] * 11, 16), "batch_size": 8},
    "subset": {"sampler": SubsetRandomSampler(range(3, 15)), "batch_size": 8},
    "batches": {"batch_sampler": [[0, 1, 2], [5], [21, 20, 19, 18]]},
    "batch sampler": {"batch_sampler": BatchSampler(range(22), 8, False)},
}


def ids_of(loader: DataLoader, ranks: int, epoch: int) -> list[list[int]]:
    source = open_source(Recipe.of(loader))
    made = [
        Loader(source=source, batch_size=8, rank=rank, ranks=ranks, device=torch.device("cpu"), shuffle=False)
        for rank in range(ranks)
    ]
    parts = [[batch.microbatches[0] for batch in each.epoch(epoch)] for each in made]
    rows = lambda part: [int((row == X).all(1).nonzero()[0]) for row in part.content[0][: part.samples]]
    return [[i for part in each for i in rows(part)] for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_the_same_batches_on_any_number_of_ranks(name: str) -> None:
    loader = DataLoader(PAIRS, **SAMPLERS[name])
    torch.manual_seed(0)
    want = ids_of(loader, 1, 0)
    torch.manual_seed(7)
    assert ids_of(loader, 3, 0) == want
    assert (ids_of(loader, 1, 1) == want) == name.startswith("batch")
    if name == "weighted":
        assert max(i for batch in want for i in batch) < 11
    elif name == "subset":
        assert sorted(i for batch in want for i in batch) == list(range(3, 15))
    elif name == "batches":
        assert want == SAMPLERS[name]["batch_sampler"]


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return iter([])


def seed_worker(worker: int) -> None:
    """As torch's notes on reproducibility have it."""
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def test_a_worker_init_fn_that_only_seeds_is_left_out() -> None:
    plain, seeded = (fitted(DataLoader(PAIRS, batch_size=4, worker_init_fn=f)) for f in (None, seed_worker))
    torch.testing.assert_close(seeded.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (OwnLoader(PAIRS), "OwnLoader makes its batches in a way of its own"),
        (DataLoader(PAIRS, worker_init_fn=print), "worker_init_fn"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(loader: DataLoader, words: str) -> None:
    with pytest.raises(meshfit.DataError, match=words):
        fitted(loader)


def test_a_short_last_batch_is_dropped_wherever_batches_come_from(tmp_path: Any) -> None:
    documents = [{"x": torch.zeros(6), "n": n} for n in range(1, 8)]
    together = lambda samples: (torch.stack([s["x"] for s in samples]), torch.zeros(len(samples), dtype=torch.int64))
    steps = lambda size, **how: (
        fitted(
            DataLoader(documents, batch_size=size, drop_last=True, collate_fn=together, **how),  # type: ignore[arg-type]
            length="n" if not how else None,
            epochs=1,
        ).steps
    )
    sampler = SubsetRandomSampler(range(7))
    assert [steps(3), steps(3, sampler=sampler)] == [2, 2]
    assert [steps(8), steps(8, sampler=sampler)] == [1, 1]  # there is no other batch


def test_a_source_stays_as_it_was_given() -> None:
    source = meshfit.data.memory((X, Y))
    fitted(DataLoader(source, batch_size=8, drop_last=True))
    fitted(source, batch_size=8, length=[1] * 22)
    assert (source.drop_last, source.batching, source.note) == (False, None, "")


@pytest.mark.parametrize(
    ("length", "said"),
    [
        ([1] * 21, "holds 21 lengths for 22 samples"),
        ([-1] * 22, "sample 0 has a length of -1"),
        ([1.5] * 22, "gives 1.5 for sample 0"),
        (lambda sample: None, "gives None for sample 0"),
        (3, "length=3 is not"),
    ],
)
def test_lengths_that_are_none(length: Any, said: str) -> None:
    with pytest.raises(meshfit.MeshfitError, match=said):
        fitted((X, Y), length=length)


def test_nothing_to_pack_or_to_batch() -> None:
    with pytest.raises(meshfit.DataError, match="no token to pack"):
        fitted([{"input_ids": torch.zeros(0, dtype=torch.int64)}] * 3, pack=8, loss=None)
    with pytest.raises(meshfit.JobError, match="data= holds no samples"):
        fitted([], length="input_ids", batch_tokens=8, loss=None)
