"""Sharding: which parameters are gathered together, how they are cut, and what that costs."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import zoo
from benchmarks.collectives import Collectives
from meshfit.anatomy.trace import Trace
from meshfit.axes.mesh import Mesh
from meshfit.axes.place import Placed, place
from meshfit.axes.precision import DTYPES
from meshfit.axes.shard.axis import Shard
from meshfit.axes.shard.rounding import SharedCopies
from meshfit.axes.shard.units import traced, units
from meshfit.comm.flat import Flat
from meshfit.cost import Cost
from meshfit.exchange.protocol import StepScalars
from meshfit.exchange.scatter import Scatter
from meshfit.loss.objective import Objective
from meshfit.plan import Plan
from tests import traps
from tests.distributed import distributed
from tests.ranked import X, Y, built

cloudpickle.register_pickle_by_value(traps)

BATCH = (X[:4], Y[:4])


def trace_of(model: nn.Module, step: Any = None) -> Trace:
    found = traced(model, Objective(None if step else F.mse_loss, step), BATCH, device="cpu")
    assert isinstance(found, Trace)
    return found


def units_of(model: nn.Module, step: Any = None) -> dict[tuple[str, ...], set[str]]:
    found = units(trace_of(model, step), tuple(name for name, _ in model.named_parameters()))
    names = [name for unit in found for name in unit.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    return {unit.entrances: set(unit.parameters) for unit in found}


def named(model: nn.Module, *paths: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(paths)}


# Units


def test_blocks_are_units_and_what_is_small_is_the_wholes() -> None:
    model = traps.Plain()
    blocks = {(f"blocks.{i}",): named(model, f"blocks.{i}.") for i in range(3)}
    assert units_of(model) == {("",): named(model, "last"), ("first",): named(model, "first"), **blocks}


def test_ties_are_a_unit_with_an_entrance_for_each() -> None:
    model = traps.Tied()
    found = units_of(model)
    assert found["token", "head", "other"] == {"token.weight"}
    assert all((f"blocks.{i}",) in found for i in range(3))


def test_what_nothing_uses_is_the_wholes() -> None:
    model = traps.Unused()
    found = units_of(model)
    assert found["",] == named(model, "never")
    assert found["aux",] == named(model, "aux")


def test_a_parameter_that_the_models_own_code_uses_is_the_wholes() -> None:
    model = traps.Plain()
    assert units_of(model, traps.decay) == {("",): named(model, "")}
    found = units_of(traps.ReadsSibling())
    assert {f"blocks.{i}.norm.weight" for i in range(3)} < found["",]
    assert "blocks.0.up.weight" in found["blocks.0",]


def test_a_block_called_in_part() -> None:
    """A step that calls only some modules of a block, and never the block."""

    def step(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model.last(model.blocks[0].up(model.first(batch[0]))[:, :8]), batch[1])

    found = units_of(traps.Plain(), step)
    assert found["blocks.0.up",] == {"blocks.0.up.weight", "blocks.0.up.bias"}
    assert "blocks.0.down.weight" in found["",]


def test_nothing_inside_what_decides_is_an_entrance() -> None:
    entrances = {entrance for many in units_of(traps.MixtureOfExperts()) for entrance in many}
    assert {"blocks.0", "blocks.1", "blocks.2"} < entrances
    assert not any("expert" in entrance or "gate" in entrance for entrance in entrances)
    assert units_of(traps.SkipsLayers()).keys() == {("",)}


def test_one_huge_layer_is_a_unit_of_its_own() -> None:
    found = units_of(traps.Huge())
    assert found["huge",] == {"huge.weight"}


def test_weights_that_something_else_uses_too_are_not_rounded() -> None:
    model = traps.Plain()
    (unit,) = (
        u for u in units(trace_of(model), tuple(n for n, _ in model.named_parameters())) if "blocks.1" in u.entrances
    )
    assert unit.rounded == {n for n in unit.parameters if "norm" not in n}
    model = traps.UsedTwice()
    (unit,) = (
        u for u in units(trace_of(model), tuple(n for n, _ in model.named_parameters())) if "blocks.1" in u.entrances
    )
    assert unit.rounded == {"blocks.1.up.bias", "blocks.1.down.weight", "blocks.1.down.bias"}


@pytest.mark.parametrize("degree", [1, 2, 3, 7, 40])
def test_rows_hold_every_element_once(degree: int) -> None:
    shapes = [(), (1,), (3, 5), (0,), (2, 1, 4), (7,)]
    wholes = [torch.randn(shape) for shape in shapes]
    wholes += [torch.randn(4, 6)[:, ::2], torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)]
    parts, flats = [], []
    for rank in range(degree):
        flats.append(Flat([nn.Parameter(whole.clone()) for whole in wholes], degree, rank))
        flats[-1].own(torch.empty(flats[-1].part))
        parts.append(flats[-1].mine)
        assert sum(p.numel() for p in flats[-1].parameters) <= flats[-1].part
    whole = sum(-(-whole.numel() // 16) * 16 for whole in wholes)  # each from a multiple of 64 bytes on
    assert {part.numel() for part in parts} == {-(-whole // degree // 16) * 16}
    for view, whole in zip(flats[0].views(torch.cat(parts)), wholes, strict=True):
        assert torch.equal(view, whole)
    for i, whole in enumerate(wholes):  # in whatever layout a tensor comes
        for flat in flats:
            assert torch.equal(flat.cut(i, whole.contiguous()), flat.parameters[i])


# Cost


def cost_of(model: nn.Module, objective: Objective, batch: Any, plan: Plan) -> Cost:
    trace = traced(model, objective, batch, device="cpu", plan=plan)
    assert isinstance(trace, Trace)
    found = units(trace, tuple(name for name, _ in model.named_parameters()))
    shard = Shard(degree=plan.shard, zero=plan.zero, units=found, gathered=DTYPES.get(plan.precision))
    return shard.cost(trace, copies=plan.data, microbatches=plan.microbatches)[1]


def laid_out(name: str, plan: Plan) -> tuple[Placed, Scatter, Any, Cost]:
    """A model under a plan, a step of it, and what that is said to cost."""
    if name in zoo.ZOO:
        case = zoo.ZOO[name]
        model, objective, batch = case.build(), Objective(case.loss, None), case.data(4)
    else:
        model, objective, batch = built(traps.MODELS[name]), Objective(F.mse_loss, None), BATCH
    model.train()
    cost = cost_of(model, objective, batch, plan) if dist.get_rank() == 0 else Cost()
    mesh = Mesh.of(plan, dist.get_rank(), dist.get_world_size())
    placed = place(plan, model, mesh, torch.device("cpu"), objective=objective, few=lambda: batch, same=True)
    assert placed.shards is not None
    accumulate = plan.zero == 1 and plan.microbatches > 1
    exchange = Scatter(placed.shards, world=mesh.world, copies=mesh.over("data"), accumulate=accumulate)

    def step() -> None:
        for i in range(plan.microbatches):
            with torch.autocast("cpu", torch.bfloat16, enabled=plan.precision == "bf16"), placed.inside():
                loss = objective(model, batch)
            if i == plan.microbatches - 1:
                exchange.arm(StepScalars())
            loss.backward()
        exchange.finish()

    return placed, exchange, step, cost


SOME = ["tied-gpt", "Adapters"]
MANY = [*SOME, "lstm", "OnlyHead", "CalledTwice", "SharedBlock", "MixtureOfExperts", "NotFloating", "Odd"]
PLANS = {
    "shard=2": [*MANY, "ActsTwice", "Dtypes", "PartWithoutGradient", "weight_norm"],
    "shard=2 zero=1 microbatches=2": [*SOME, "OnlyHead", "CalledTwice", "Odd"],
    "shard=2 zero=2": SOME,
    "shard=2 precision=bf16": [*SOME, "CalledTwice"],
    "shard=2 precision=bf16-compute": SOME,
    "shard=2 zero=2 precision=bf16-compute": SOME,
    "shard=2 microbatches=2 recompute=full": SOME,
    "shard=3": SOME,
    "data=2 shard=2 zero=2 microbatches=2": SOME[1:],
}


def counted(plan: Plan, models: list[str]) -> None:
    for name in models:
        _, exchange, step, cost = laid_out(name, plan)
        for _ in range(2):
            with warnings.catch_warnings(), Collectives() as seen:
                warnings.simplefilter("ignore")
                step()
            if dist.get_rank() == 0:
                assert (name, dict(seen.calls)) == (name, cost.calls)
                assert (name, dict(seen.moved)) == (name, cost.moved)
            exchange.clear()


@pytest.mark.parametrize("plan", PLANS)
def test_cost_is_what_runs(plan: str) -> None:
    @distributed(world=Plan.parse(plan).devices)
    def run(plan: str) -> None:
        counted(Plan.parse(plan), PLANS[plan])

    run(plan=plan)


class Normed(nn.Module):
    """Blocks whose norms are little beside their products, or not."""

    def __init__(self, width: int):
        super().__init__()
        make = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8))
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, : Y.shape[1]]


def test_what_autocast_leaves_alone_is_the_wholes_if_it_is_little() -> None:
    norms = {f"blocks.{i}.0.{name}" for i in range(3) for name in ("weight", "bias")}
    wide, narrow = units_of(Normed(256)), units_of(Normed(8))
    assert wide[("",)] == norms
    assert narrow[("",)].isdisjoint(norms)
    assert all(wide[(f"blocks.{i}",)] == named(Normed(256), f"blocks.{i}.") - norms for i in range(3))


@distributed(world=2)
def test_each_unit_travels_in_one_call_and_a_tied_one_once_a_pass() -> None:
    """Weights of two dtypes are gathered together; gradients over a communicator of their own."""
    placed, exchange, step, _ = laid_out("tied-gpt", Plan.parse("shard=2 precision=bf16"))
    shards = placed.shards
    assert shards is not None
    assert shards.group is not shards.scatter_group
    assert any(len({flat.gathered for flat in unit.flats}) > 1 for unit in shards.units)
    gathered: list[int] = []
    plain = shards._gather
    shards._gather = lambda flats, rows: (gathered.append(len(flats)), plain(flats, rows))[1]
    (tied,) = (unit for unit in shards.units if unit.stays)
    times = []
    start = shards._start_gather
    shards._start_gather = lambda unit: (times.append(unit) if not unit.unsharded else None, start(unit))[1]
    for _ in range(2):
        gathered.clear()
        times.clear()
        with Collectives() as seen:
            step()
        exchange.clear()
        assert seen.calls["all_gather"] == len(gathered)
        assert seen.calls["reduce_scatter"] == len(shards.units)
        assert times.count(tied) == 1


@pytest.mark.parametrize("plan", ["shard=2 precision=bf16", "shard=2 zero=2 precision=bf16"])
@distributed(world=2)
def test_a_trial_without_autocast_is_exact_and_changes_nothing(plan: str) -> None:
    case = zoo.ZOO["tied-gpt"]
    placed, exchange, step, cost = laid_out("tied-gpt", Plan.parse(plan))
    objective, batch = Objective(case.loss, None), case.data(4)
    want = objective(case.build().train(), batch)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), placed.inside():
            got = objective(placed.model, batch)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        if grad:
            exchange.arm(StepScalars())
            got.backward()
            exchange.finish()
            exchange.clear()
            break
        exchange.clear()  # nothing that the trial gathered is left
        with Collectives() as seen:
            step()
        exchange.clear()
        if dist.get_rank() == 0:
            assert dict(seen.moved) == cost.moved


def storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}


@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2 zero=2", "shard=2 precision=bf16", "shard=2 precision=bf16-compute"]
)
@distributed(world=2)
def test_held_is_what_there_is(plan: str) -> None:
    """Weights at rest; gradients, with those summed whole before they are scattered; and with zero=3 the most that is
    ever gathered: never the whole model."""
    for name in ("tied-gpt", "Adapters", "NotFloating", "Odd"):
        placed, exchange, step, cost = laid_out(name, Plan.parse(plan))
        shards = placed.shards
        assert shards is not None
        flats, most = [flat for unit in shards.units for flat in unit.flats], []
        summed: list[int] = [0]
        returned = exchange.returned
        exchange.returned = lambda *given, returned=returned, exchange=exchange, summed=summed: (
            returned(*given),
            summed.append(sum(storages(exchange._sums.values()).values())),
        )
        plain = shards._unshard
        shards._saved._unshard = shards._unshard = lambda unit, plain=plain, flats=flats, most=most: (
            plain(unit),
            most.append(sum(storages(flat.whole for flat in flats).values())),
        )
        step()
        weights = storages([*placed.model.parameters(), *(flat.whole for flat in flats if "zero" in plan)])
        gradients = storages(p.grad for p in placed.model.parameters())
        whole = sum(p.nbytes for p in built(traps.MODELS[name]).parameters()) if name in traps.MODELS else None
        exchange.clear()
        if dist.get_rank() == 0:
            assert (name, sum(weights.values())) == (name, cost.held["weights"])
            assert (name, sum(gradients.values()) + max(summed)) == (name, cost.held["gradients"])
            assert (name, max(most)) == (name, cost.held.get("gathered", max(most)))
        if whole is not None and "zero" not in plan and name == "Adapters":
            assert max(most) + sum(weights.values()) < whole


@pytest.mark.parametrize("changes", [False, True])
def test_products_of_one_tensor_share_its_copy(changes: bool) -> None:
    """Under autocast, to the last bit; one that was changed in between is rounded again."""

    def run(copies: Callable[[Any, torch.dtype], Any]) -> tuple[list[Tensor], set[int]]:
        torch.manual_seed(0)
        x, layers, saved = torch.randn(4, 8, requires_grad=True), [nn.Linear(8, 8) for _ in range(3)], set[int]()

        def pack(tensor: Tensor) -> Tensor:
            saved.update([tensor.untyped_storage().data_ptr()] if tensor.shape == x.shape else [])
            kept.append(tensor)
            return tensor

        kept: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(pack, lambda t: t):
            y, outputs = x * 2, []
            for layer in layers:
                outputs.append(layer(copies(y, torch.bfloat16)))
                y = y.mul_(1.5) if changes else y
        total = sum((out.float() * (i + 1)).square().sum() for i, out in enumerate(outputs))
        assert isinstance(total, Tensor)
        total.backward()
        assert x.grad is not None
        return [*outputs, x.grad, *(layer.weight.grad for layer in layers)], saved  # type: ignore[list-item]

    want, each = run(lambda x, dtype: x)
    got, shared = run(SharedCopies())
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert (len(each), len(shared)) == (3, 3 if changes else 1)


def test_a_shared_copy_goes_with_its_tensor() -> None:
    copies, x = SharedCopies(), torch.randn(2, requires_grad=True) * 1
    assert copies(x, torch.bfloat16).dtype == torch.bfloat16
    assert copies(x.detach(), torch.bfloat16).dtype == torch.float32  # autocast rounds it
    del x
    gc.collect()
    assert not copies._copy.numel()
