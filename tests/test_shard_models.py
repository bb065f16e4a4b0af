"""Sharded training is that of one device, for models and steps that sharding is easily wrong about."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshfit
from meshfit.errors import PlanError, RankError
from tests import traps
from tests.distributed import distributed
from tests.few import every_other, more
from tests.ranked import ADAMW, BATCH, FIT, SGD, X, Y, assert_alike, built, trained

cloudpickle.register_pickle_by_value(traps)

OTHERS = ("shard=2 zero=2", "shard=2 zero=1 microbatches=2", "shard=2 recompute=full", "shard=2 zero=2 recompute=full")
ROUNDING = ("Attention",)  # a bias of keys has no gradient but rounding, of which AdamW makes steps of full size


@contextmanager
def naming(name: str) -> Iterator[None]:
    """A failure says which of several models it was."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("family", traps.FAMILIES)
@distributed(world=2)
def test_zero_3(family: str) -> None:
    for name, make in traps.FAMILIES[family].items():
        with naming(name):
            assert_alike(make, "shard=2", optimizer=SGD if name in ROUNDING else ADAMW)


@pytest.mark.parametrize(
    ("family", "half"), [case for name in traps.FAMILIES for case in ((name, 0), more(name, 1, id=f"{name}-more"))]
)
@distributed(world=2)
def test_other_plans(family: str, half: int) -> None:
    """Each model under one of them: there are more pairs than would be worth their time."""
    models = list(traps.FAMILIES[family].items())[half::2]
    for i, (name, make) in enumerate(models):
        plan = OTHERS[i % len(OTHERS)]
        microbatches = "microbatches" in plan and "spectral" in name  # which it iterates at every forward
        with naming(f"{name} under {plan}"):
            like = "data=1 microbatches=2" if microbatches else "data=1"
            assert_alike(make, plan, like=like, optimizer=SGD if name in ROUNDING else ADAMW)


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("shard=4", ("Odd", "Tied", "SkipsLayers")),
        ("data=2 shard=2 zero=1 microbatches=2", ("TwoScalars", "Reentrant", "Unused")),
    ],
)
@distributed(world=4)
def test_more_ranks_than_samples(plan: str, names: tuple[str, ...]) -> None:
    for name in names:
        with naming(name):
            assert_alike(traps.MODELS[name], plan)


@pytest.mark.parametrize("plan", ["shard=2", more("shard=2 zero=2")])
@distributed(world=2)
def test_steps(plan: str) -> None:
    for name, step in traps.STEPS.items():
        with naming(name):
            run = assert_alike(traps.Plain, plan, step=step)
            assert any("gathered together" in note for note in run.notes) == (name == "looks")


def with_backward(model: Any, batch: Any) -> Tensor:
    """Calls backward itself, for a part of the loss that it does not return."""
    y = model(batch[0])
    if torch.is_grad_enabled():
        (F.mse_loss(model(batch[0] / 2), batch[1]) * len(batch[0]) / BATCH).backward()
    return F.mse_loss(y, batch[1])


@pytest.mark.parametrize("plan", ["shard=2", "shard=2 zero=2", "shard=2 zero=1 microbatches=2"])
@distributed(world=2)
def test_backward_in_a_step(plan: str) -> None:
    data, like = (X[:16], Y[:16]), plan.replace("shard=2", "data=2").replace("zero=2", "").replace("zero=1", "")
    want = trained(built(traps.Plain), like, step=with_backward, data=data)[0].placed.tensors()
    got = trained(built(traps.Plain), plan, step=with_backward, data=data)[0].placed.tensors()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


# Ranks that differ


class InOtherOrder(traps.Plain):
    """On one of the ranks the blocks run in reverse. Each is of one size."""

    def forward(self, x):
        x = self.first(x)
        for block in list(self.blocks)[:: -1 if dist.get_rank() == 1 else 1]:
            x = block(x)
        return self.last(x)


class SkipsOnOneRank(traps.Plain):
    def between(self, i, block, x):
        return x if dist.get_rank() == 1 and i == 1 else block(x)


@pytest.mark.parametrize(
    ("make", "plan"),
    every_other(
        [InOtherOrder, SkipsOnOneRank],
        ["shard=2", "shard=2 microbatches=2", "shard=2 zero=2", "shard=2 zero=1 microbatches=2"],
    ),
)
@distributed(world=2)
def test_ranks_may_use_different_units(make: Any, plan: str) -> None:
    """They train as with whole copies, which do not have to meet."""
    like = "data=2 microbatches=2" if "microbatches" in plan else "data=2"
    want, got = (trained(built(make), each)[0].placed.tensors() for each in (like, plan))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


# What changes under way


class Clamps(traps.Plain):
    def between(self, i, block, x):
        with torch.no_grad():
            block.up.weight.clamp_(-0.1, 0.1)
        return block(x)


class _ClampsData(traps.Block):
    def forward(self, x):
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampsData(traps.Plain):
    """Torch is not told."""

    block = _ClampsData


@distributed(world=2)
def test_a_forward_that_changes_weights() -> None:
    """With zero=3 what it changes is a copy: refused. With zero=2 it is the weights."""
    with pytest.raises(PlanError, match=r"changes blocks.0.up.weight[\s\S]*shard=2 zero=2 works"):
        trained(built(Clamps), "shard=2")


@pytest.mark.parametrize("make", [Clamps, ClampsData])
@distributed(world=2)
def test_zero_2_trains_what_a_forward_changes(make: Any) -> None:
    want, got = (trained(built(make), plan)[0].placed.tensors() for plan in ("data=2", "shard=2 zero=2"))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_a_change_behind_torchs_back_is_found() -> None:
    with pytest.raises(PlanError, match="own code changes weights"):
        meshfit.fit(built(ClampsData), (X, Y), plan="shard=2", **FIT)


class ChangesWhatIsSaved(traps.Plain):
    def between(self, i, block, x):
        y = block(x)
        z = y * y
        y += 1
        return z


@distributed(world=2)
def test_a_saved_tensor_that_was_changed_is_refused() -> None:
    """As torch does by itself, unless there are hooks on saved tensors."""
    for plan in ("data=2", "shard=2"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(built(ChangesWhatIsSaved), plan)


class LatePenalty:
    """From the fourth step on, a weight is used by the step itself: no trace has seen it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        loss = F.mse_loss(model(batch[0]), batch[1])
        return loss + model.blocks[1].up.weight.square().sum() if self.calls > 8 else loss


@pytest.mark.parametrize("plan", ["shard=2", "shard=2 zero=2"])
@distributed(world=2)
def test_a_slice_is_not_taken_for_the_whole(plan: str) -> None:
    with pytest.raises(RankError, match="used where it is not gathered"):
        trained(built(traps.Plain), plan, step=LatePenalty(), steps=12)


# Rounded weights


class AutocastOff(traps.Plain):
    def between(self, i, block, x):
        with torch.autocast("cpu", enabled=i != 1):
            return block(x.float())


class LooksAtWeights(traps.Plain):
    def forward(self, x):
        return super().forward(x) * (1 + sum(block.up.weight.square().mean() for block in self.blocks))


@pytest.mark.parametrize(("plan", "precision"), [("shard=2", "bf16"), ("shard=2 zero=2", "fp16")])
@distributed(world=2)
def test_narrow_gathers_change_no_number(plan: str, precision: str) -> None:
    for make in (traps.Plain, AutocastOff, LooksAtWeights, traps.Attention, traps.ReentrantInside, traps.UsedTwice):
        # Autocast rounds a whole copy once for all its uses, and so sums their gradients rounded; a gathered one not.
        limit = {"atol": 1e-3, "rtol": 1e-3} if make is traps.UsedTwice else {"atol": 1e-6, "rtol": 1e-6}
        with naming(make.__name__):
            want, got = (
                trained(built(make), f"{each} precision={precision}", optimizer=SGD) for each in ("data=2", plan)
            )
            torch.testing.assert_close(got[1:], want[1:], **limit)
            torch.testing.assert_close(got[0].placed.tensors(), want[0].placed.tensors(), **limit)


@distributed(world=2)
def test_what_autocast_rounds_is_gathered_narrow() -> None:
    run = trained(built(AutocastOff), "shard=2 precision=bf16")[0]
    assert run.placed.shards is not None
    for i, gathered in enumerate(({torch.float32, torch.bfloat16}, {torch.float32}, {torch.float32, torch.bfloat16})):
        inside = {*run.model.blocks[i].modules()}
        (unit,) = (
            u for u in run.placed.shards.units if {module for places in u.places for module, _ in places} & inside
        )
        assert {flat.gathered for flat in unit.flats} == gathered
