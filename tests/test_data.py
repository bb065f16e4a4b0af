"""Data in every form, read once an epoch by every plan alike, and never copied where it need not be."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import meshfit
from meshfit.data.datasets import Map, SampleStream, open_source, sample_count
from meshfit.data.loader import Loader
from meshfit.data.source import Memory

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N, BATCH = 22, 7
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def losses(data: Any, **asked: Any) -> list[float]:
    asked = {"shuffle": False, "epochs": 2, "plan": "data=1", **asked}
    make = lambda params: torch.optim.SGD(params, lr=0.1)
    result = meshfit.fit(Linear, data, loss=F.mse_loss, optimizer=make, batch_size=BATCH, devices="cpu", **asked)
    return [step.loss for step in result.history]


# Forms


class Pairs(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i: int):
        return X[i], Y[i]


class Batched(Pairs):
    def __getitem__(self, i: int):
        raise AssertionError("not asked one by one")

    def __getitems__(self, ids: list[int]):
        assert all(type(i) is int for i in ids)
        return [(X[i], Y[i]) for i in ids]


class Dicts(Pairs):
    def __getitem__(self, i: int):
        return {"x": X[i].numpy(), "labels": Y[i].numpy()}


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Plain:
    """An iterable that is no Dataset."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def generator():
    yield from zip(X, Y, strict=True)


FORMS: dict[str, Any] = {
    "arrays": (X.numpy(), Y.numpy()),
    "list of tensors": [X, Y],
    "dict": {"x": X, "labels": Y},
    "dict of arrays": {"x": X.numpy(), "y": Y.numpy()},
    "TensorDataset": TensorDataset(X, Y),
    "Dataset": Pairs(),
    "Dataset with __getitems__": Batched(),
    "Dataset of dicts": Dicts(),
    "Subset": Subset(Pairs(), range(N)),
    "IterableDataset": Streamed(),
    "iterable": Plain(),
    "list of samples": [(x, y) for x, y in zip(X, Y, strict=True)],
    "list of dicts": [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)],
    "function": lambda: (X, Y),
    "function of a Dataset": Pairs,
    "generator function": generator,
    "function of a generator": lambda: zip(X, Y, strict=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_trains_alike(form: str):
    assert losses(FORMS[form]) == losses((X, Y))


@pytest.mark.parametrize("form", ["arrays", "Dataset of dicts", "IterableDataset", "generator function", "function"])
def test_every_form_of_data_can_be_shared(form: str):
    torch.testing.assert_close(losses(FORMS[form], plan="data=3"), losses((X, Y)), atol=1e-5, rtol=1e-5)


def test_a_function_is_called_in_each_rank_and_not_in_the_caller(tmp_path: Path):
    def load():
        (tmp_path / str(os.getpid())).touch()
        return X, Y

    losses(load, plan="data=2")
    called = {path.name for path in tmp_path.iterdir()}
    assert len(called) == 2
    assert str(os.getpid()) not in called


def test_shuffled_samples_come_in_the_same_order_in_every_form():
    want = losses((X, Y), shuffle=True)
    assert losses(Pairs(), shuffle=True) == losses(Batched(), shuffle=True) == want
    assert want != losses((X, Y))


def test_a_stream_ends_after_its_epochs_or_steps():
    assert len(losses(Streamed(), epochs=2)) == 8
    assert len(losses(Streamed(), epochs=None, steps=6)) == 6
    assert len(losses(Streamed(), epochs=9, steps=3, plan="data=2")) == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, Y[:3]), r"differ in length.*\(22, 6\), \(3, 3\)"),
        ((), "no sample|no tensor"),
        (torch.tensor(3.0), "sample"),
        (torch.utils.data.DataLoader(Pairs(), batch_size=None), "DataLoader"),
        (iter([1, 2]), "iterator"),
        (None, "NoneType"),
        ("train.csv", "is a path"),
        (5, "int"),
    ],
    ids=[
        "lengths",
        "empty tuple",
        "scalar",
        "loader",
        "iterator",
        "none",
        "str",
        "int",
    ],
)
def test_what_holds_no_samples_is_refused_in_words(data: Any, words: str):
    with pytest.raises(meshfit.MeshfitError, match=f"(?s){words}"):
        losses(data)


def test_a_data_set_of_the_users_own_may_have_any_methods():
    class Fetching(Pairs):
        def fetch(self, url: str) -> bytes:
            raise AssertionError("for its own use")

    assert losses(Fetching()) == losses((X, Y))


def test_read_only_arrays_are_data_like_others():
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert losses((frozen, Y)) == losses((X, Y))


# Memory


def test_lists_of_numbers_are_tensors():
    assert torch.equal(open_source((X, [0.5] * N)).arrays[1], torch.full((N,), 0.5))


def test_a_batch_has_memory_of_its_own():
    source = open_source((X, Y))
    x, y = source.fetch(np.arange(7, 14))
    assert x.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
    torch.testing.assert_close((x, y), (X[7:14], Y[7:14]))
    torch.testing.assert_close(source.fetch(np.array([3, 4, 6]))[0], X[[3, 4, 6]])
    torch.testing.assert_close(source.fetch(np.array([5, 4, 3]))[0], X[[5, 4, 3]])
    torch.testing.assert_close(source.fetch(np.array([1, 5, 3]))[0], X[[1, 5, 3]])


def _mapped() -> tuple[int, int]:
    """Bytes of the caller's data that this rank sees, and of those it has copied."""
    size = dirty = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = "memfd:meshfit" in line
        elif ours and line.startswith("Size:"):
            size += int(line.split()[1]) * 1024
        elif ours and line.startswith("Private_Dirty:"):
            dirty += int(line.split()[1]) * 1024
    return size, dirty


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_tensors_in_memory_are_not_copied_for_each_rank(tmp_path: Path):
    large = torch.randn(4096, 512)  # 8 MiB

    def step(model: nn.Module, batch: Any) -> Tensor:
        size, dirty = _mapped()
        (tmp_path / f"{os.getpid()}").write_text(f"{size} {dirty}")
        return model(batch[0][:, :6]).square().mean()

    make = lambda params: torch.optim.SGD(params, lr=0.1)
    meshfit.fit(Linear, (large,), step=step, optimizer=make, batch_size=512, epochs=2, plan="data=2", devices="cpu")
    found = [tuple(map(int, path.read_text().split())) for path in tmp_path.iterdir()]
    assert len(found) == 2
    assert all(size >= large.nbytes and dirty < 2**20 for size, dirty in found)


class InPlace(nn.Module):
    """Writes to its inputs, as nn.ReLU(inplace=True) or x -= mean do in a first layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


@pytest.mark.parametrize("plan", ["data=1", "data=2"])
def test_a_model_that_writes_to_its_inputs_does_not_spoil_the_data(plan: str):
    x, kept = X.clone(), X.clone()
    make = lambda params: torch.optim.SGD(params, lr=0.0)
    result = meshfit.fit(
        InPlace,
        (x, Y),
        loss=F.mse_loss,
        optimizer=make,
        batch_size=N,
        epochs=3,
        shuffle=False,
        valid=(x, Y),
        plan=plan,
        devices="cpu",
    )
    assert torch.equal(x, kept)
    seen = [step.loss for step in result.history]
    assert seen == pytest.approx([seen[0]] * 3)
    held_out = [step.valid["loss"] for step in result.history]
    assert held_out == pytest.approx([seen[0]] * 3)


# The loader; order and shares: test_order.py


@pytest.mark.parametrize(
    "source", [Memory((X, Y)), Map(Pairs()), SampleStream(Streamed)], ids=lambda s: type(s).__name__
)
def test_a_loader_hands_every_sample_to_one_rank(source):
    asked = {"batch_size": BATCH, "ranks": 3, "device": torch.device("cpu"), "microbatches": 2, "shuffle": False}
    seen: list[Tensor] = []
    for batches in zip(*(Loader(source=source, rank=rank, **asked).epoch(0) for rank in range(3)), strict=True):
        assert len({tuple(batch.ids) for batch in batches}) == 1
        for i in range(len(batches[0].microbatches)):
            seen += [batch.microbatches[i].content[0][: batch.microbatches[i].samples] for batch in batches]
    torch.testing.assert_close(torch.cat(seen), X)
    lasts = [batch.last for batch in Loader(source=source, rank=0, **asked).epoch(0)]
    assert lasts == [False, False, False, True]


def test_samples_are_counted_without_calling_the_users_function():
    assert sample_count((X, Y)) == sample_count(Pairs()) == N
    assert sample_count(Streamed()) is None
    assert sample_count(lambda: pytest.fail("called")) is None
