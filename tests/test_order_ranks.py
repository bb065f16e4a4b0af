"""Ranks that train, and evaluate in between, under every axis: all issue what they do with others in one order, which
blocks nowhere. What only GPUs do (gathers started ahead, rows cut) is turned on."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world

from benchmarks import compose, zoo, zoo_branches, zoo_experts
from meshfit.axes.data.axis import broadcast
from meshfit.axes.mesh import Mesh
from meshfit.comm.order_check import CollectiveLog, Operation, check
from meshfit.comm.transport import Transport
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.plan import Plan
from meshfit.run import Run
from meshfit.schedule.issue import pairs
from meshfit.schedule.orders import schedule
from meshfit.torch_private.groups import timeout_of
from tests.distributed import distributed
from tests.few import more
from tests.ranked import ADAMW, X, Y

CPU = torch.device("cpu")
CASES = {case.name: case for case in (*zoo.CASES, *zoo_experts.CASES, *zoo_branches.CASES)}


def deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(8, 4))


DEEP = zoo.Case(name="deep", build=zoo.seeded(deep), data=lambda n: (X[:n], Y[:n]), loss=nn.functional.mse_loss)


def recorded(case: zoo.Case, plan: str, **asked: Any) -> list[list[Operation]]:
    """What each rank issued in two steps, each followed by an evaluation."""
    world = World(dist.get_rank(), dist.get_world_size(), CPU)
    data = case.data(14)
    asked = {"data": data, "valid": data, "valid_every": 1, "optimizer": ADAMW, "batch_size": 8, "steps": 2, **asked}
    how = {} if case.loss is None else {"loss": case.loss}
    with CollectiveLog() as recorder:
        job = Job(**{"model": case.build(), "plan": plan, **asked, **how}).training()
        run = Run(job.settled(count=world.size, kind="cpu"), world)
        if run.placed.shards is not None:
            run.placed.shards.lockstep.ahead = True
        assert len(list(train(run))) == 2
        run.settle()
        run.close()
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, recorder.log)
    return every


@pytest.mark.parametrize(
    "plan",
    [
        more("pipeline=4 microbatches=4"),
        more("pipeline=4 schedule=interleaved microbatches=4"),
        "pipeline=4 schedule=zbv microbatches=4",
        "pipeline=4 schedule=dualpipev microbatches=8",
        more("data=2 pipeline=2 microbatches=4"),
        "shard=2 pipeline=2 microbatches=2",
        "shard=4",
        more("shard=4 zero=2"),
        "shard=4 zero=1 microbatches=2",
        more("data=2 shard=2"),
    ],
)
@distributed(world=4)
def test_layers_and_shards(plan: str) -> None:
    logs = recorded(DEEP, plan)
    assert check(logs) == []
    kinds = {operation.kind for log in logs for operation in log}
    assert ("send" in kinds) == ("pipeline" in plan)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        more("data=2 tensor=2 sequence=split", "tied-gpt"),
        more("shard=2 tensor=2", "tied-gpt"),
        more("tensor=2 pipeline=2 microbatches=2", "tied-gpt"),
        ("tensor=2 sequence=split pipeline=2 microbatches=2", "tied-gpt"),
        ("shard=2 context=2", "tied-gpt"),
        more("context=2 tensor=2 sequence=split", "tied-gpt"),
        more("context=2 pipeline=2 schedule=zbv microbatches=2", "tied-gpt"),
        more("data=2 expert=2", "expert-list"),
        more("expert=2 tensor=2", "mixtral-balanced"),
        more("expert=2 tensor=2 microbatches=2", "expert-list"),
        more("expert=2 context=2", "expert-list"),
        more("expert=2 pipeline=2 microbatches=2", "mixtral-balanced"),
        ("expert=2 pipeline=2 schedule=zbv microbatches=4", "expert-list"),
        more("data=2 branch=2", "ensemble"),
        more("shard=2 branch=2 microbatches=2", "two-decoders"),
        more("branch=2 tensor=2", "tied-heads"),
        more("pipeline=2 branch=2 microbatches=4", "siamese"),
        ("pipeline=2 schedule=interleaved branch=2 microbatches=4", "two-decoders"),
    ],
)
@distributed(world=4)
def test_operations_sequences_experts_and_branches(plan: str, name: str) -> None:
    assert check(recorded(CASES[name], plan)) == []


@pytest.mark.more
@pytest.mark.parametrize("plan", ["expert=2 tensor=2 pipeline=2 microbatches=2", "shard=2 expert=2 tensor=2"])
@distributed(world=8)
def test_three_axes(plan: str) -> None:
    assert check(recorded(CASES["expert-list"], plan)) == []


@pytest.mark.more
@pytest.mark.parametrize("axes", compose.TRIPLES)
@distributed(world=8)
def test_more_triples(axes: str) -> None:
    assert check(recorded(compose.CASES[compose.TRIPLES[axes]], compose.plan_of(axes.split()))) == []


@distributed(world=4)
def test_losses_of_the_whole_batch() -> None:
    spread = lambda outputs, targets: (outputs - outputs.mean(0)).square().mean().log() + (outputs - targets).mean()
    assert check(recorded(replace(DEEP, loss=spread), "data=2 pipeline=2 microbatches=2", valid=None)) == []


@distributed(world=4)
def test_evaluations_make_no_groups_and_a_run_leaves_none() -> None:
    before, seen = len(_world.pg_map), []
    plan = "data=2 pipeline=2 microbatches=2"
    metric = lambda outputs, targets: seen.append(len(_world.pg_map)) or 0.0
    recorded(DEEP, plan, metrics={"groups": metric})
    assert len(_world.pg_map) == before
    assert len(set(seen)) <= 1


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])  # before the model is laid out, and after
@distributed(world=4)
def test_a_run_that_cannot_be_built_leaves_no_groups(part: str) -> None:
    before = len(_world.pg_map)

    def fails(_: Any) -> Any:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        recorded(DEEP, "data=2 pipeline=2 microbatches=2", **{part: fails})
    assert len(_world.pg_map) == before


@distributed(world=3)
def test_neighbours_hear_each_other() -> None:
    """In a pipeline that is but some of the world's ranks: peers count in the group of the two."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    alone = dist.get_rank() == 1
    transport = Transport(groups[alone], CPU, () if alone else pairs(schedule("1f1b", 2, 2)))  # type: ignore[arg-type]
    if not alone:
        other = 1 - transport.rank
        transport.send(torch.full((4,), transport.rank, dtype=torch.uint8), other)
        assert transport.take(transport.receive(4, other)).tolist() == [other] * 4
    transport.close()


@distributed(world=4, timeout=50)
def test_all_groups_wait_as_long_as_the_world() -> None:
    mesh = Mesh.of(Plan(data=2, pipeline=2), dist.get_rank(), 4)
    transport = Transport(mesh.over("pipeline"), CPU, pairs(schedule("1f1b", 2, 2)))  # type: ignore[arg-type]
    every = [mesh.over("data"), mesh.over("pipeline"), mesh.world, *(group for group, _ in transport._lines.values())]
    assert [timeout_of(group) for group in every if group] == [timedelta(seconds=50)] * 4


@distributed(world=2)
def test_weights_that_are_not_contiguous_are_sent_too() -> None:
    model = nn.Linear(6, 3)
    model.weight = nn.Parameter(torch.full((6, 3), float(dist.get_rank())).t())
    broadcast(model, Mesh.of(Plan(data=2), dist.get_rank(), 2), CPU)
    assert not model.weight.is_contiguous()
    assert (model.weight == 0).all()
