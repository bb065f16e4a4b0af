"""Random numbers that data sets and transforms draw by themselves: they follow seed, epoch, sample."""

import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import meshfit
from meshfit.data import seeding
from meshfit.data.datasets import Map, SampleStream, open_source
from meshfit.data.draw import Key
from meshfit.data.loader import Loader

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N, BATCH = 31, 8
OF_THE_MODULE = np.random.default_rng()


class Everybodys(Dataset):
    """Draws from the three global generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i), random.random(), np.random.rand(), float(torch.rand(()))]), i


class Rarely(Everybodys):
    """Draws for one of its samples alone."""

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i), random.random() if i == 19 else 0.0]), i


class Together(Everybodys):
    """Is read by batches."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[i] for i in ids]


class Held(Dataset):
    """Holds generators of its own, in many places; one is made when it is first read."""

    def __init__(self) -> None:
        self.rng, self.old = np.random.default_rng(), np.random.RandomState()
        self.python, self.steps = random.Random(), [{"noise": Noise(torch.Generator())}]
        self.philox = np.random.Generator(np.random.Philox())
        self.late: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        self.late = self.late or np.random.default_rng()
        drawn = self.rng.random(), self.old.rand(), self.python.random(), self.late.random(), self.philox.random()
        return self.steps[0]["noise"](torch.tensor([float(i), *drawn, OF_THE_MODULE.random()])), i


class Noise:
    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand((), generator=self.generator)


def augmented() -> Any:
    """A transform like albumentations': generators in its attributes, shared by its parts."""
    rng = np.random.default_rng()

    class Flip(nn.Module):
        def __init__(self, generator: np.random.Generator):
            super().__init__()
            self.random_generator = generator

    class Compose:
        def __init__(self) -> None:
            self.py_random = random.Random()
            self.transforms = [Flip(rng), Flip(rng)]

        def __call__(self, sample: Any) -> Any:
            x, y = sample
            return x + self.py_random.random() + sum(t.random_generator.random() for t in self.transforms), y

    return meshfit.data.memory((torch.zeros(N, 2), torch.arange(N))).map(Compose(), each=True)


MAKERS = {
    "everybody's": lambda: Map(Everybodys()),
    "rarely": lambda: Map(Rarely()),
    "together": lambda: Map(Together()),
    "its own": lambda: Map(Held()),
    "transform": augmented,
}


def read(make: Any, ranks: int, workers: int | None = 0, kind: str | None = None, start: int = 0) -> dict[Any, Any]:
    """Every sample's values by (epoch, sample), as ``ranks`` read them."""
    found: dict[Any, Any] = {}
    for rank in range(ranks):
        loader = Loader(
            source=make(), batch_size=BATCH, rank=rank, ranks=ranks, device=torch.device("cpu"), seed=3,
            workers=workers, kind=kind,
        )  # fmt: skip
        for epoch in range(2):
            for batch in loader.epoch(epoch, start):
                for part in batch.microbatches:
                    x, y = part.content
                    found |= {(epoch, int(y[i])): x[i].tolist() for i in range(part.samples)}
        loader.close()
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_numbers_on_any_number_of_ranks(name: str):
    make = MAKERS[name]
    alone = read(make, 1)
    assert len(alone) == 2 * N
    assert alone == read(make, 1) == read(make, 2) == read(make, 3)  # a second run, and shared
    assert read(make, 2, start=2).items() <= alone.items()  # resumed in the middle of an epoch
    drawing = [19] if name == "rarely" else range(N)
    assert all(alone[0, i] != alone[1, i] for i in drawing)  # epochs differ, and samples
    assert len({tuple(x[1:]) for x in alone.values()}) == (3 if name == "rarely" else 2 * N)


class Both(Held):
    def __getitem__(self, i: int) -> Any:
        x, _ = super().__getitem__(i)
        return x + random.random() + np.random.rand() + torch.rand(()), i


def test_processes_read_what_draws_and_the_same_numbers():
    assert read(lambda: Map(Both()), 1, 1, "processes") == read(lambda: Map(Both()), 1)
    for make in MAKERS.values():
        with pytest.raises(meshfit.DataError, match="threads cannot read this data"):
            read(make, 1, 2, "threads")
    quiet = lambda: Map([(torch.ones(2) * i, i) for i in range(N)])
    assert read(quiet, 1, 2, "threads") == read(quiet, 1)


def test_the_runs_own_numbers_are_left_alone():
    def numbers() -> list[float]:
        return [random.random(), np.random.randn(), float(torch.rand(()))]

    def sown() -> None:
        seeding.CodeGenerators(None).seed(11)
        np.random.randn()  # NumPy draws normal numbers by two, and keeps one

    sown()
    want = numbers()
    for make in MAKERS.values():
        source = make()
        sown()
        source.read(np.arange(N), Key(1, 1))
        assert numbers() == want
    sown()
    open_source(Shuffled()).few()  # type: ignore[union-attr]
    assert numbers() == want


class Hidden(Everybodys):
    """Draws from what nobody can seed."""

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i), float(np.random.default_rng().random())]), i


def test_numbers_that_cannot_be_seeded_are_refused_or_told():
    with pytest.raises(meshfit.DataError, match="sample 0 of data= or valid= is another each time"):
        read(lambda: Map(Hidden()), 2)
    one = Loader(source=Map(Hidden()), batch_size=BATCH, rank=0, ranks=1, device=torch.device("cpu"))
    assert "is another each time it is read" in one.notes[0]
    holder = np.random.default_rng()
    with pytest.raises(meshfit.DataError, match="draws random numbers, which would depend on how a batch is shared"):
        meshfit.data.memory(torch.zeros(4, 2)).map(lambda batch: batch + holder.random()).fetch(np.arange(4))


class Shuffled(IterableDataset):
    """A stream that shuffles by Python's generator, and one of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __iter__(self) -> Iterator[Any]:
        for i in random.sample(range(N), N):
            yield torch.tensor([self.rng.random(), float(torch.rand(()))]), i


class Urandom(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(os.urandom(1)[0])]), i) for i in range(N))


def test_a_stream_draws_the_same_under_every_plan():
    alone = read(lambda: open_source(Shuffled()), 1)
    assert alone == read(lambda: open_source(Shuffled()), 2) == read(lambda: open_source(Shuffled()), 3)
    assert read(lambda: open_source(Shuffled()), 2, start=1).items() <= alone.items()
    assert alone[0, 5] != alone[1, 5]
    source = open_source(Shuffled())
    assert isinstance(source, SampleStream)
    assert source.draws
    loader = Loader(source=source, batch_size=BATCH, rank=0, ranks=1, device=torch.device("cpu"), workers=1)
    assert loader.reading.kind == "inline"
    with pytest.raises(meshfit.DataError, match="beginning of the stream"):
        read(lambda: open_source(Urandom()), 2)


def test_training_on_data_that_draws_is_the_same_under_every_plan():
    def losses(plan: str, data: Any) -> list[float]:
        torch.manual_seed(0)
        result = meshfit.fit(
            nn.Linear(4, 1),
            data,
            loss=lambda out, target: F.mse_loss(out[:, 0], target.float()),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
            batch_size=BATCH,
            epochs=2,
            plan=plan,
            devices="cpu",
        )
        return [step.loss for step in result.history]

    alone = losses("data=1", Everybodys())
    assert losses("data=2", Everybodys()) == pytest.approx(alone, rel=1e-5)
    assert losses("data=1", Everybodys()) == alone
