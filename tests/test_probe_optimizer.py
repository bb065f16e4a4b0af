"""How an optimizer bears being taken apart, and what it keeps: by trial."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshfit.anatomy.probe_optimizer import OptimizerKind, probe_optimizer, state_bytes
from meshfit.data import tree


class Plain(Optimizer):
    """What the optimizers below have in common: a rule for one parameter."""

    def __init__(self, params: Any, lr: float = 1e-2, **settings: Any):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.start(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group)

    def start(self, group: dict[str, Any]) -> None: ...

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None: ...


class Lion(Plain):
    def rule(self, p, g, state, group) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        p.sub_(group["lr"] * (0.9 * m + 0.1 * g).sign())
        m.mul_(0.99).add_(g, alpha=0.01)


class Lamb(Plain):
    def rule(self, p, g, state, group) -> None:
        m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g, alpha=0.1)
        v = state.setdefault("v", torch.zeros_like(p)).mul_(0.99).addcmul_(g, g, value=0.01)
        update = m / (v.sqrt() + 1e-6)
        p.sub_(group["lr"] * p.norm() / update.norm() * update)


class Lars(Plain):
    def rule(self, p, g, state, group) -> None:
        p.sub_(group["lr"] * p.norm() / g.norm() * g)


class NewEachStep(Plain):
    """Momentum that is another tensor after every step."""

    def rule(self, p, g, state, group) -> None:
        state["m"] = 0.9 * state.get("m", 0.0) + g
        p.sub_(group["lr"] * state["m"])


class CountsInGroup(Plain):
    def start(self, group) -> None:
        group["step"] = group.get("step", 0) + 1

    def rule(self, p, g, state, group) -> None:
        m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g, alpha=0.1)
        p.sub_(group["lr"] * m / (1 - 0.9 ** group["step"]))


class CountsInTensor(CountsInGroup):
    def start(self, group) -> None:
        group.setdefault("step", torch.zeros(())).add_(1)


class CountsInItself(CountsInGroup):
    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, lr)
        self.steps, self.seen = 0, {"steps": 0}

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.seen["steps"] += 1
        super().step()

    def start(self, group) -> None:
        assert self.steps == self.seen["steps"]
        group["step"] = self.steps


class Nested(Plain):
    """State in a list of dicts, and beside it what is no tensor."""

    def rule(self, p, g, state, group) -> None:
        state.setdefault("levels", [{"m": torch.zeros_like(p)} for _ in range(2)])
        state["seen"] = state.get("seen", 0) + 1
        for level, beta in zip(state["levels"], (0.9, 0.99), strict=True):
            level["m"].mul_(beta).add_(g, alpha=1 - beta)
            p.sub_(level["m"], alpha=group["lr"])


class Shampoo(Plain):
    def rule(self, p, g, state, group) -> None:
        if p.dim() != 2:
            p.sub_(group["lr"] * g)
            return
        left = state.setdefault("left", torch.eye(len(p), dtype=p.dtype)).add_(g @ g.T)
        right = state.setdefault("right", torch.eye(len(p.T), dtype=p.dtype)).add_(g.T @ g)
        p.sub_(group["lr"] * torch.linalg.solve(left, g) @ right.inverse() * right.trace())


class Distance(Plain):
    """Like D-Adaptation and Prodigy: the step's length from how far all parameters came together."""

    def __init__(self, params: Any, lr: float = 1.0, d: float = 1e-6):
        super().__init__(params, lr, d=d)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["start"] = p.detach().clone()
                self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [(p, self.state[p]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        d = self.param_groups[0]["d"]
        for p, state in every:
            state["sum"].add_(p.grad, alpha=d)
        came = sum((p.grad * (state["start"] - p)).sum() for p, state in every)
        d = max(d, float(came / sum(state["sum"].abs().sum() for _, state in every)))
        for group in self.param_groups:
            group["d"] = d
        for p, _ in every:
            p.sub_(d * p.grad)


class ClipsAll(Plain):
    """Plain SGD until the gradients of all parameters together are longer than 100."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad * (100 / norm).clamp(max=1.0), alpha=self.param_groups[0]["lr"])


class Centralized(Plain):
    """As SGD for vectors, otherwise for matrices."""

    def rule(self, p, g, state, group) -> None:
        p.sub_(group["lr"] * (g - g.mean(1, keepdim=True) if p.dim() > 1 else g))


class TakesModel(Plain):
    """Cannot be called again with groups; has a setting that only it knows."""

    def __init__(self, model: nn.Module, strength: float):
        super().__init__(model.parameters())
        self._strength = strength

    def rule(self, p, g, state, group) -> None:
        p.sub_(state.setdefault("m", torch.zeros_like(p)).add_(g) * self._strength)


class KeepsList(Plain):
    """Steps a list of its own: a copy with fewer groups would step all of it."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, lr)
        self.every = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.every:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class Outer(Optimizer):
    """Around another optimizer, as Lookahead is."""

    def __init__(self, inner: Optimizer):
        self.inner, self.defaults, self.state, self.param_groups = inner, {}, inner.state, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(4, 5), nn.LayerNorm(5))


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(2, 7))]


def of(kind: Callable[..., Optimizer], **settings: Any) -> Callable[[], Optimizer]:
    return lambda: kind(model().parameters(), **settings)


KNOWN: dict[str, tuple[Callable[[], Optimizer], bool, bool]] = {
    "Adadelta": (of(torch.optim.Adadelta), True, True),
    "Adafactor": (of(torch.optim.Adafactor), False, True),
    "Adagrad": (of(torch.optim.Adagrad, initial_accumulator_value=0.1), True, True),
    "Adam": (of(torch.optim.Adam, amsgrad=True), True, True),
    "AdamW": (of(torch.optim.AdamW), True, True),
    "AdamW fused": (of(torch.optim.AdamW, fused=True), True, True),
    "AdamW foreach": (of(torch.optim.AdamW, foreach=True), True, True),
    "AdamW capturable": (of(torch.optim.AdamW, capturable=True), True, True),
    "AdamW tensor lr": (of(torch.optim.AdamW, lr=torch.tensor(1e-3)), True, True),
    "Adamax": (of(torch.optim.Adamax), True, True),
    "ASGD": (of(torch.optim.ASGD), True, True),
    "Muon": (lambda: torch.optim.Muon(matrices()), False, True),
    "NAdam": (of(torch.optim.NAdam), True, True),
    "RAdam": (of(torch.optim.RAdam), True, True),
    "RMSprop": (of(torch.optim.RMSprop, momentum=0.9, centered=True), True, True),
    "Rprop": (of(torch.optim.Rprop), True, True),
    "SGD": (of(torch.optim.SGD, lr=0.1), True, True),
    "SGD nesterov": (of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), True, True),
    "Lion": (of(Lion), True, True),
    "Lamb": (of(Lamb), False, True),
    "Lars": (of(Lars), False, True),
    "Shampoo": (of(Shampoo), False, True),
    "Centralized": (of(Centralized), False, True),
    "NewEachStep": (of(NewEachStep), True, True),
    "CountsInGroup": (of(CountsInGroup), True, True),
    "CountsInTensor": (of(CountsInTensor), True, True),
    "CountsInItself": (of(CountsInItself), True, True),
    "Nested": (of(Nested), True, True),
    "TakesModel": (lambda: TakesModel(model(), 0.1), True, True),
    "Distance": (of(Distance), True, False),
    "ClipsAll": (of(ClipsAll), True, False),
    "KeepsList": (of(KeepsList), True, False),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_optimizers(name: str) -> None:
    make, elementwise, separate = KNOWN[name]
    found = probe_optimizer(make())
    assert (found.elementwise, found.separate) == (elementwise, separate), found.why
    assert bool(found.why) == (not (elementwise and separate))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of(torch.optim.LBFGS), "closure"),
        (of(torch.optim.SparseAdam), "dense gradients"),
        (lambda: Outer(torch.optim.SGD(model().parameters(), lr=0.1)), "inner holds tensors"),
    ],
)
def test_what_cannot_be_tried_is_unknown(make: Callable[[], Optimizer], reason: str) -> None:
    found = probe_optimizer(make())
    assert not found.elementwise
    assert not found.separate
    assert found.why.startswith("unknown: ")
    assert reason in found.why


def test_tells_why() -> None:
    assert probe_optimizer(torch.optim.AdamW(model().parameters())) == OptimizerKind(True, True, "")
    assert "Muon cannot step a tensor as two pieces: ValueError: Muon only" in probe_optimizer(KNOWN["Muon"][0]()).why
    assert "Distance stepping its parameters in two turns differs by" in probe_optimizer(KNOWN["Distance"][0]()).why


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "CountsInGroup", "CountsInItself", "TakesModel", "Distance"])
def test_the_optimizer_is_left_as_it_is(name: str) -> None:
    optimizer = KNOWN[name][0]()
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy([p.detach() for p in parameters]), copy.deepcopy(optimizer.state_dict())
    attributes = {
        key: copy.copy(value) for key, value in vars(optimizer).items() if key not in ("state", "param_groups")
    }
    random, calls, threads = torch.get_rng_state(), len(called), torch.get_num_threads()
    probe_optimizer(optimizer)
    state_bytes(optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    after = [p.detach() for p in parameters], optimizer.state_dict()
    for want, got in zip(tree.leaves(before), tree.leaves(after), strict=True):
        assert torch.equal(want, got) if isinstance(want, Tensor) else want == got
    assert {key: vars(optimizer)[key] for key in attributes} == attributes
    assert len(called) == calls


def test_a_schedule_that_starts_at_zero_hides_nothing() -> None:
    for kind, elementwise in ((Lamb, False), (torch.optim.AdamW, True)):
        optimizer = kind(model().parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        assert probe_optimizer(optimizer).elementwise is elementwise


def test_one_group_of_another_kind_is_found() -> None:
    class Mixed(Plain):
        def rule(self, p, g, state, group) -> None:
            (Lamb if group["trust"] else Lion).rule(self, p, g, state, group)

    def groups(*trust: bool) -> list[dict[str, Any]]:
        return [
            {"params": [nn.Parameter(torch.randn(3, 3))], "trust": t, "lr": 0.1 / 2**i} for i, t in enumerate(trust)
        ]

    assert probe_optimizer(Mixed(groups(False, False, False))).elementwise
    assert not probe_optimizer(Mixed(groups(False, True, False))).elementwise


def test_many_groups_take_no_longer() -> None:
    started = time.process_time()
    probe_optimizer(
        torch.optim.AdamW([{"params": [nn.Parameter(torch.randn(4, 4))], "lr": 0.1 / 2**i} for i in range(200)])
    )
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*KNOWN])
def test_state_bytes_are_those_of_a_real_step(name: str, dtype: torch.dtype) -> None:
    if dtype != torch.float32 and name in ("Shampoo",):
        pytest.skip("bfloat16 matrices cannot be solved")
    if name == "AdamW capturable":
        pytest.skip("does not step on CPUs")
    optimizer = KNOWN[name][0]()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data.to(dtype)
            for key, value in optimizer.state[p].items():  # what __init__ made
                if isinstance(value, Tensor) and value.dim():
                    optimizer.state[p][key] = value.to(dtype)
            p.grad = torch.ones_like(p)
    kept = state_bytes(optimizer)
    optimizer.step()
    optimizer.step()
    for group in optimizer.param_groups:
        for p in group["params"]:
            want = [t.numel() * t.element_size() for t in tree.tensors(optimizer.state[p])]
            assert sorted(kept.of(tuple(p.shape), str(p.dtype).removeprefix("torch."))) == sorted(want)


def test_state_bytes_of_pieces_and_of_nothing() -> None:
    kept = state_bytes(torch.optim.AdamW(model().parameters()))
    assert sorted(kept.of((1000,), "float32")) == [4, 4000, 4000]
    assert sorted(kept.of((2, 2, 2, 5), "float32")) == [4, 160, 160]  # of dims the optimizer has none of: as a piece
    assert sorted(kept.of((0,), "float32")) == [0, 0, 4]
    assert kept.of((10,), "float16") == ()
    assert state_bytes(torch.optim.SGD(model().parameters(), lr=0.1)).of((10, 10), "float32") == ()


def test_a_scalar_parameter_is_stepped_by_itself() -> None:
    found = probe_optimizer(
        torch.optim.AdamW([torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(2, 3))])
    )
    assert found.elementwise
    assert found.separate
