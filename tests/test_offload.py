"""Optimizer state in host memory: trains to the same bits, is away between steps, costs what it says.

``move=True`` makes state go away on CPUs too, where "host" and "device" are two places in one memory.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from meshfit.anatomy.probe_optimizer import state_bytes
from meshfit.axes.offload import optimizer as offload
from meshfit.axes.offload.optimizer import SMALL, Offloaded, Offloads, cut, offload_cost
from meshfit.axes.precision import LossScale
from meshfit.axes.refuse import check_optimizer
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.exchange.update import Update
from meshfit.plan import Plan
from tests.test_probe_optimizer import (
    CountsInGroup,
    CountsInItself,
    CountsInTensor,
    Distance,
    Lamb,
    Lion,
    Nested,
    NewEachStep,
    Plain,
    Shampoo,
    TakesModel,
)

CPU = torch.device("cpu")
SHAPES = ((64, 32), (32,), (40, 40), (2048,), (), (0,), (0, 3), (1500,), (16, 8, 20))
CHUNK = 8 * 1024


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtypes[i % len(dtypes)])) for i, shape in enumerate(SHAPES)]


def give_gradients(parameters: list[nn.Parameter], step: int, *, some: bool = False) -> None:
    """``some``: every third parameter has none in every other step, and the first never has one."""
    torch.manual_seed(step)
    for i, p in enumerate(parameters):
        p.grad = None if some and (i == 0 or (i + step) % 6 == 0) else torch.randn_like(p)


def state_storages(optimizer: Optimizer) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tree.tensors(dict(optimizer.state))]


def train(
    make: Callable[[list[nn.Parameter]], Optimizer],
    away: bool,
    *,
    move: bool = True,
    chunk: int = CHUNK,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    some: bool = False,
    schedule: Callable[[Optimizer], Any] | None = None,
) -> tuple[list[nn.Parameter], Optimizer, Offloaded | None]:
    ps = parameters(dtypes)
    optimizer = make(ps)
    offloaded = Offloaded(optimizer, CPU, chunk=chunk, move=move) if away else None
    scheduler = schedule(optimizer) if schedule else None
    for step in range(6):
        give_gradients(ps, step, some=some)
        (offloaded or optimizer).step()
        if scheduler is not None:
            scheduler.step()
        if offloaded is not None and move:
            assert all(storage.nbytes() < SMALL for storage in state_storages(optimizer))
    return ps, optimizer, offloaded


def assert_same(want: Any, got: Any) -> None:
    """To the bit, and in every number that is no tensor."""
    for a, b in zip(tree.leaves(want), tree.leaves(got), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def assert_trains_alike(make: Callable[[list[nn.Parameter]], Optimizer], **how: Any) -> None:
    kept = {key: value for key, value in how.items() if key not in ("move", "chunk")}
    want, whole, _ = train(make, False, **kept)
    got, optimizer, offloaded = train(make, True, **how)
    assert offloaded is not None
    assert_same([p.detach() for p in want], [p.detach() for p in got])
    held = [[p for group in one.param_groups for p in group["params"]] for one in (whole, optimizer)]
    for p, q in zip(*held, strict=True):
        assert_same(whole.state.get(p, {}), offloaded.read(q))
    with offloaded.present():
        assert_same(whole.state_dict(), optimizer.state_dict())


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()]),  # divides by the size
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, initial_accumulator_value=0.1),
    "Adam amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "AdamW tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-3)),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": Lion,
    "Lamb": Lamb,
    "Shampoo": Shampoo,
    "NewEachStep": NewEachStep,
    "CountsInGroup": CountsInGroup,
    "CountsInTensor": CountsInTensor,
    "CountsInItself": CountsInItself,
    "Nested": Nested,
    "TakesModel": lambda ps: TakesModel(nn.ParameterList(ps), 0.1),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_to_the_same_bits(name: str) -> None:
    assert_trains_alike(OPTIMIZERS[name], some=name not in ("CountsInGroup", "CountsInTensor"))


@pytest.mark.parametrize("chunk", [1, CHUNK, 2**30])
@pytest.mark.parametrize("move", [True, False])
def test_trains_to_the_same_bits_in_chunks_of_any_size(chunk: int, move: bool) -> None:
    assert_trains_alike(torch.optim.AdamW, chunk=chunk, move=move, some=True)


def test_muon() -> None:
    assert_trains_alike(lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2 and p.numel()]))


@pytest.mark.parametrize("name", ["AdamW", "SGD nesterov", "Adagrad", "Lion"])
def test_dtypes(name: str) -> None:
    assert_trains_alike(OPTIMIZERS[name], dtypes=(torch.float32, torch.bfloat16, torch.float64), some=True)


def in_groups(ps: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(
        [{"params": ps[::2], "weight_decay": 0.1, "lr": 0.01}, {"params": ps[1::2], "weight_decay": 0.0, "lr": 0.1}]
    )


@pytest.mark.parametrize("name", ["AdamW", "AdamW tensor lr", "SGD nesterov", "CountsInGroup", "CountsInTensor"])
def test_a_schedule_reaches_every_chunk(name: str) -> None:
    assert_trains_alike(OPTIMIZERS[name], schedule=lambda optimizer: LambdaLR(optimizer, lambda step: step / 10))


def test_a_schedule_of_several_things_in_several_groups() -> None:
    cycle = lambda optimizer: OneCycleLR(optimizer, [0.1, 0.2], total_steps=8)  # lr and betas
    assert_trains_alike(in_groups, schedule=cycle, some=True)


def test_counts_once_a_step() -> None:
    for kind, count in (
        (CountsInGroup, lambda o: o.param_groups[0]["step"]),
        (CountsInTensor, lambda o: o.param_groups[0]["step"].item()),
        (CountsInItself, lambda o: o.steps),
    ):
        _, optimizer, offloaded = train(kind, True)
        assert offloaded is not None
        assert len(offloaded.chunks) > 3
        assert count(optimizer) == 6
        assert all(count(chunk.optimizer) == 6 for chunk in offloaded.chunks)


def test_hooks_run_once_a_step() -> None:
    ps, called = parameters(), []
    optimizer = torch.optim.AdamW(ps)
    optimizer.register_step_pre_hook(lambda it, *_: called.append(("before", it)))
    offloaded = Offloaded(optimizer, CPU, chunk=CHUNK, move=True)
    optimizer.register_step_post_hook(lambda it, *_: called.append(("after", it)))
    give_gradients(ps, 0)
    offloaded.step()
    assert called == [("before", optimizer), ("after", optimizer)]


def test_state_tensors_remain_the_same_objects() -> None:
    ps = parameters()
    optimizer = torch.optim.AdamW(ps)
    give_gradients(ps, 0)
    optimizer.step()
    mine = optimizer.state[ps[0]]["exp_avg"]
    before = mine.clone()
    offloaded = Offloaded(optimizer, CPU, chunk=CHUNK, move=True)
    assert mine.untyped_storage().nbytes() == 0
    assert torch.equal(offloaded.read(ps[0])["exp_avg"], before)
    with offloaded.present():
        assert optimizer.state[ps[0]]["exp_avg"] is mine
        assert torch.equal(mine, before)
    offloaded.step()
    assert optimizer.state[ps[0]]["exp_avg"] is mine
    assert mine.untyped_storage().nbytes() == 0
    offloaded.fetch()
    assert mine.untyped_storage().nbytes() == mine.numel() * 4


def test_never_more_than_three_chunks_on_the_device() -> None:
    ps = parameters()
    optimizer = torch.optim.AdamW(ps)
    offloaded = Offloaded(optimizer, CPU, chunk=CHUNK, move=True)
    seen = []
    for chunk in offloaded.chunks:
        step = chunk.optimizer.step

        def watched(step: Any = step) -> None:
            step()
            seen.append(sum(s.nbytes() for s in state_storages(optimizer) if s.nbytes() >= SMALL))

        chunk.optimizer.step = watched
    peaks = []
    for i in range(3):
        give_gradients(ps, i)
        seen.clear()
        offloaded.step()
        peaks.append(max(seen))
    largest = max(2 * 4 * sum(p.numel() for p in chunk.parameters) for chunk in offloaded.chunks)
    total = 2 * 4 * sum(p.numel() for p in ps)
    assert peaks[0] <= largest  # made one chunk at a time
    assert max(peaks) <= 2 * largest < total  # on CPUs the third, on its way out, has left already


def test_loads_a_state_dict() -> None:
    """Loading puts new tensors and new groups in the optimizer; what was away for the old ones is forgotten."""
    want, whole, _ = train(in_groups, False)
    saved = copy.deepcopy(whole.state_dict())
    got = parameters()
    for p, q in zip(got, want, strict=True):
        p.data.copy_(q.data)
    optimizer = in_groups(got)
    offloaded = Offloaded(optimizer, CPU, chunk=CHUNK, move=True)
    give_gradients(got, 100)
    offloaded.step()
    for p, q in zip(got, want, strict=True):
        p.data.copy_(q.data)
    with offloaded.present():
        optimizer.load_state_dict(saved)
    for step in range(6, 9):
        for ps, one in ((want, whole), (got, offloaded)):
            give_gradients(ps, step)
            one.step()
    assert_same([p.detach() for p in want], [p.detach() for p in got])


def test_state_that_is_the_gradient_or_the_weight_itself_stays() -> None:
    class Keeps(Plain):
        def rule(self, p, g, state, group) -> None:
            p.sub_(state.setdefault("m", torch.zeros_like(p)).add_(g), alpha=group["lr"])
            state["last"], state["now"] = g, p.data

    runs = []
    for away in (False, True):
        ps = parameters()
        optimizer = Keeps(ps)
        stepped = Offloaded(optimizer, CPU, chunk=CHUNK, move=True) if away else optimizer
        for step in range(3):
            give_gradients(ps, step)
            stepped.step()
        runs.append([*(p.detach() for p in ps), *(p.grad for p in ps)])
    assert_same(*runs)


def test_one_memory_under_two_state_tensors() -> None:
    class Halves(Plain):
        def rule(self, p, g, state, group) -> None:
            if not state:
                both = torch.zeros(2, *p.shape)
                state["m"], state["v"] = both[0], both[1]
            state["m"].add_(g)
            state["v"].addcmul_(g, g)
            p.sub_(state["m"] / (state["v"].sqrt() + 1), alpha=group["lr"])

    assert_trains_alike(Halves)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)])
def test_update_steps_through_it(optimizer: Callable[..., Optimizer]) -> None:
    """The fused kernel, chosen after the chunks were made; clipping, loss scale, schedule and skipped steps."""
    runs = []
    for away in (False, True):
        ps = parameters()
        one = optimizer(ps)
        offloaded = Offloaded(one, CPU, chunk=CHUNK, move=True) if away else None
        scheduler = LambdaLR(one, lambda step: 1 / (step + 1))
        update = Update(
            one,
            scheduler,
            clip=1.0,
            scale=LossScale(CPU, start=8.0),
            offload=None if offloaded is None else Offloads([offloaded]),
        )
        assert update.fused
        for step in range(4):
            give_gradients(ps, step)
            gradients = [p.grad for p in ps if p.grad is not None]
            if step == 2:
                gradients[0].fill_(torch.inf)
            assert update(gradients, torch.tensor(1.0)).taken == (step != 2)
        runs.append([p.detach() for p in ps])
    assert all(group["fused"] for chunk in offloaded.chunks for group in chunk.optimizer.param_groups)
    assert_same(*runs)


def test_what_fused_kernels_are_told_reaches_every_chunk() -> None:
    ps = parameters()
    optimizer: Any = torch.optim.AdamW(ps, fused=True)
    offloaded = Offloaded(optimizer, CPU, chunk=CHUNK, move=True)
    before = [p.detach().clone() for p in ps]
    give_gradients(ps, 0)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    offloaded.step()
    assert_same(before, [p.detach() for p in ps])
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
    for p in ps:
        p.grad.mul_(4.0)
    offloaded.step()
    del optimizer.found_inf, optimizer.grad_scale
    give_gradients(ps, 1)
    offloaded.step()
    assert not any(hasattr(chunk.optimizer, "found_inf") for chunk in offloaded.chunks)
    plain = parameters()
    whole = torch.optim.AdamW(plain, fused=True)
    for step in range(2):
        give_gradients(plain, step)
        whole.step()
    for p, q in zip(plain, ps, strict=True):
        torch.testing.assert_close(q, p)


def test_refuses_what_cannot_be_stepped_in_parts() -> None:
    with pytest.raises(PlanError, match="Distance cannot have its state in host memory") as error:
        check_optimizer(Plan.parse("offload=optimizer"), Distance(parameters()))
    assert "in two turns" in str(error.value)
    assert len(Offloaded(torch.optim.AdamW(parameters()), CPU, chunk=CHUNK).chunks) > 3


def test_the_plan_that_works_has_no_words_of_what_it_leaves_out() -> None:
    words = "shard=2 zero=1 tensor=2 sequence=split pipeline=2 schedule=zbv cut=b branch=2"
    check_optimizer(Plan.parse(words), torch.optim.AdamW(parameters()))
    with pytest.raises(PlanError, match=r"\n  data=16 works"):
        check_optimizer(Plan.parse(words), Distance(parameters()))


def test_cut() -> None:
    assert cut([], 10) == []
    assert cut([0, 0], 10) == [range(0, 2)]
    assert cut([4, 4, 4, 20, 1], 10) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert cut([4, 4], 1) == [range(0, 1), range(1, 2)]


class Late:
    """A lane whose copies run only when something waits for them: the latest that a GPU may take."""

    def __init__(self, device: torch.device):
        self.waiting: list[Callable[[], None]] = []

    @contextmanager
    def copying(self, after: Any = None) -> Iterator[Any]:
        copies: list[tuple[Tensor, Tensor]] = []
        real = Tensor.copy_

        def later(to: Tensor, of: Tensor, non_blocking: bool = False) -> Tensor:
            copies.append((to, of.clone() if after is None else of))  # what is sent was stepped before
            return to

        def run() -> None:
            if after is not None:
                after.wait()
            for to, of in copies:
                real(to, of)

        end = SimpleNamespace()
        end.wait = end.settle = lambda: self.run_until(run)
        Tensor.copy_ = later  # type: ignore[method-assign]
        try:
            yield end
        finally:
            Tensor.copy_ = real
        self.waiting.append(run)

    def run_until(self, last: Callable[[], None]) -> None:
        while last in self.waiting:
            self.waiting.pop(0)()

    def uses(self, tensor: Tensor) -> None: ...


@pytest.mark.parametrize("chunk", [1, CHUNK, 2**30])
@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "NewEachStep"])
def test_waits_for_the_copies_it_needs(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CopyLane", Late)
    assert_trains_alike(OPTIMIZERS[name], chunk=chunk, some=True)


class Copies(TorchDispatchMode):
    """Counts copies of bytes: into the optimizer's storages, and out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8:
            self.calls, self.bytes = self.calls + 1, self.bytes + args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD nesterov", "Adagrad", "Adafactor", "Shampoo", "Nested", "Lion"])
def test_costs_what_it_says(name: str) -> None:
    ps = [p for p in parameters() if p.numel() or name != "Adafactor"]
    ps[3].requires_grad_(False)
    optimizer = OPTIMIZERS[name](ps)
    state = state_bytes(optimizer)
    cost = offload_cost([state.of(tuple(p.shape), "float32") for p in ps if p.requires_grad], chunk=CHUNK)
    optimizer.state.pop(ps[3], None)  # Adagrad has state for what is not trained too
    offloaded = Offloaded(optimizer, CPU, chunk=CHUNK, move=True)
    give_gradients(ps, 0)
    ps[3].grad = None
    offloaded.step()
    give_gradients(ps, 1)
    ps[3].grad = None
    with Copies() as copies:
        offloaded.step()
    assert {*cost.calls} <= {"host_to_device", "device_to_host"}
    assert copies.calls == sum(cost.calls.values())
    assert copies.bytes == sum(cost.moved.values())
    hosts = [one.host for chunk in offloaded.chunks for one in chunk.away.values()]
    assert not any(chunk.spare for chunk in offloaded.chunks)
    assert sum(host.numel() for host in hosts) == cost.host["optimizer"]
    chunks = [sum(one.host.numel() for one in chunk.away.values()) for chunk in offloaded.chunks]
    stays = sum(s.nbytes() for s in state_storages(optimizer))
    assert cost.held["optimizer"] == stays + max(sum(chunks[i : i + 3]) for i in range(len(chunks)))


def test_adamw_costs_eight_bytes_an_element() -> None:
    weight = nn.Parameter(torch.zeros(1000, 1000))
    state = state_bytes(torch.optim.AdamW([weight]))
    cost = offload_cost([state.of((1000, 1000), "float32")])
    assert cost.host == {"optimizer": 8_000_000}
    assert cost.moved == {"host_to_device": 8_000_000, "device_to_host": 8_000_000}
    assert cost.calls == {"host_to_device": 2, "device_to_host": 2}
    assert cost.held == {"optimizer": 8_000_004}
