"""Rows between regions: each rank computes its share, and all of it trains as before."""

import copy
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor as Array
from torch import nn

import meshfit
from benchmarks.zoo import ZOO, mean_loss
from meshfit.axes.cut_parameters import CutParameters
from meshfit.axes.tensor import plan as planning
from meshfit.axes.tensor.cut import split_model
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.region import TensorPlan
from meshfit.axes.tensor.sliced import SlicedTensor
from meshfit.comm import collectives
from meshfit.comm.group import RankGroup
from meshfit.errors import PlanError
from tests import test_tensor_step
from tests.distributed import distributed
from tests.few import more
from tests.test_tensor_step import WIDTH, Model, built, error, gradients, loss_of, text

cloudpickle.register_pickle_by_value(test_tensor_step)


def plan_of(name: str, degree: int = 2) -> TensorPlan:
    case = ZOO[name]
    batch = case.data(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_tensor(case.build(), lambda model: mean_loss(case, model, batch), degree, by_rows=True)


def by_rows(model: nn.Module) -> TensorPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_tensor(model, lambda m: loss_of(m, text()), 2, by_rows=True)
    assert any(region.rows for region in plan.regions), plan.notes
    return plan


def spread(model: nn.Module) -> CutParameters:
    return split_model(model, by_rows(model), dist.group.WORLD)


def cut_by_rows(plan: TensorPlan) -> set[str]:
    return {path for region in plan.regions for path in region.rows}


def test_norms_and_dropout_are_found_wherever_they_are() -> None:
    bert = cut_by_rows(plan_of("bert"))
    assert {"bert.embeddings.LayerNorm", "bert.encoder.layer.1.attention.output.LayerNorm"} <= bert
    llama = plan_of("llama")
    assert cut_by_rows(llama) == {
        "model.norm",
        *(f"model.layers.{i}.{norm}_layernorm" for i in range(3) for norm in ("input", "post_attention")),
    }
    forward = [each.op for each in llama.traffic if not each.backward]
    assert forward.count("reduce_scatter") == 6  # two a block
    assert forward.count("all_gather") == 7  # and one for the head


@pytest.mark.parametrize("name", ["gpt2", more("llama"), more("bert"), "vit"])
def test_blocks_by_themselves_give_the_plan_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_of(name)
    monkeypatch.setattr(planning, "CHECKED_WHOLE", 0)
    blocks = plan_of(name)
    assert cut_by_rows(blocks) == cut_by_rows(whole)
    said, counted = (sum(each.elements for each in plan.traffic) for plan in (blocks, whole))
    assert 0.75 * counted < said <= counted  # two blocks or three: the ends count
    assert sorted(blocks.partial) == sorted(whole.partial)


class Mixing(nn.Module):
    """Looks like a norm, but each row depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Array) -> Array:
        return self.scale * (x - x.mean(1, keepdim=True))


@distributed(world=2)
def test_what_mixes_rows_sees_all_of_them() -> None:
    alone: Any = built()
    alone.blocks[1].second = Mixing()
    model = copy.deepcopy(alone)
    plan = by_rows(model)
    assert "blocks.0.second" in cut_by_rows(plan)
    assert "blocks.1.second" not in cut_by_rows(plan)
    parts = split_model(model, plan, dist.group.WORLD)
    loss, found = gradients(model, parts)
    exact, want = gradients(alone)
    assert abs(loss - exact) < 1e-5
    assert error(found, want) < 1e-4


@distributed(world=2)
def test_a_step_is_that_of_one_device() -> None:
    """Also over an odd number of rows, in half precision, and with blocks computed again: eleven rows by two ranks."""
    alone = built()
    model: Any = copy.deepcopy(alone)
    parts = spread(model)
    seen: list[tuple[int, ...]] = []
    hook = model.blocks[1].second.register_forward_hook(lambda m, a, out: seen.append(_local(out)))
    exact, want = gradients(alone)
    _, rounded = gradients(alone, autocast=True)
    for again in (False, True):
        model.again = again
        loss, found = gradients(model, parts)
        assert abs(loss - exact) < 1e-5
        assert error(found, want) < 1e-4
        _, found = gradients(model, parts, autocast=True)
        assert error(found, want) < 1.5 * error(rounded, want) + 1e-3
    assert set(seen) == {(4, 6 - dist.get_rank(), WIDTH)}
    hook.remove()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(text()).argmax(-1), alone.eval()(text()).argmax(-1))
    parts.undo()
    torch.testing.assert_close(model(text()), alone(text()))


def _local(x: Array) -> tuple[int, ...]:
    assert isinstance(x, SlicedTensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(x.shape)


@distributed(world=2)
def test_each_rank_drops_out_its_own_rows_reproducibly() -> None:
    model = Model(0.3)
    parts = spread(model)
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        found.append(gradients(model, parts))
    assert found[0][0] == found[1][0]
    assert error(found[0][1], found[1][1]) < 1e-6
    for name, grad in found[0][1].items():  # what all ranks hold is equal on all of them
        assert torch.equal(*parts.ranks.all_gather(grad)), name


@distributed(world=3)
def test_collectives_and_their_derivatives() -> None:
    """Of seven rows over three ranks, against sums written out."""
    group = RankGroup(dist.group.WORLD)
    counts = collectives.even(7, 3)
    start, size = sum(counts[: group.rank]), counts[group.rank]
    assert (start, size) == [(0, 3), (3, 2), (5, 2)][group.rank]
    random = torch.Generator().manual_seed(0)
    every, weight = torch.randn(3, 2, 7, 4, generator=random), torch.randn(2, 7, 4, generator=random)
    mine = every[group.rank].clone().requires_grad_()
    left = collectives.reduce_scatter(mine, -2, counts, group)
    torch.testing.assert_close(left, every.sum(0)[:, start : start + size])
    (left * weight[:, start : start + size]).sum().backward()
    torch.testing.assert_close(mine.grad, weight)
    part = every[0][:, start : start + size].clone().requires_grad_()
    entered = collectives.all_gather(part, -2, counts, group)
    torch.testing.assert_close(entered, every[0])
    (entered * every[group.rank]).sum().backward()
    torch.testing.assert_close(part.grad, every.sum(0)[:, start : start + size])
    x = every[0].clone().requires_grad_()
    own = collectives.split(x, -2, counts, group)
    (collectives.gather(own, -2, counts, group) * weight).sum().backward()
    torch.testing.assert_close(x.grad, weight)


@pytest.mark.parametrize("plan", ["tensor=2 sequence=split", "data=2 tensor=2 sequence=split"])
def test_training_and_predicting(plan: str) -> None:
    case = ZOO["vit"]  # 17 rows
    data = case.data(10)
    found = meshfit.verify(
        case.build(), data, loss=case.loss, optimizer=torch.optim.AdamW, batch_size=4, steps=4, plan=plan
    )
    assert found.equal, found
    model = case.build()
    want = meshfit.predict(model, data, batch_size=4)
    torch.testing.assert_close(meshfit.predict(model, data, batch_size=4, plan=plan), want)


def test_what_a_plan_may_say() -> None:
    assert meshfit.Plan.parse("tensor=2 rows=cut") == meshfit.Plan(tensor=2, sequence="split")
    with pytest.raises(PlanError, match="tensor=1 splits nothing"):
        meshfit.Plan.parse("data=2 rows=cut")
