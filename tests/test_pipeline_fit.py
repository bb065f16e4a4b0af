"""Plans with ``pipeline=``: layers over devices, alone and with the other axes, train like one device."""

from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshfit
from benchmarks.zoo import ZOO
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from tests import ranked, traps
from tests.distributed import distributed
from tests.few import more
from tests.ranked import SGD, X, Y, assert_alike, assert_verified, built, counted_step, trained

cloudpickle.register_pickle_by_value(traps)

DIAGONAL = {
    "pipeline=2 microbatches=3": ["tied-gpt", "resnet10", "unet-diffusers"],
    "pipeline=2 schedule=gpipe": ["t5"],
    "pipeline=2 schedule=sequential microbatches=2": ["partial", "vit"],
    "pipeline=2 schedule=interleaved microbatches=4": ["tied-gpt", "llama"],
    "pipeline=2 schedule=zbv microbatches=4": ["gpt2"],
    "pipeline=2 schedule=dualpipev microbatches=4": ["tied-gpt", "bert"],
    "pipeline=4 microbatches=4": ["tied-gpt", "mixtral"],
    "data=2 pipeline=2 microbatches=2": ["batchnorm-cnn", "partial"],
    "shard=2 pipeline=2 microbatches=2": ["tied-gpt", "llama"],
    "shard=2 zero=1 pipeline=2 microbatches=2": ["tied-gpt", "mamba"],
    "tensor=2 pipeline=2 microbatches=2": ["tied-gpt", "swin"],
    "data=2 tensor=2 pipeline=2 microbatches=2": ["vit", "llama"],
    "pipeline=2 microbatches=2 recompute=full": ["tied-gpt", "vit"],
    "pipeline=2 microbatches=2 offload=optimizer": ["tied-gpt", "vit"],
}


OFTEN = {"t5", "gpt2", "batchnorm-cnn", "partial", "tied-gpt"}
SELDOM = {"zero=1", "microbatches=3", "dualpipev", "offload=optimizer"}


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (plan, name) if name in OFTEN and not any(word in plan for word in SELDOM) else more(plan, name)
        for plan, names in DIAGONAL.items()
        for name in names
    ],
)
def test_trains_like_one_device(plan: str, name: str) -> None:
    assert_verified(name, plan, samples=18, steps=3)


HOSTILE = ["Tied", "SharedBlock", "UsedTwice", "ReadsSibling", "FrozenBlocks", "OnlyHead", "Adapters", "Odd"]


@distributed(world=2)
def test_hostile_models() -> None:
    """The model is left whole, as the same parameters."""
    for name in HOSTILE:
        assert_alike(traps.MODELS[name], "pipeline=2 microbatches=2", optimizer=SGD)


@distributed(world=4)
def test_ties_over_four_stages() -> None:
    """Of which the first and the last share a weight, and each pair of ranks its own line."""
    assert_alike(traps.Tied, "pipeline=4 microbatches=2", optimizer=SGD)


COUNTED = [
    ("pipeline=2 microbatches=4", "tied-gpt"),
    more("pipeline=2 microbatches=4", "vit"),
    more("data=2 pipeline=2 microbatches=2", "tied-gpt"),
    ("data=2 pipeline=2 microbatches=2", "batchnorm-cnn"),
    ("shard=2 zero=2 pipeline=2 microbatches=2", "tied-gpt"),
    ("pipeline=2 schedule=interleaved microbatches=4 cut=model.layers.1,model.layers.2,model.norm", "llama"),
]


@pytest.mark.parametrize(("plan", "name"), COUNTED)
def test_cost_is_what_runs(plan: str, name: str) -> None:
    """Sends and collectives of a rank, calls and bytes; and the bytes of its weights."""

    @distributed(world=Plan.parse(plan).devices)
    def run(plan: str, name: str) -> None:
        case, how = ZOO[name], Plan.parse(plan)
        job, run, batch, seen = counted_step(case, how)
        model = case.build().train()
        content = batch.microbatches[0].content
        trace = pipeline_of(how).find(model, job.objective, content, device="cpu").trace
        said = cost(how, trace, torch.optim.AdamW(model.parameters()), found=run.placed.found, place=run.mesh.place)
        assert dict(seen.calls) == said.calls
        assert dict(seen.moved) == said.moved
        if how.shard == 1:
            assert sum(p.nbytes for p in run.model.parameters()) == said.held["weights"]

    run(plan=plan, name=name)


class Gained(nn.Module):
    """A learned number inside a region: whole on every rank of the tensor axis, with a part of its gradient on each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(8, 32), nn.Linear(32, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) * self.gain))


class OnlyTheFirst(nn.Sequential):
    def __init__(self) -> None:
        plain = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)]
        super().__init__(Gained(), *plain, nn.Linear(8, 4))


@distributed(world=4)
def test_stages_that_differ_in_what_they_sum() -> None:
    """One has a gradient that is summed over the tensor axis, the other none: they still speak of the same numbers."""
    assert_alike(OnlyTheFirst, "tensor=2 pipeline=2 microbatches=2", optimizer=SGD)
    run, *_ = trained(OnlyTheFirst(), "tensor=2 pipeline=2 microbatches=2", steps=1)
    assert run.placed.layers["tensor"].partial == ("0.gain",)


def test_microbatches_are_chosen() -> None:
    """Where nobody says how many: else the pipeline would be empty most of the time."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4))
    how = {"loss": F.mse_loss, "optimizer": ranked.ADAMW, "batch_size": 6, "steps": 2, "devices": "cpu:2"}
    assert meshfit.fit(model, (X, Y), plan="pipeline=2", **how).plan.microbatches == 6
    assert meshfit.fit(model, (X, Y), plan="pipeline=2 schedule=interleaved", **how).plan.microbatches == 6
    assert meshfit.fit(model, (X, Y), plan="pipeline=2 microbatches=1", **how).plan.microbatches == 1
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    assert meshfit.fit(normed, (X, Y), plan="pipeline=2", **how).plan.microbatches == 1


def test_the_cut_is_the_users() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
    how = {"loss": F.mse_loss, "optimizer": ranked.ADAMW, "batch_size": 6, "steps": 1, "devices": "cpu:2"}
    result = meshfit.fit(model, (X, Y), plan="pipeline=2 cut=4", **how)
    assert any("4" in note for note in result.notes), result.notes
    with pytest.raises(meshfit.PlanError, match="no such module"):
        meshfit.fit(model, (X, Y), plan="pipeline=2 cut=layers.3", **how)


@distributed(world=2)
def test_a_rank_holds_its_own_stages_alone() -> None:
    run, *_ = trained(built(traps.Plain), "pipeline=2 microbatches=2")
    mine = sum(p.numel() for p in run.model.parameters())
    whole = sum(p.numel() for p in run.placed.shape.parameters())
    state = sum(t.numel() for many in run.optimizer.state.values() for t in many.values())
    every: list[Any] = [None, None]
    dist.all_gather_object(every, mine)
    assert sum(every) == whole
    assert max(every) < 0.7 * whole
    assert state <= 2 * mine + len(run.optimizer.state)


class Looks(nn.Module):
    """Decides by its own activations what to run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.other(x) if x.sum() > 0 else x)


REFUSED = {
    "microbatches": ("pipeline=4 schedule=dualpipev microbatches=3", traps.Plain, "microbatches"),
    "compiled": ("pipeline=2 compile=whole", traps.Plain, "compile=block works"),
    "too many stages": ("pipeline=4", lambda: nn.Sequential(nn.Linear(8, 4)), "pipeline=2 is the most it can take"),
    "values": ("pipeline=2", Looks, "looks at a value that depends on activations"),
    "no stages": ("data=2 schedule=gpipe", traps.Plain, "pipeline=1 is one stage"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    plan, make, says = REFUSED[why]
    how = {"loss": F.mse_loss, "optimizer": ranked.ADAMW, "batch_size": 8, "steps": 1}
    with pytest.raises(meshfit.PlanError) as error:
        meshfit.fit(built(make), (X, Y), plan=plan, devices="cpu:4" if "4" in plan else "cpu:2", **how)
    assert says in str(error.value)
