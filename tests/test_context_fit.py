"""Trainings whose sequences are cut over ranks: like one device, or refused before anything starts."""

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshfit
from benchmarks import parity, zoo
from meshfit.axes.context import find
from meshfit.axes.context.axis import context_cost, plan_context
from meshfit.axes.context.piece import RULES, Piece
from meshfit.axes.context.plan import ContextPlan, begin
from meshfit.axes.context.span import SplitDim
from meshfit.axes.find import as_number
from meshfit.axes.find import find as find_all
from meshfit.axes.prove import Refused
from meshfit.axes.shard.units import traced
from meshfit.comm.group import SUM, CountingGroup, RankGroup
from meshfit.errors import PlanError
from meshfit.loss.objective import Objective
from meshfit.plan import Plan
from meshfit.torch_private.kernels import AttentionKernel
from tests.distributed import distributed
from tests.few import more

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ONCE = {  # each plan with a model that does not make it easy
    "context=2": "mixtral",
    "context=3": "vit",
    "context=4": "bert",
    "data=2 context=2": "gpt2",
    "shard=2 context=2": "t5",
    "context=2 tensor=2": "llama",
    "context=2 recompute=full": "tied-gpt",
    "context=2 microbatches=3": "token-sum",
    "context=2 microbatches=2": "lstm",
    "context=3 attention=gather": "llama",
    "context=2 attention=ulysses recompute=full": "llama",
}


SELDOM = {"context=4", "context=2 tensor=2", "context=3 attention=gather"}


@pytest.mark.parametrize(
    ("plan", "name"), [more(plan, name) if plan in SELDOM else (plan, name) for plan, name in ONCE.items()]
)
def test_trains_like_one_device(plan: str, name: str) -> None:
    trial = parity.Trial(plan=plan, samples=18, steps=4)  # batches of 8, 8 and 2
    outcome = parity.judge(zoo.ZOO[name], trial, parity.fit)
    assert outcome.ok, outcome


LENGTH, CLASSES = 10, 12
ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)


class Decoder(nn.Module):
    """With dropout in every place that a transformer has it."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(CLASSES, 16), nn.Parameter(torch.randn(LENGTH, 16) * 0.1)
        block = lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=drop, batch_first=True, norm_first=True)
        self.drop, self.blocks = nn.Dropout(drop), nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.token(ids) + self.position[: ids.shape[1]])
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def text(samples: int = 12, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(CLASSES, (samples, length + 1), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def built(drop: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(drop)


def fit(plan: str, model: nn.Module, **more: Any) -> list[float]:
    ranks = parity.Trial(plan=plan).devices
    given = {"loss": loss, "optimizer": ADAMW, "batch_size": 5, "steps": 4, "progress": False, **more}
    result = meshfit.fit(model, text(), plan=plan, devices=f"cpu:{ranks}", **given)
    return [step.loss for step in result.history]


def test_gradients_clipping_and_optimizer_are_one_devices() -> None:
    verdict = meshfit.verify(
        built(0.1), text(), loss=loss, optimizer=ADAMW, batch_size=5, clip=0.1, plan="context=2", devices="cpu:2"
    )
    assert verdict.equal, verdict.rows


def test_half_precision() -> None:
    one = fit("data=1 precision=bf16", built())
    assert fit("context=2 precision=bf16", built()) == pytest.approx(one, rel=1e-2)


def test_evaluates_and_predicts_like_one_device() -> None:
    model, (ids, targets) = built(0.1).eval(), text()
    given = {"batch_size": 5, "plan": "context=3", "devices": "cpu:3"}
    with torch.no_grad():
        want = model(ids)
    torch.testing.assert_close(meshfit.predict(model, (ids, targets), **given), want, rtol=1e-5, atol=1e-6)
    accuracy = lambda out, y: (out.argmax(-1) == y).float().mean()
    found = meshfit.evaluate(model, (ids, targets), loss=loss, metrics={"accuracy": accuracy}, **given)
    assert found["loss"] == pytest.approx(loss(want, targets).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx(accuracy(want, targets).item(), rel=1e-6)


def test_goes_on_under_another_plan(tmp_path: Any) -> None:
    whole = fit("data=1", built(), steps=6)
    given = {"checkpoint": "2 steps", "out": tmp_path / "run"}
    first = fit("context=2", built(), steps=4, **given)
    rest = fit("data=2", built(), steps=6, resume=True, **given)
    assert first + rest[-2:] == pytest.approx(whole, rel=1e-5)


def test_dropout_trains_and_is_the_same_twice() -> None:
    runs = [fit("context=2", built(0.3)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != fit("context=2", built(0.0))
    assert fit("context=2 recompute=full", built(0.3)) == pytest.approx(runs[0], rel=1e-5)


@distributed(world=2)
def test_each_rank_draws_for_its_own_positions() -> None:
    group, span = RankGroup(dist.group.WORLD), SplitDim.even(1, 64, 2)  # type: ignore[arg-type]
    torch.manual_seed(0)
    dropped = F.dropout(Piece(torch.ones(4, 32), span, group)).whole()
    left, right = dropped.chunk(2, 1)
    assert not torch.equal(left, right)
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert len({float(x) for x in group.all_gather(torch.rand(()))}) == 1  # and all go on alike


# What is refused


def test_a_model_without_sequences_is_refused() -> None:
    images, targets = zoo.small_images(4)
    with pytest.raises(PlanError, match=r"this model has no sequence that could be cut") as error:
        meshfit.fit(
            zoo.batchnorm_cnn, (images, targets), loss=F.cross_entropy, optimizer=ADAMW, batch_size=4, steps=1,
            plan="context=2", devices="cpu:2", progress=False,
        )  # fmt: skip
    assert "data=2 works" in str(error.value)


def test_ulysses_needs_heads_that_divide() -> None:
    with pytest.raises(PlanError, match=r"2 of 2 calls of attention cannot exchange positions for heads") as error:
        fit("context=3 attention=ulysses", built())
    assert "context=3 works" in str(error.value)
    with pytest.raises(PlanError, match=r"attention=ulysses says how context= works"):
        fit("data=2 attention=ulysses", built())


def test_sequences_shorter_than_ranks_are_whole() -> None:
    ids, _ = text(4, 2)
    model = built()
    want = model(ids)
    begin(model, planned(4), CountingGroup(3, 4))
    got = model(ids)
    assert type(got) is Tensor
    assert torch.equal(got, want)
    assert isinstance(model(text()[0]), Piece)


# The plan


def step(model: nn.Module, batch: Any) -> Tensor:
    return as_number(Objective(loss=loss)(model, batch))


def planned(degree: int, attention: str = "auto") -> ContextPlan:
    return plan_context(built(), step, text(), degree, attention=attention)


def forgets_the_offset(func: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank's queries as if they were the first positions."""
    return Piece(F.scaled_dot_product_attention(q.local, k.whole(), v.whole(), is_causal=True), q.span, q.group)


def has_no_gradient(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Right forward, but nothing comes back."""
    return Piece(func(x.local.detach(), *args, **kwargs), x.span, x.group)


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("scaled_dot_product_attention", forgets_the_offset, "the loss is"),
        ("layer_norm", has_no_gradient, "gradient"),
    ],
)
def test_a_wrong_rule_is_found_out(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any], says: str
) -> None:
    monkeypatch.setitem(RULES, name, wrong)
    with pytest.raises(Refused, match=says):
        planned(2)


class Counted(RankGroup):
    """Counts elements that ranks say to each other, by how."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)  # type: ignore[arg-type]
        self.said: dict[str, list[int]] = {}

    def _count(self, op: str, elements: int) -> None:
        calls = self.said.setdefault(op, [0, 0])
        calls[0] += 1
        calls[1] += elements

    def all_reduce_(self, x: Tensor, op: Any = SUM) -> Tensor:
        self._count("all_reduce", x.numel())
        return super().all_reduce_(x, op)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count("reduce_scatter", x.numel())
        return super().reduce_scatter(x)

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
        self._count("reduce_scatter", x.numel())
        return super().start_reduce_scatter(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._count("all_gather", x.numel() * self.size)
        return super().all_gather(x)

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
        self._count("all_gather", x.numel() * self.size)
        return super().start_all_gather(x)

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]
    ) -> tuple[Tensor, Callable[[], object]]:
        self._count("all_to_all", rows.numel())
        return super().start_all_to_all(rows, sent, taken)


@distributed(world=2)
def assert_said(plan: ContextPlan, calls: dict[str, int], moved: dict[str, int]) -> None:
    model, group = built(), Counted()
    begin(model, plan, group)
    (step(model, tuple(t[:6] for t in text())) / 2).backward()
    assert {op: said[0] for op, said in group.said.items()} == calls
    assert {op: said[1] * 4 for op, said in group.said.items()} == moved


@pytest.mark.parametrize("attention", ["gather", "ulysses"])
@pytest.mark.parametrize("positions", [find.POSITIONS, 2])
def test_ranks_say_what_the_cost_says(monkeypatch: pytest.MonkeyPatch, positions: int, attention: str) -> None:
    """Also where shorter sequences were tried than there are."""
    monkeypatch.setattr(find, "POSITIONS", positions)
    plan, batch = planned(2, attention), tuple(t[:6] for t in text())
    assert plan.attended == ((attention, 2),)
    assert plan.zigzag == (attention == "gather")
    assert plan.length == (4 if positions == 2 else 0)
    assert plan.kept < 0.55
    trace = traced(built(), Objective(loss=loss), batch, device="cpu")
    assert not isinstance(trace, Exception)
    after, cost = context_cost(trace, plan)
    assert after.cost.kept == pytest.approx(plan.kept * trace.cost.kept, rel=1e-2)
    assert_said(plan=plan, calls=cost.calls, moved=cost.moved)


# What overlaps, and what is kept


def attention(group: Any, rank: int, length: int = 16) -> tuple[Tensor, Piece]:
    span = SplitDim.even(2, length, 2, zigzag=True, attention="gather")
    given = torch.randn(1, 2, span.counts[rank], 8, requires_grad=True)
    made: Any = F.scaled_dot_product_attention(*[Piece(given * i, span, group) for i in (1, 2, 3)], is_causal=True)  # type: ignore[arg-type]
    return given, made


def test_own_keys_are_met_while_those_of_others_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Watched(CountingGroup):
        def start_all_gather(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
            done.append("gather")
            return self.all_gather(x), lambda: done.append("wait")

        def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
            done.append("scatter")
            return self.reduce_scatter(x), lambda: done.append("wait")

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(AttentionKernel, name)
        return lambda *args, causal: (done.append("own" if causal else "others"), real(*args, causal=causal))[1]

    for name in ("forward", "backward"):
        monkeypatch.setattr(AttentionKernel, name, watched(name))
    _, made = attention(Watched(1, 2), 1)
    assert done == ["gather", "gather", "own", "wait", "wait", "others"]  # rank 1: chunks 1 and 2, which are neighbours
    done.clear()
    made.local.sum().backward()
    assert done == ["gather", "gather", "wait", "wait", "others", "scatter", "scatter", "own", "wait", "wait"]


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_kept_after_a_step(backward: bool) -> None:
    group = RankGroup.__new__(RankGroup)
    group.rank, group.size = 0, 1
    group.start_all_gather = lambda x: (x.detach().clone().unsqueeze(0), lambda: None)  # type: ignore[method-assign]
    group.start_reduce_scatter = lambda x: (x[0].clone(), lambda: None)  # type: ignore[method-assign]
    span = SplitDim.even(2, 8, 1, attention="gather")
    given = torch.randn(1, 2, 8, 8, requires_grad=True)
    local = given * 2
    held = weakref.ref(local.untyped_storage())
    made: Any = F.scaled_dot_product_attention(*[Piece(local, span, group)] * 3, is_causal=True)  # type: ignore[arg-type]
    if backward:
        made.local.sum().backward()
    del made, local
    assert held() is None


class Flexible(Decoder):
    """Whose attention has no backward on CPUs."""

    def forward(self, ids: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        x = self.token(ids)
        heads, size = x.unflatten(-1, (2, -1)).transpose(1, 2), ids.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device="cpu")
        found: Any = flex_attention(heads, heads, heads, block_mask=mask)
        return self.head(self.blocks[0](found.transpose(1, 2).flatten(2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["context=2", "tensor=2"])
def test_a_step_that_runs_on_gpus_alone_is_refused(plan: str) -> None:
    with pytest.raises(PlanError, match=r"FlexAttention does not support backward on CPU") as error:
        find_all(Plan.parse(plan), Flexible(), Objective(loss=loss), text(), "cuda")
    assert "data= and shard= take the model as it is" in str(error.value)


class OwnCheckpoint(nn.Module):
    """A block that its author has checkpointed, as ``gradient_checkpointing_enable`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(lambda x: self.down(F.gelu(self.up(x))), x, use_reentrant=False)
        return x + self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "plan",
    ["context=2", more("shard=2 context=2"), more("context=2 offload=activations"), more("pipeline=2 context=2")],
)
def test_checkpoints_of_the_model_itself_run_again_as_they_ran(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), OwnCheckpoint(), nn.Linear(16, 4)).double()
    alone, (x, y) = copy.deepcopy(model), torch.randn(2, 8, 8, 4, dtype=torch.float64)
    how: dict[str, Any] = {"loss": F.l1_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "progress": False}
    how |= {"batch_size": 4, "steps": 3, "shuffle": False}
    meshfit.fit(alone, (x, y), plan="data=1", **how)
    meshfit.fit(model, (x, y), plan=plan, **how)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
