"""What ranks agree upon in a step: nothing beside the sum of gradients, where the data has a length; of a stream, that
all got the same of it."""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import meshfit
import meshfit.live
from meshfit.errors import DataError, RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Samples(IterableDataset):
    """24, of which the second rank lacks some."""

    def __init__(self, lacks: int):
        self.lacks = lacks

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        for i in range(24 - self.lacks * rank):
            yield torch.full((4,), i / 24), torch.ones(1)


class Counting(nn.Module):
    """Counts the collectives from one step to the next; no more than ``most``."""

    def __init__(self, most: int):
        super().__init__()
        self.layer, self.most, self.calls, self.before = nn.Linear(4, 1), most, 0, 0

    def forward(self, x):
        self.calls += self.training
        now = meshfit.live.LIVE.noted
        if self.training and self.calls > 4:  # the first steps check more
            assert now - self.before <= self.most, f"{now - self.before} collectives in a step"
        self.before = now
        return self.layer(x)


LOCAL = ["data=2 exchange=local every=2", "data=2 exchange=local every=8", "data=2 exchange=diloco every=4 overlap=2"]


def fit(model: nn.Module, data: Any, **asked: Any) -> meshfit.Result:
    given: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "batch_size": 8}
    given |= {"plan": "data=2", "epochs": 1, "hang_timeout": 20.0}
    return meshfit.fit(model, data, devices="cpu", progress=False, **{**given, **asked})


@pytest.mark.parametrize("plan", ["data=2", *LOCAL])
@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        (3, "in batch 2 rank 0 8 samples (its last), rank 1 5 samples (its last)"),
        (8, "in batch 1 rank 0 8 samples, rank 1 8 samples (its last)"),
    ],
)
def test_a_stream_that_is_shorter_in_one_rank_is_refused(lacks: int, says: str, plan: str) -> None:
    """Though that rank would evaluate when the other does not."""
    whole = [(torch.ones(4), torch.ones(1))] * 16
    with pytest.raises(DataError) as caught:
        fit(nn.Linear(4, 1), Samples(lacks), plan=plan, valid=whole)
    assert caught.value.headline == f"ranks read different streams: {says}"


@pytest.mark.parametrize("plan", LOCAL)
def test_local_steps_that_end_early_have_compared_all_they_took(plan: str) -> None:
    with pytest.raises(DataError, match="ranks read different streams: in batch 2"):
        fit(nn.Linear(4, 1), Samples(3), plan=plan, steps=3, epochs=None)


class DividesItself(IterableDataset):
    """As scripts for torchrun do."""

    def __iter__(self):
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from [(torch.full((4,), float(i)), torch.ones(1)) for i in range(rank, 32, size)]


def test_a_stream_that_divides_itself_by_rank_is_refused() -> None:
    """Its batches have the same sizes on all ranks."""
    with pytest.raises(DataError, match="in batch 0 each has samples of its own"):
        fit(nn.Linear(4, 1), DividesItself())


def test_so_is_one_that_is_evaluated_on() -> None:
    whole = [(torch.ones(4), torch.ones(1))] * 16
    with pytest.raises(DataError, match="ranks read different streams: in batch 2"):
        fit(nn.Linear(4, 1), whole, valid=Samples(3))


@pytest.mark.parametrize("plan", ["data=2", *LOCAL])
def test_a_stream_that_is_the_same_is_trained_on(plan: str) -> None:
    trained = fit(nn.Linear(4, 1), Samples(0), plan=plan, epochs=2).history
    assert [step.samples for step in trained] == [8, 16, 24, 32, 40, 48]


def test_a_step_is_one_collective_though_a_rank_has_no_samples() -> None:
    """33 samples in batches of 8: of the last, one rank has none, and knows it from the order."""
    data = torch.randn(33, 4), torch.randn(33, 1)
    assert fit(Counting(1), data, epochs=3).steps == 15
    with pytest.raises(RankError, match="1 collectives in a step"):
        fit(Counting(0), data, epochs=3)
