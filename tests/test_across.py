"""Plans with ``tensor=``: operations over several devices, alone and with the other axes, train like one device."""

from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from benchmarks.zoo import ZOO
from meshfit.axes.mesh import Mesh
from meshfit.plan import Plan
from tests import ranked, traps
from tests.distributed import distributed
from tests.few import more
from tests.ranked import SGD, X, Y, assert_alike, assert_verified, built, trained

cloudpickle.register_pickle_by_value(traps)

DIAGONAL = {
    "tensor=2": ["llama", "tied-gpt", "swin"],
    "tensor=4": ["gpt2"],
    "data=2 tensor=2": ["batchnorm-cnn", "mixtral"],
    "shard=2 tensor=2": ["llama", "partial"],
    "shard=2 tensor=2 zero=1 microbatches=2": ["tied-gpt"],
    "tensor=2 recompute=full": ["vit"],
    "tensor=2 offload=parameters": ["tied-gpt"],
    "tensor=2 offload=optimizer microbatches=3": ["tied-gpt", "mamba"],
}

SELDOM = {("tensor=2", "swin"), ("tensor=2", "tied-gpt"), ("shard=2 tensor=2", "llama")}
SELDOM |= {("tensor=2 offload=optimizer microbatches=3", "mamba"), ("data=2 tensor=2", "mixtral")}


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        more(plan, name) if (plan, name) in SELDOM else (plan, name)
        for plan, names in DIAGONAL.items()
        for name in names
    ],
)
def test_trains_like_one_device(plan: str, name: str) -> None:
    assert_verified(name, plan, samples=18, steps=3)


def test_bfloat16() -> None:
    case = ZOO["tied-gpt"]
    how = {"loss": case.loss, "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3), "batch_size": 8}
    assert meshfit.verify(case.build, case.data(30), plan="tensor=2 precision=bf16", devices="cpu:2", **how).equal


HOSTILE = [
    *("Tied", "SharedBlock", "CalledTwice", "UsedTwice", "ReadsSibling", "PeeksAtSibling", "FrozenBlocks", "OnlyHead"),
    *("Adapters", "Odd", "Dtypes", "ChannelsLast", "Recurrent", "Hooked", "ReturnsWeights", "CallsMethods"),
    *("Reentrant", "SkipsLayers", "MixtureOfExperts", "parametrized weight_norm"),
]


@pytest.mark.parametrize("plan", ["tensor=2", more("shard=2 tensor=2")])
def test_hostile_models(plan: str) -> None:
    @distributed(world=Plan.parse(plan).devices)
    def run(plan: str, names: list[str]) -> None:
        for name in names:
            assert_alike(traps.MODELS[name], plan, optimizer=SGD)

    run(plan=plan, names=HOSTILE if plan == "tensor=2" else HOSTILE[::4])


@distributed(world=4)
def test_ranks_of_one_operation_see_the_same_samples() -> None:
    mesh = Mesh.of(Plan.parse("data=2 tensor=2"), dist.get_rank(), 4)
    assert mesh.share == dist.get_rank() // 2
    assert dist.get_process_group_ranks(mesh.over("tensor")) == [[0, 1], [2, 3]][mesh.share]
    assert dist.get_process_group_ranks(mesh.batch.group) == [[0, 2], [1, 3]][dist.get_rank() % 2]
    assert mesh.has_results == (dist.get_rank() % 2 == 0)


class Dropping(nn.Module):
    """Drops what all ranks hold, and what each has a share of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inside = F.dropout(self.up(x).relu(), 0.5, self.training)
        outside = F.dropout(x + self.down(inside), 0.5, self.training)
        if self.training:
            self.seen.append(torch.cat([inside.detach() == 0, outside.detach() == 0], 1))
        return self.last(outside)


cloudpickle.register_pickle_by_value(ranked)


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2", "shard=2 tensor=2", "tensor=2 recompute=full"])
def test_dropout(plan: str) -> None:
    """The same mask where all ranks hold the same; other ones on shares, and on other samples. Run to run the same."""

    @distributed(world=Plan.parse(plan).devices)
    def run(plan: str) -> None:
        model = built(Dropping)
        first, *_ = trained(model, plan, steps=2)
        again, *_ = trained(built(Dropping), plan, steps=2)
        weights, same = first.placed.tensors(), again.placed.tensors()
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        drop = model.seen[-1].float()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, drop)
        here, beside = (every[r] for r in (0, 1))
        assert here.shape[1] == 32 + 8
        assert torch.equal(here[:, 32:], beside[:, 32:])
        assert not torch.equal(here[:, :32], beside[:, :32])
        if len(every) == 4:
            assert not torch.equal(here[:, 32:], every[2][:, 32:])
        mine = {name: p.detach().clone() for name, p in first.model.named_parameters()}
        whole = [name for name, p in first.model.named_parameters() if not first.placed.layers["tensor"].is_cut(p)]
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, {name: mine[name] for name in whole})
        assert whole
        assert all(torch.equal(others[0][name], others[1][name]) for name in whole)

    run(plan=plan)


@distributed(world=2)
def test_an_optimizer_that_has_been_used() -> None:
    """Its state is cut along with the parameters."""

    def resumed(plan: str) -> Any:
        model = built(traps.Plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return trained(model, plan, optimizer=optimizer)

    run, *got = resumed("tensor=2")
    alone, *want = resumed("data=1")
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    ranked.assert_near(run.placed.tensors(), dict(alone.model.state_dict()))


class Muddled(torch.optim.SGD):
    """Steps by the norm of all gradients together."""

    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every if p.grad is not None]).norm()
        for p in every:
            p.data -= 0.1 * p.grad / norm


def test_a_penalty_on_gradients() -> None:
    """Which differentiates the backward of what crosses ranks."""

    @distributed(world=2)
    def run() -> None:
        assert_alike(traps.Plain, "tensor=2", step=traps.penalty, optimizer=SGD)

    run()


REFUSED = {
    "weights read by the step": ("tensor=2", {"loss": None, "step": traps.decay}, "is read outside of"),
    "a model that is not called": ("tensor=2", {"loss": None, "step": traps.parts}, "never calls the model"),
    "an optimizer over all tensors": (
        "tensor=2",
        {"optimizer": lambda p: Muddled(p, lr=0.1)},
        "cannot step parameters",
    ),
    "compiled whole": ("tensor=2 compile=whole", {}, "tensor=2 sums activations over ranks"),
    "compiled whole, positions split": ("context=2 compile=whole", {}, "compile=block works"),
    "nothing to split": ("tensor=7", {}, "splits nothing"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    plan, asked, says = REFUSED[why]
    given = {"loss": F.mse_loss, "optimizer": ranked.ADAMW, "batch_size": 8, "steps": 1, **asked}
    with pytest.raises((meshfit.PlanError, meshfit.JobError)) as error:
        meshfit.fit(built(traps.Plain), (X, Y), plan=plan, devices=f"cpu:{Plan.parse(plan).devices}", **given)
    assert says in str(error.value)
