"""``offload=activations``: the training of one device, and what is saved is in host memory in between.

On CPUs "host" and "device" are two places in one memory; the code is the same.
"""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import memory
from benchmarks.anatomy_live import LiveBytes
from benchmarks.zoo import ZOO
from meshfit.axes import refuse
from meshfit.axes.offload import activations as saved
from meshfit.axes.offload import axis
from meshfit.axes.offload.activations import HostActivations
from meshfit.axes.recompute.axis import Recompute
from meshfit.errors import PlanError
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from tests.distributed import distributed
from tests.few import more
from tests.ranked import assert_alike
from tests.test_offload import Late

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "SMALLEST", 64)
    monkeypatch.setattr(saved, "WINDOW", 20_000)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))))


def gradients(model: nn.Module, x: Tensor, host: HostActivations | None) -> list[Tensor]:
    model.zero_grad()
    if host is None:
        loss = model(x).square().mean()
    else:
        host.begin(set(), ())
        with saved_tensors_hooks(host.pack, host.unpack):
            loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("small")
def test_gradients_to_the_last_bit() -> None:
    model, x, host = network(), torch.randn(64, 32), HostActivations(CPU)
    want = gradients(model, x, None)
    for _ in range(3):
        for a, b in zip(want, gradients(model, x, host), strict=True):
            assert torch.equal(a, b)
    assert host.moved > 3 * 12 * x.nbytes
    taken = host.pool.bytes
    gradients(model, x, host)
    assert host.pool.bytes == taken  # host memory is used again


@pytest.mark.usefixtures("small")
def test_waits_for_the_copies_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are done no sooner than somebody waits for them."""
    monkeypatch.setattr(saved, "CopyLane", Late)
    model, x, host = network(), torch.randn(64, 32), HostActivations(CPU)
    want = gradients(model, x, None)
    for _ in range(3):
        for a, b in zip(want, gradients(model, x, host), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("small")
def test_little_is_left_on_the_device() -> None:
    """Between forward and backward: what is on its way."""
    model, x, host = network(), torch.randn(64, 32), HostActivations(CPU)
    with saved_tensors_hooks(host.pack, host.unpack):
        loss = model(x).square().mean()
    here = sum(copy.size for copy in host._leaving)
    assert here <= saved.WINDOW
    assert host.moved > 5 * saved.WINDOW
    loss.backward()
    del loss
    gc.collect()
    assert not host._leaving or all(copy.left <= 0 for copy in host._leaving)
    assert not host._coming


@pytest.mark.usefixtures("small")
def test_what_is_changed_in_place_is_refused() -> None:
    """As torch does without."""
    host, x = HostActivations(CPU), torch.randn(64, 32, requires_grad=True)
    with saved_tensors_hooks(host.pack, host.unpack):
        y = x.exp()
        y.mul_(2)
        made = y.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()


@pytest.mark.usefixtures("small")
def test_inputs_of_recomputed_blocks_move() -> None:
    """They are what is left on the device with recompute=full."""

    def live(host: HostActivations | None) -> int:
        model = network()
        Recompute(word="full", blocks=tuple(str(i) for i in range(0, 18, 3))).apply(model)
        hooks = nullcontext() if host is None else saved_tensors_hooks(host.pack, host.unpack)
        with LiveBytes() as held, hooks:
            loss = model(torch.randn(64, 32)).square().mean()
        gc.collect()
        size = held.bytes
        loss.backward()
        return size

    assert live(HostActivations(CPU)) < live(None) / 3


@pytest.mark.usefixtures("small")
def test_a_graph_is_gone_through_twice() -> None:
    model, x, host = network(), torch.randn(64, 32), HostActivations(CPU)
    with saved_tensors_hooks(host.pack, host.unpack):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    for a, p in zip(once, model.parameters(), strict=True):
        assert torch.equal(2 * a, p.grad)  # type: ignore[operator]


PLANS = {
    "data=2 microbatches=2": "tied-gpt",
    "data=2 recompute=full": "tied-gpt",
    "data=2 recompute=full+loss": "llama",
    "shard=2": "tied-gpt",
    "shard=2 recompute=full": "tied-gpt",
    "shard=2 zero=2": "t5",
    "tensor=2 sequence=split": "tied-gpt",
    "tensor=2 sequence=split recompute=full": "llama",
    "pipeline=2 microbatches=4": "tied-gpt",
    "pipeline=2 microbatches=2 recompute=full": "llama",
    "pipeline=2 schedule=zbv microbatches=4": "tied-gpt",
    "context=2": "tied-gpt",
    "context=2 recompute=full": "tied-gpt",
    "expert=2": "mixtral",
    "data=2 compile=block": "tied-gpt",
}
OFTEN = {"shard=2 recompute=full", "tensor=2 sequence=split", "pipeline=2 microbatches=4", "context=2"}


@pytest.mark.parametrize(
    ("plan", "name"), [(p, n) if p in OFTEN else more(p, n) for p, n in PLANS.items()], ids=lambda each: each
)
def test_trains_like_one_device(plan: str, name: str) -> None:
    @distributed(world=Plan.parse(plan).devices, timeout=180)
    def run(plan: str, name: str) -> None:
        saved.SMALLEST, saved.WINDOW = 64, 20_000
        moved = []
        real = saved.HostActivations._send
        saved.HostActivations._send = lambda *args: moved.append(0) or real(*args)  # type: ignore[method-assign]
        case = ZOO[name]
        try:
            assert_alike(case.build, f"{plan} offload=activations", data=case.data(18), loss=case.loss, clip=1.0)
        finally:
            saved.HostActivations._send = real  # type: ignore[method-assign]
        assert len(moved) > 6

    run(plan=plan, name=name)


@pytest.mark.parametrize("recompute", [more("none"), "full"])
def test_costs_what_it_says(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saved, axis):
        monkeypatch.setattr(module, "SMALLEST", 1024)
        monkeypatch.setattr(module, "WINDOW", 2**18)
    case, plan = memory.CASES[1], Plan.parse(f"data=1 recompute={recompute} offload=activations")
    want = cost(plan, *memory.trace_of(case))
    got = memory.watch(memory.job_of(case, plan), World(0, 1, CPU))
    assert got.host["activations"] == pytest.approx(want.host["activations"], rel=0.05)
    assert got.held["activations"] <= 1.05 * want.held["activations"]
    assert want.held["activations"] < want.host["activations"]


def test_plans() -> None:
    assert str(Plan.parse("offload=activations+optimizer")) == "data=1 offload=optimizer+activations"
    with pytest.raises(PlanError, match="keeps results of products itself"):
        refuse.check(Plan.parse("offload=activations recompute=selective"), nn.Linear(2, 2))
    with pytest.raises(PlanError, match="offload=activations moves what is saved"):
        refuse.check(Plan.parse("offload=activations compile=whole"), nn.Linear(2, 2))
