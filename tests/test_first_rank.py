"""What the first rank finds, on all of them: however long it takes, as long as it is alive."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshfit.comm import first
from meshfit.comm.first import from_first_rank
from meshfit.errors import JobError, PlanError
from tests.distributed import distributed


def new_group(seconds: float) -> Any:
    return dist.new_group(timeout=timedelta(seconds=seconds))


@distributed(world=2)
def test_longer_than_a_collective_may_take() -> None:
    group = new_group(3)
    beat, first.BEAT = first.BEAT, 0.3
    try:
        for answer, seconds in (("one", 4.5), ("two", 0.0)):
            assert from_first_rank(lambda: (time.sleep(seconds), answer)[1], group) == answer  # noqa: B023
    finally:
        first.BEAT = beat
        dist.destroy_process_group(group)


@distributed(world=2)
def test_what_it_raises_is_raised_by_all() -> None:
    def refuse() -> None:
        raise PlanError("no", "because")

    with pytest.raises(PlanError, match="because"):
        from_first_rank(refuse, dist.group.WORLD)
    assert from_first_rank(lambda: dist.get_rank(), dist.group.WORLD) == 0


@distributed(world=2)
def test_a_collective_that_the_others_do_not_call_is_refused() -> None:
    """Also where the rank takes what its model raises for an answer. A group of its own is nobody else's business."""

    def swallowed() -> str:
        try:
            dist.all_reduce(torch.ones(3))
        except Exception:
            return "the model does not run"
        return "it runs"

    for find in (lambda: dist.all_reduce(torch.ones(3)), swallowed):
        with pytest.raises(
            JobError, match=r"calls all_reduce of float32 \[3\] over ranks 0, 1\n  at test_first_rank.py"
        ):
            from_first_rank(find, dist.group.WORLD)
    own, _ = dist.new_subgroups(1)
    assert from_first_rank(lambda: dist.all_reduce(torch.ones(3), group=own), dist.group.WORLD) is None
    dist.all_reduce(torch.ones(3))


@distributed(world=2)
def test_without_a_sign_of_life_the_others_give_up() -> None:
    group, rank = new_group(2), dist.get_rank()
    beat, first.BEAT = first.BEAT, 0.3 if rank else 1000.0
    try:
        with pytest.raises(Exception, match="no sign of life" if rank else ""):
            from_first_rank(lambda: time.sleep(5), group)
    finally:
        first.BEAT = beat
