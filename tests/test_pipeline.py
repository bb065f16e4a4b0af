"""Training through the stages of a pipeline: like one device over the same microbatches, under every schedule."""

import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import zoo
from benchmarks.gantt import ActionTimes, gantt
from meshfit.axes.data.axis import Replicated
from meshfit.axes.pipeline.staged import Staged
from meshfit.axes.pipeline.stages import Pipeline
from meshfit.axes.precision import LossScale, Precision
from meshfit.axes.spec import locals_of
from meshfit.comm.order_check import CollectiveLog
from meshfit.comm.transport import Transport, header, packed, packed_size, read_header, unpacked
from meshfit.data.datasets import open_source
from meshfit.data.loader import Loader
from meshfit.exchange.across import Across
from meshfit.exchange.allreduce import AllReduce
from meshfit.loss.objective import Objective, call, split
from meshfit.loss.probe import find_denominator
from meshfit.passes.backward import input_backward
from meshfit.passes.loss_sum import LossSum
from meshfit.passes.pipeline import LocalStages, Pipelined, StageForward
from meshfit.passes.whole import Passes
from meshfit.plan import SCHEDULES
from meshfit.schedule.issue import pairs
from tests.distributed import distributed
from tests.few import few, more
from tests.ranked import X, Y, built

CPU = torch.device("cpu")
MSE = Objective(F.mse_loss)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(layer(x).tanh(), 0.3, self.training)
        return self.head(x)


def deep(width: int = 8) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def normed() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)), nn.Linear(8, 4))


def loader_of(
    data: Any, batch: int, microbatches: int, rank: int = 0, ranks: int = 1, device: torch.device = CPU
) -> Loader:
    return Loader(
        source=open_source(data),
        batch_size=batch,
        rank=rank,
        ranks=ranks,
        device=device,
        microbatches=microbatches,
        shuffle=False,
    )


def train(run: Any, exchange: Any, model: nn.Module, loader: Loader, steps: int, scale: float = 1.0) -> list[float]:
    """The loop, without its watch; the loss of each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if trained else None
    losses, epoch = [], 0
    while len(losses) < steps:
        for batch in loader.epoch(epoch):
            run(batch)
            scalars = exchange.finish()
            correction = float(run.loss.correction(batch, scalars.count))
            for gradient in exchange.gradients:
                gradient.mul_(correction / scale)
            if optimizer is not None:
                optimizer.step()
            exchange.clear()
            losses.append(float(scalars.loss) * correction)
            if len(losses) == steps:
                break
        epoch += 1
    return losses


def alone(model: nn.Module, objective: Objective, loader: Loader, *, steps: int, word: str = "fp32") -> list[float]:
    """One device over the same microbatches."""
    device = loader.device
    model.to(device)
    over = find_denominator(objective, model, loader.source.few(), device)
    exchange = AllReduce(model.parameters(), None, device)
    run = Passes(model, objective, LossSum(over, exchange), Precision(word), device)
    return train(run, exchange, model.train(), loader, steps)


def pipelined(
    model: nn.Module,
    objective: Objective,
    loader: Loader,
    *,
    steps: int,
    pipeline: Pipeline,
    word: str = "fp32",
    seed: int = 0,
    scale: LossScale | None = None,
    mesh: tuple[Any, Any] | None = None,
) -> tuple[list[float], Staged, Pipelined]:
    """This rank's part of it; ``mesh`` is (the pipeline's group, that of the copies)."""
    along, copies = mesh or (dist.group.WORLD, None)
    assert along is not None
    over = find_denominator(objective, model, loader.source.few(), CPU)
    found = pipeline.find(model.train(), objective, loader.source.few(), device="cpu").to_send()
    staged = Staged.of(pipeline, model, found, dist.get_rank(along), along)
    device = loader.device
    staged.model.to(device)
    exchange = Across(
        AllReduce(staged.model.parameters(), copies, device),
        [staged, Replicated(staged.model, copies)],
        staged.model,
        device,
        loss_replicas=1,
    )
    transport = Transport(along, device, pairs(pipeline.schedule))
    stages = LocalStages(staged, objective, Precision(word), device, transport)
    run = Pipelined(stages, LossSum(over, exchange, scale), seed=seed)
    by = 1.0 if scale is None else float(scale.value)
    return train(run, exchange, staged.model, loader, steps, by), staged, run


def assert_like(staged: Staged, want: dict[str, Tensor], *, near: float = 1e-4) -> None:
    """This rank's tensors are those of ``want``; all ranks together hold all of them."""
    off = total = 0.0
    for name, tensor in staged.model.state_dict().items():
        assert not tensor.is_meta
        if tensor.is_floating_point():
            off += float((tensor.double() - want[name].double().to(tensor.device)).square().sum())
            total += float(want[name].double().square().sum())
        else:
            assert torch.equal(tensor, want[name].to(tensor.device)), name
    assert off**0.5 <= near * max(1e-6, total**0.5)
    names: list[Any] = [set()] * dist.get_world_size()
    dist.all_gather_object(names, set(staged.model.state_dict()))
    assert set().union(*names) == set(want)


def assert_parity(
    make: Any, data: Any, objective: Objective, word: str, *, batch: int, microbatches: int, device: torch.device = CPU
) -> None:
    loader = loader_of(data, batch, microbatches, device=device)
    reference = built(make)
    wanted = alone(reference, objective, loader, steps=5)
    pipeline = Pipeline(degree=dist.get_world_size(), word=word, microbatches=microbatches)
    losses, staged, _ = pipelined(built(make), objective, loader, steps=5, pipeline=pipeline)
    torch.testing.assert_close(losses, wanted, atol=1e-5, rtol=1e-5)
    assert_like(staged, dict(reference.state_dict()))


@pytest.mark.parametrize("word", SCHEDULES)
@distributed(world=2)
def test_every_schedule_trains_like_one_device(word: str) -> None:
    """18 samples in batches of 8: the third has two, fewer than there are microbatches."""
    assert_parity(deep, (X, Y), MSE, word, batch=8, microbatches=4)


@pytest.mark.parametrize("word", few(SCHEDULES, "interleaved", "zbv", "dualpipev"))
@distributed(world=4)
def test_four_ranks(word: str) -> None:
    assert_parity(deep, (X, Y), MSE, word, batch=9, microbatches=8 if word == "dualpipev" else 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("word", ["1f1b", "zbv"])
@distributed(world=2, timeout=120)
def test_two_ranks_that_share_a_gpu(word: str) -> None:
    """Over gloo, by way of host memory: NCCL wants a GPU for each."""
    objective = Objective(lambda out, y: F.cross_entropy(out.view(-1, zoo.VOCABULARY), y.view(-1)))
    data, device = zoo.next_tokens(20), torch.device("cuda", 0)
    assert_parity(zoo.TiedGPT, data, objective, word, batch=8, microbatches=4, device=device)


DIAGONAL = [
    *(more("gpt2", "1f1b"), more("llama", "zbv"), more("mixtral", "gpipe"), more("t5", "interleaved")),
    *(more("unet-diffusers", "zbv"), more("resnet10", "1f1b"), ("token-sum", "dualpipev"), more("lstm", "gpipe")),
    *(("partial", "1f1b"), ("masked", "zbv"), ("two-inputs", "sequential"), ("dict-output", "interleaved")),
]
"""Of those by make more, test_pipeline_fit.py has most under other schedules."""


@pytest.mark.parametrize(("name", "word"), DIAGONAL)
@distributed(world=2, timeout=120)
def test_real_models_train_like_one_device(name: str, word: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = zoo.ZOO[name]
        data = case.data(20)
        data = (*data[0], data[1]) if isinstance(data, tuple) and isinstance(data[0], tuple) else data
        assert_parity(case.build, data, Objective(case.loss), word, batch=16, microbatches=4)


@distributed(world=4)
def test_copies_of_a_pipeline() -> None:
    """pipeline=2 data=2: each copy takes its share of every microbatch; one of the last batch has no sample."""
    rank = dist.get_rank()
    lines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    copies = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = (X[:17], Y[:17])
    reference = built(deep)
    wanted = alone(reference, MSE, loader_of(data, 8, 2), steps=5)
    losses, staged, _ = pipelined(
        built(deep),
        MSE,
        loader_of(data, 8, 2, rank=rank % 2, ranks=2),
        steps=5,
        pipeline=Pipeline(degree=2, microbatches=2),
        mesh=(lines[rank % 2], copies[rank // 2]),
    )
    torch.testing.assert_close(losses, wanted, atol=1e-5, rtol=1e-5)
    assert_like(staged, dict(reference.state_dict()))


@distributed(world=2)
def test_statistics_are_counted_once_for_each_microbatch() -> None:
    reference = built(normed)
    loader = loader_of((X, Y), 6, 3)
    wanted = alone(reference, MSE, loader, steps=4)
    losses, staged, _ = pipelined(
        built(normed), MSE, loader, steps=4, pipeline=Pipeline(degree=2, word="gpipe", microbatches=3)
    )
    torch.testing.assert_close(losses, wanted, atol=1e-5, rtol=1e-5)
    counts = {int(b) for name, b in staged.model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts <= {12}
    assert_like(staged, dict(reference.state_dict()))


@distributed(world=2)
def test_dropout_is_the_same_in_every_run_and_schedule() -> None:
    def losses(word: str, seed: int) -> list[float]:
        torch.manual_seed(dist.get_rank() + hash(word) % 100)  # no matter
        pipeline = Pipeline(degree=2, word=word, microbatches=4)
        return pipelined(built(Dropping), MSE, loader_of((X, Y), 8, 4), steps=4, pipeline=pipeline, seed=seed)[0]

    first = losses("gpipe", 1)
    assert losses("gpipe", 1) == first
    assert losses("1f1b", 1) == first
    assert losses("sequential", 1) == first
    assert losses("gpipe", 2) != first


@pytest.mark.parametrize(("word", "schedule"), [("bf16", "1f1b"), ("bf16", "zbv"), ("fp32", "1f1b")])
@distributed(world=2)
def test_precision(word: str, schedule: str) -> None:
    """What crosses is what autocast makes of it, and the loss may be scaled."""
    loader, reference = loader_of((X, Y), 8, 4), built(deep)
    wanted = alone(reference, MSE, loader, steps=4, word=word)
    scale = LossScale(CPU, start=2.0**10)
    losses, staged, _ = pipelined(
        built(deep),
        MSE,
        loader,
        steps=4,
        pipeline=Pipeline(degree=2, word=schedule, microbatches=4),
        word=word,
        scale=scale,
    )
    torch.testing.assert_close(losses, wanted, atol=1e-2 if word == "bf16" else 1e-5, rtol=1e-3)
    assert_like(staged, dict(reference.state_dict()), near=2e-2 if word == "bf16" else 1e-4)


@pytest.mark.parametrize("word", ["gpipe", "zbv"])
@distributed(world=2)
def test_predictions(word: str) -> None:
    model = built(normed)
    model(X)
    want = model.eval()(X[:5])
    pipeline = Pipeline(degree=2, word=word, microbatches=4)
    staged = Staged.of(
        pipeline, model, pipeline.find(model.train(), MSE, (X[:4], Y[:4]), device="cpu"), dist.get_rank()
    )
    staged.model.eval()
    outputs = lambda model, batch: call(model, split(batch)[0])
    transport = Transport(dist.group.WORLD, CPU, pairs(pipeline.schedule))
    forward = StageForward(LocalStages(staged, outputs, Precision(), CPU, transport))
    for size in (5, 3, 5):
        got = forward((X[:size], Y[:size]))
        if staged.last:
            torch.testing.assert_close(got, want[:size])
        else:
            assert got is None
    forward.flush()


@distributed(world=2)
def test_what_goes_with_parameters_comes_together() -> None:
    model, rank = built(zoo.TiedGPT), dist.get_rank()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = Objective(lambda out, y: F.cross_entropy(out.view(-1, zoo.VOCABULARY), y.view(-1)))
    pipeline = Pipeline(degree=2, microbatches=2)
    found = [pipeline.find(model, objective, zoo.next_tokens(4), device="cpu").to_send() if rank == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    staged = Staged.of(pipeline, model, found[0], rank, dist.group.WORLD)
    assert tuple(staged.tied) == ("token.weight",)
    mine = {name: {"twice": p.detach() * 2, "step": torch.tensor(3.0)} for name, p in staged.model.named_parameters()}
    states = staged.collect(mine, keep=rank == 0)
    assert set(states) == ({name for name, _ in built(zoo.TiedGPT).named_parameters()} if rank == 0 else set())
    assert all(torch.equal(state["twice"], 2 * whole[name]) for name, state in states.items())


@distributed(world=2)
def test_what_is_sent_is_what_cost_says() -> None:
    x, y = torch.randn(16, 64), torch.randn(16, 4)
    pipeline = Pipeline(degree=2, microbatches=4)
    model = built(lambda: deep(64))
    trace = pipeline.find(model, MSE, (x[:4], y[:4]), device="cpu").trace
    assert trace is not None
    _, cost, _ = pipeline.cost(trace, dist.get_rank())
    with CollectiveLog() as recorder:
        pipelined(model, MSE, loader_of((x, y), 16, 4), steps=2, pipeline=pipeline)
    sent = [op.elements for op in recorder.log if op.kind == "send" and op.ranks[0] == dist.get_rank()]
    assert sent.pop(0) == 8  # when the transport was made
    headers = sent[:2] if dist.get_rank() == 0 else []  # once, of the one tensor that crosses: its length, and itself
    assert sum(headers) < 256
    assert sum(sent) == 2 * cost.moved["send"] + sum(headers)
    assert len(sent) == 2 * cost.calls["send"] + len(headers)


@distributed(world=2)
def test_each_action_is_timed() -> None:
    pipeline = Pipeline(degree=2, word="1f1b", microbatches=4)
    loader = loader_of((X[:16], Y[:16]), 16, 4)
    _, _, run = pipelined(built(deep), MSE, loader, steps=1, pipeline=pipeline)
    times = ActionTimes(run)
    run(next(iter(loader.epoch(0))))
    run.loss.exchange.finish()
    timed = times.together(dist.group.WORLD)
    assert [tuple(span.action for span in spans) for spans in timed.spans] == list(pipeline.schedule.orders)
    end = {span.action: span.end for spans in timed.spans for span in spans}
    for spans in timed.spans:
        for span in spans:
            assert all(end[need] <= span.start for need in pipeline.schedule.needs(span.action))
    assert 0 < timed.bubble < 1
    assert "rank 1" in gantt("measured", ("measured", timed))


# Backward in halves


class Shared(nn.Module):
    """A layer used twice, one used once, norms, an embedding, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.table, self.recurrent = nn.Embedding(4, 8), nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.group, self.conv = nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(torch.relu(self.twice(self.once(x)))) + self.twice(x) + self.table.weight
        hidden = self.recurrent(self.attention(hidden, hidden, hidden)[0])[0]
        last = self.conv(self.group(hidden.transpose(1, 2).contiguous().transpose(1, 2)))
        return last, hidden, hidden * y, y


def test_halves_are_the_whole() -> None:
    model = built(Shared).double()
    given = [torch.randn(3, 4, 8, dtype=torch.float64) for _ in range(2)]
    back = [torch.randn(3, 4, 8, dtype=torch.float64) for _ in range(4)]
    hooked: Counter[str] = Counter()
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: hooked.update([name]))
    leaves = [t.clone().requires_grad_() for t in given]
    torch.autograd.backward(model(*leaves), back)
    want = {name: p.grad for name, p in model.named_parameters()}
    want_inputs = [t.grad for t in leaves]
    model.zero_grad()
    hooked.clear()
    leaves = [t.clone().requires_grad_() for t in given]
    second = input_backward(model(*leaves), back, leaves)
    assert all(torch.equal(t.grad, w) for t, w in zip(leaves, want_inputs, strict=True))  # type: ignore[arg-type]
    late = {name for name, p in model.named_parameters() if p.grad is None}
    assert {"once.weight", "once.bias", "conv.weight", "attention.out_proj.weight"} <= late
    assert not {"twice.weight", "norm.weight", "group.weight", "table.weight"} & late
    second.run()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, want[name])  # type: ignore[arg-type]
    assert hooked == Counter(dict(model.named_parameters()).keys())


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=False)  # type: ignore[assignment]
        return self.head(x)


@distributed(world=2)
def test_what_computes_again_is_not_halved() -> None:
    assert_parity(Recomputing, (X, Y), MSE, "zbv", batch=8, microbatches=4)


# Messages


def test_messages_are_unpacked_as_they_were_packed() -> None:
    sent = [
        torch.randn(3, 5),
        torch.randint(0, 9, (2, 2)),
        torch.tensor(True),
        torch.randn(4, 3).t(),
        torch.randn(2, dtype=torch.complex64),
        torch.empty(0, 4),
        torch.randn(7).bfloat16(),
        torch.randn(3, requires_grad=True),
    ]
    _, layouts = locals_of(sent)
    assert read_header(header(layouts)) == layouts
    buffer = packed(sent)
    assert buffer.numel() == packed_size(layouts)
    for got, want in zip(unpacked(buffer, layouts), sent, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    one = torch.randn(4, 16)
    assert packed([one]).data_ptr() == one.data_ptr(), "one tensor is sent as it lies"
    assert packed([]).numel() == 0


def test_weights_are_rounded_once_for_all_microbatches() -> None:
    layer, precision, x = torch.nn.Linear(8, 8), Precision("bf16"), torch.randn(4, 8)

    def losses() -> list[torch.Tensor]:
        found = []
        for part in x.split(1):
            with precision.arithmetic(CPU):
                found.append(layer(part).float().square().sum())
            found[-1].backward()
        return found

    def rounded(inside: Any) -> tuple[int, list[torch.Tensor]]:
        layer.zero_grad()
        with torch.profiler.profile() as trace, inside:
            values = losses()
        copies = [
            event for event in trace.events() or () if event.name == "aten::_to_copy" and event.cpu_parent is not None
        ]
        return len(copies), [*values, *(p.grad for p in layer.parameters() if p.grad is not None)]

    (each, want), (once, got) = rounded(nullcontext()), rounded(precision.rounded_once())
    assert each - once == 3 * 2  # weight and bias, of all microbatches but the first
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.equal(rounded(precision.rounded_once())[1][0], want[0])
