"""Plans with ``branch=``: parts that do not need each other run at once, and train like one device."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from benchmarks.compose import CASES
from benchmarks.zoo import Case
from benchmarks.zoo_branches import BRANCHES
from meshfit.anatomy.record import record
from meshfit.axes.branch.assign import deal
from meshfit.axes.branch.axis import deal_stages, find_branches
from meshfit.axes.branch.flow import ALL, Flow
from meshfit.axes.branch.groups import even
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.region import TensorPlan
from meshfit.errors import PlanError
from meshfit.job import Job
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from tests.distributed import distributed
from tests.few import more
from tests.ranked import SGD, assert_alike, built, counted_step, trained


def deep(layers: int = 3, width: int = 32, dropout: float = 0.0) -> nn.Sequential:
    layer = lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))
    return nn.Sequential(*(layer() for _ in range(layers)))


class Towers(nn.Module):
    """A stem, two towers, a head: parameters that all ranks hold, and parameters of one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 32), deep(dropout=dropout), deep(4, dropout=dropout)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.stem(x))
        return self.head(self.left(x) * self.right(x))


class Detached(Towers):
    """Nothing goes back to the stem: it must stay without a gradient, or weight decay would change it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.left(x.detach()) * self.right(x.detach()))


class OneGoesBack(Towers):
    """Of two towers, one alone has a gradient for the stem."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.left(x.detach()) * self.right(x))


class Looks(Towers):
    """Whole numbers and truth values cross from the towers, beside what has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = self.left(x), self.right(x)
        best, large = left.argmax(1), right > right.mean(1, keepdim=True)
        return self.head(torch.where(large, left, right).roll(1, 1) + best[:, None] / 32)


class TwoGroups(nn.Module):
    """One pair of towers after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.towers, self.head = nn.Linear(8, 32), nn.ModuleList(deep() for _ in range(4)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.towers
        x = self.stem(x)
        x = a(x) + b(x)
        return self.head(c(x) * d(x))


class Nested(nn.Module):
    """A tower that is two towers itself, beside a small one: the inner pair is the better one."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.towers, self.head = (
            nn.Linear(8, 32),
            nn.ModuleList(deep(4) for _ in range(2)),
            nn.Linear(32, 4),
        )
        self.stem = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.stem(x)
        return self.head((self.towers[0](inner) + self.towers[1](inner)) * self.small(x))


class SharedNorm(nn.Module):
    """A BatchNorm that two towers call: its statistics are one after the other, so both stay on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.towers, self.norm, self.head = (
            nn.ModuleList(deep(3, 8) for _ in range(3)),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.towers
        return self.head(self.norm(a(x)) + self.norm(b(x)) * c(x))


class TrunkNorm(Towers):
    """BatchNorm in the trunk, on all ranks alike, and in a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.right = nn.Sequential(deep(2), nn.BatchNorm1d(32), deep(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        return self.head(self.left(x) * self.right(x))


class InPlace(Towers):
    """What a tower made is changed in place after the meeting, and what the trunk made inside one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(deep(2), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.left(x * 2)
        out += self.right(x.clone().mul_(3))
        return self.head(out.tanh_())


class TiedToTrunk(nn.Module):
    """The stem's weight is used by one of the towers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 32), deep(), deep()
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        left = self.left(hidden) @ self.stem.weight @ self.stem.weight.t()
        return self.head(left * self.right(hidden))


class SharedLayer(Towers):
    """A layer that both towers use, at their beginning and at their end: under branch= with pipeline= its gradient is a
    sum over branches and over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        tower = lambda x, inner: self.shared(inner(self.shared(x).tanh())).tanh()
        return self.head(tower(x, self.left) * tower(x * 2, self.right))


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), deep(6), nn.Linear(32, 4))


MODELS = (
    Towers,
    Detached,
    OneGoesBack,
    Looks,
    TwoGroups,
    Nested,
    SharedNorm,
    TrunkNorm,
    InPlace,
    TiedToTrunk,
    SharedLayer,
)


@pytest.mark.parametrize(
    ("plan", "models"),
    [
        ("branch=2", MODELS),
        ("branch=2 microbatches=2", (Towers, Detached, TwoGroups, TiedToTrunk)),  # BatchNorm would have one sample
        ("branch=2 data=2", (Towers, SharedNorm, TrunkNorm, InPlace)),
        ("branch=2 shard=2", (OneGoesBack, TwoGroups, TiedToTrunk, SharedLayer)),
        ("branch=2 pipeline=2", (Detached, Nested, TrunkNorm, SharedLayer)),
        more("branch=2 shard=2", MODELS),
        more("branch=2 pipeline=2", MODELS),
    ],
)
def test_trains_like_one_device(plan: str, models: tuple[type[nn.Module], ...]) -> None:
    """Losses, norms, weights, buffers, optimizer state; and the model is left whole."""

    @distributed(world=Plan.parse(plan).devices, timeout=200)
    def run(plan: str, models: tuple[type[nn.Module], ...]) -> None:
        like = "data=1 microbatches=2" if "micro" in plan else "data=1"
        for make in models:
            assert_alike(make, plan, like=like, optimizer=SGD, clip=0.5)

    run(plan=plan, models=models)


@distributed(world=3)
def test_three_ranks() -> None:
    """Three members and three ranks; a member each."""
    run = assert_alike(BRANCHES["ensemble"].build, "branch=3", optimizer=SGD)
    assert min(run.placed.found["branch"].dealt.loads) > 0.1


REST = [
    "branch=2 recompute=full",
    "branch=2 offload=optimizer",
    "branch=2 precision=bf16",
    "branch=2 precision=bf16-compute",
    "branch=2 shard=2 recompute=full",
    "branch=2 tensor=2 microbatches=2",
    "branch=2 tensor=2 shard=2",
    "branch=2 pipeline=2 schedule=zbv microbatches=4",
    "branch=2 pipeline=2 shard=2 microbatches=2",
    "branch=2 pipeline=2 tensor=2",
]


OFTEN = {
    ("siamese", "branch=2 precision=bf16"),
    ("tied-heads", "branch=2 shard=2 recompute=full"),
    ("siamese", "branch=2 tensor=2 microbatches=2"),
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (name, plan) if (name, plan) in OFTEN else more(name, plan)
        for name in ("siamese", "tied-heads")
        for plan in REST
    ],
)
def test_with_the_rest_of_the_plan(name: str, plan: str) -> None:
    assert_verified(BRANCHES[name], plan)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        more("clip", "branch=2 context=2"),
        ("tied-heads", "branch=2 context=2"),
        ("tied-heads", "branch=2 tensor=2 sequence=split"),
        ("two-mixtures", "branch=2 expert=2"),
    ],
)
def test_tensors_that_are_split_pass_between_branches(name: str, plan: str) -> None:
    """Positions of sequences enter and join branches as parts; the experts of a tower are spread over its own ranks."""
    assert_verified((BRANCHES | CASES)[name], plan)


def assert_verified(case: Case, plan: str) -> None:
    how = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3), "batch_size": 8, "clip": 1.0}
    verdict = meshfit.verify(
        case.build,
        case.data(18),
        loss=case.loss,
        check_steps=3,
        plan=plan,
        devices=f"cpu:{Plan.parse(plan).devices}",
        **how,
    )
    assert verdict.equal, verdict


@distributed(world=2)
def test_each_rank_holds_its_own() -> None:
    run, *_ = trained(Towers(), "branch=2", steps=1)
    names = {name for name, _ in run.model.named_parameters()}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, names)
    whole = dict(Towers().named_parameters())
    assert every[0] | every[1] == whole.keys()
    assert every[0] & every[1] == {name for name in whole if name.startswith(("stem", "head"))}
    held = sum(p.untyped_storage().nbytes() for p in run.placed.branched.before.parameters())  # type: ignore[union-attr]
    assert held == sum(whole[name].nbytes for name in names)


@distributed(world=4)
def test_stages_cut_through_all_branches() -> None:
    """Each rank of a pipeline holds a part of its own tower; no two ranks hold the same layer of one."""
    run, *_ = trained(Towers(), "branch=2 pipeline=2", steps=1)
    every: list[Any] = [None] * 4
    layers = {name for name, _ in run.model.named_parameters() if name.startswith(("left", "right"))}
    dist.all_gather_object(every, layers)
    assert all(every)
    assert sum(map(len, every)) == len({name for names in every for name in names})
    assert len({name.partition(".")[0] for name in layers}) == 1


@distributed(world=4)
def test_a_gradient_is_summed_over_branches_and_stages() -> None:
    run, *_ = trained(SharedLayer(), "branch=2 pipeline=2", steps=1)
    shared = {"shared.weight": (0, 1), "shared.bias": (0, 1)}
    assert [partition.tied for partition in run.placed.partitions] == [shared, shared]


@distributed(world=2)
def test_random_numbers() -> None:
    """The trunk's masks are the same on both ranks, or their copies would drift apart; those of the towers are not."""
    run, losses, _ = trained(Towers(dropout=0.5), "branch=2", steps=3)
    every: list[Any] = [None, None]
    alike = {name: p.detach() for name, p in run.model.named_parameters() if name.startswith(("stem", "head"))}
    dist.all_gather_object(every, (losses, alike, torch.get_rng_state()))
    assert every[0][0] == every[1][0]
    for name in alike:
        assert torch.equal(every[0][1][name], every[1][1][name])
    assert torch.equal(every[0][2], every[1][2])


class SameTowers(nn.Module):
    """Of two equal towers with dropout: their difference is that of their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = deep(dropout=0.5), deep(dropout=0.5)
        self.right.load_state_dict(self.left.state_dict())
        self.stem = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (self.left(x) - self.right(x))[:, :4]


@distributed(world=2)
def test_towers_draw_their_own_numbers() -> None:
    model = SameTowers()
    _, losses, _ = trained(model, "branch=2", steps=1, step=lambda model, batch: model(batch[0]).square().mean())
    assert losses[0] > 1e-4


COUNTED = {
    "branch=2": ("shared-layer",),
    "branch=2 shard=2": ("two-decoders",),
    "branch=2 tensor=2": ("tied-heads",),
    "branch=2 pipeline=2 microbatches=2": ("tied-heads", "shared-layer"),
}


EVERY = ("siamese", "tied-heads", "two-decoders", "shared-layer")


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        *COUNTED.items(),
        *(more(plan, EVERY if "tensor" not in plan else ("siamese", "tied-heads")) for plan in COUNTED),
    ],
)
def test_cost_is_what_runs(plan: str, names: tuple[str, ...]) -> None:
    """Sends and collectives of every rank, calls and bytes; and the bytes of its weights."""

    @distributed(world=Plan.parse(plan).devices)
    def run(text: str, names: tuple[str, ...]) -> None:
        plan = Plan.parse(text)
        rows = lambda n: (torch.linspace(-1, 1, 8 * n).view(n, 8), torch.linspace(1, -1, 4 * n).view(n, 4))
        shared = Case(name="shared-layer", build=lambda: built(SharedLayer), data=rows, loss=F.mse_loss)
        for name in names:
            case = shared if name == shared.name else BRANCHES[name]
            job, run, batch, seen = counted_step(case, plan)
            model, content = case.build().train(), batch.microbatches[0].content
            split = split_of(job, model, content) if plan.tensor > 1 else None
            atoms = tuple(TensorAxis().closed(split)) if split else ()
            if plan.pipeline > 1:
                dealing = partial(deal_stages, degree=2)
                staged = pipeline_of(plan).find(model, job.objective, content, device="cpu", deal=dealing)
                found = replace(staged.inner, cut=staged.cut)  # type: ignore[type-var]
            else:
                found = find_branches(model, job.objective, content, 2, atoms=atoms, device="cpu")
            optimizer = torch.optim.AdamW(model.parameters())
            said = cost(plan, found.trace, optimizer, found={"tensor": split, "branch": found}, place=run.mesh.place)
            assert (name, dict(seen.calls)) == (name, said.calls)
            assert (name, dict(seen.moved)) == (name, said.moved)
            if plan.shard == 1:
                assert sum(p.nbytes for p in run.model.parameters()) == said.held["weights"]

    run(text=plan, names=names)


def split_of(job: Job, model: nn.Module, content: Any) -> TensorPlan:
    return plan_tensor(model, lambda twin: job.objective(twin, content), 2, by_rows=False).inside_modules()


def test_checkpoints_go_over_to_other_plans(tmp_path: Any) -> None:
    """Saved in branches and gone on with on one device, and in other parts. From one device: test_resume_axes.py."""
    case = BRANCHES["two-decoders"]
    fit = lambda plan, steps, folder, resume: meshfit.fit(
        case.build,
        case.data(16),
        loss=case.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch_size=8,
        steps=steps,
        plan=plan,
        devices=f"cpu:{Plan.parse(plan).devices}",
        shuffle=False,
        progress=False,
        out=tmp_path / folder,
        checkpoint=100,
        resume=resume,
    )
    wanted = fit("data=1", 6, "alone", False).model.state_dict()
    for number, (before, after) in enumerate((("branch=2", "data=1"), ("branch=2 pipeline=2", "branch=2 shard=2"))):
        fit(before, 3, str(number), False)
        found = fit(after, 6, str(number), True).model.state_dict()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("plan", [more("branch=2"), "branch=2 pipeline=2"])
def test_predictions_and_metrics(plan: str) -> None:
    case = BRANCHES["two-decoders"]
    model, data = case.build().eval(), case.data(11)
    with torch.no_grad():
        wanted = model(data[0])
    asked = {"batch_size": 4, "plan": plan, "devices": f"cpu:{Plan.parse(plan).devices}"}
    found = meshfit.predict(model, data, **asked)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])
    measured = meshfit.evaluate(model, data, loss=case.loss, metrics={"largest": _largest}, **asked)
    assert measured["loss"] == pytest.approx(float(case.loss(wanted, data[1])), rel=1e-6)  # type: ignore[misc]
    assert measured["largest"] == pytest.approx(float(_largest(wanted, data[1]).mean()))


@pytest.mark.parametrize("plan", ["branch=2", "pipeline=2"])
def test_a_loss_that_says_nothing_of_its_mean(plan: str) -> None:
    """Over targets of which some are ignored: found by trying, on the model while it is whole."""
    case = BRANCHES["siamese"]
    model, (inputs, targets) = case.build().eval(), case.data(12)
    targets = targets.masked_fill(torch.arange(12) < 3, -100)
    loss = lambda outputs, targets: F.cross_entropy(outputs, targets)
    with torch.no_grad():
        wanted = float(loss(model(*inputs), targets))
    measured = meshfit.evaluate(model, (inputs, targets), loss=loss, batch_size=4, plan=plan, devices="cpu:2")
    assert measured["loss"] == pytest.approx(wanted, rel=1e-5)


def _largest(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return outputs["depth"].flatten(1).amax(1)


# Found from a recording alone


def flow_of(model: nn.Module, batch: Any) -> Flow:
    from meshfit.anatomy.cost import Meter

    return Flow(record(model, batch, meter=Meter, share=0.0))


def test_dealt_out_evenly() -> None:
    loads = [5.0, 3.0, 2.0, 2.0, 2.0]
    for many in (2, 3):
        at = even(loads, many)
        sums = [sum(load for load, r in zip(loads, at, strict=True) if r == rank) for rank in range(many)]
        assert max(sums) == {2: 7.0, 3: 5.0}[many]
    assert len(set(even([1.0] * 40, 4))) == 4


def test_the_inner_pair_is_chosen() -> None:
    flow = flow_of(Nested(), torch.randn(64, 8))
    dealt = deal(flow, 2)
    assert dealt is not None
    assert "small.weight" not in dealt.parameters
    assert {dealt.parameters[f"towers.{i}.0.0.weight"] for i in range(2)} == {(0,), (1,)}
    assert dealt.time < 0.7


def test_what_a_buffer_binds_stays_together() -> None:
    flow = flow_of(SharedNorm(), torch.randn(64, 8))
    dealt = deal(flow, 2)
    assert dealt is not None
    users = {rank for (what, _), rank in dealt.owners.items() if what.startswith("module norm")}
    assert len(users) == 1
    assert {dealt.buffers.get(name, ALL) for name in ("norm.running_mean", "norm.num_batches_tracked")} == users


def test_phases_take_turns() -> None:
    flow = flow_of(TwoGroups(), torch.randn(64, 8))
    dealt = deal(flow, 2)
    assert dealt is not None
    phases = flow.phases(list(dealt.owners.values()), 2, late=dealt.late).phases[0]
    assert [any(phase.own) for phase in phases] == [True, True, False]
    assert all(len(phase.enters) == 1 for phase in phases[:2])
    assert all(len(ids) == 1 for phase in phases[:2] for ids in phase.joins)


# Refused beforehand

ASKED = {"loss": F.mse_loss, "optimizer": torch.optim.AdamW, "batch_size": 8, "steps": 1, "progress": False}


@pytest.mark.parametrize(
    ("make", "plan", "says"),
    [
        (Chain, "branch=2", "no parts that are worth 2 devices"),
        (Towers, "branch=3", "branch=2 would use all"),
        (Chain, "branch=2 pipeline=2", "no parts that are worth 2 devices"),
        (Towers, "branch=2 context=2", "has no sequence that could be cut"),
        (Towers, "branch=2 compile=whole", "cannot be compiled whole"),
    ],
)
def test_refused(make: Any, plan: str, says: str) -> None:
    data = torch.randn(16, 8), torch.randn(16, 4)
    with pytest.raises(PlanError, match=says) as error:
        meshfit.fit(make(), data, plan=plan, devices=f"cpu:{Plan.parse(plan).devices}", **ASKED)
    assert "works" in str(error.value) or "data=" in str(error.value)
