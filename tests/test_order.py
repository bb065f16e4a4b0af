"""Order and shares: pure functions, no process needed."""

import numpy as np
import pytest
import torch

from meshfit.data.loader import Loader, shares
from meshfit.data.order import Ids, order
from meshfit.data.source import Memory


@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000, 4097, 65_537])
def test_every_sample_once(n: int) -> None:
    assert np.array_equal(np.sort(order(n, seed=3, epoch=1)[np.arange(n)]), np.arange(n))


def test_another_epoch_or_seed_is_another_order() -> None:
    at = np.arange(1000)
    orders = [order(1000, seed=seed, epoch=epoch)[at] for seed in (0, 1) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.01


def test_looks_random() -> None:
    n = 20_000
    x = order(n, seed=5, epoch=0)[np.arange(n)].astype(float)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.03
    counts, _, _ = np.histogram2d(np.arange(n), x, bins=20)
    assert ((counts - n / 400) ** 2 / (n / 400)).sum() < 400 + 6 * 28  # chi square, 361 degrees of freedom


def test_a_batch_is_the_same_wherever_one_starts() -> None:
    ids = Ids(10_003, 48, seed=1, shuffle=True)
    forward = [ids(2, b) for b in range(ids.batches)]
    assert np.array_equal(np.sort(np.concatenate(forward)), np.arange(10_003))
    for b in (0, 100, ids.batches - 1, 7):
        assert np.array_equal(Ids(10_003, 48, seed=1, shuffle=True)(2, b), forward[b])


@pytest.mark.parametrize(("size", "ranks", "microbatches"), [(64, 4, 1), (10, 3, 2), (2, 4, 1), (7, 2, 3), (1, 3, 2)])
def test_shares_make_the_batch(size: int, ranks: int, microbatches: int) -> None:
    """Every sample in one share; all ranks' i-th microbatches are one device's i-th microbatch."""
    alone = shares(size, 0, 1, microbatches)
    spread = [shares(size, rank, ranks, microbatches) for rank in range(ranks)]
    for i, whole in enumerate(alone):
        parts = [list(range(size))[spread[rank][i]] for rank in range(ranks)]
        assert sum(parts, []) == list(range(size))[whole]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_together_see_what_one_device_sees(ranks: int) -> None:
    source = Memory((torch.arange(101), torch.arange(101) * 2))

    def batches(rank: int, ranks: int) -> list[list[int]]:
        loader = Loader(source=source, batch_size=10, rank=rank, ranks=ranks, device=torch.device("cpu"), seed=4)
        return [
            [i for part in batch.microbatches if part.samples for i in part.content[0].tolist()]
            for epoch in range(2)
            for batch in loader.epoch(epoch)
        ]

    together = [sum(parts, []) for parts in zip(*(batches(rank, ranks) for rank in range(ranks)), strict=True)]
    assert together == batches(0, 1)
