"""Recomputation: bit by bit the training of a plain forward, in the memory that ``cost`` foretells."""

import copy
import functools
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from benchmarks import zoo
from benchmarks.anatomy_live import LiveBytes
from benchmarks.zoo import ZOO, Case, mean_loss, take
from meshfit.anatomy.blocks import blocks
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.flops import FORMULAS
from meshfit.anatomy.recompute import recomputed_blocks
from meshfit.anatomy.record import record
from meshfit.anatomy.running import worth_keeping
from meshfit.anatomy.trace import Trace
from meshfit.axes.data import batchnorm
from meshfit.axes.forward import unwrap
from meshfit.axes.recompute.axis import Recompute
from meshfit.comm.group import RankGroup
from meshfit.data import tree
from meshfit.loss.objective import call, split
from tests import hostile
from tests.distributed import distributed
from tests.few import few

aten = torch.ops.aten
WORDS = ("full", "selective")
MODELS = [
    *("gpt2", "llama", "mixtral", "bert", "t5", "vit", "convnext", "unet-diffusers"),
    *("resnet10", "mobilenet", "densenet", "tied-gpt", "lstm"),
]


# Models nobody here wrote


@functools.cache
def traced(name: str) -> Trace:
    case = ZOO[name]
    return metered(case.build(), inputs_of(case, case.data(4)))


def metered(model: nn.Module, inputs: Any) -> Trace:
    found = record(model.train(), inputs, meter=lambda known: Meter(known, target="cpu")).trace
    return replace(found, blocks=blocks(found))


def inputs_of(case: Case, batch: Any) -> Any:
    return batch if case.loss is None else split(batch)[0]


def trained(model: nn.Module, losses: Callable[[int], Tensor], steps: int = 3) -> tuple[list[Any], int]:
    """Losses, gradients, weights and buffers of some steps; flops of the last backward."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = losses(step)
        with counter if step == steps - 1 else nullcontext():
            loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(3)]
        optimizer.step()
    return [*seen, *(value.clone() for value in model.state_dict().values())], counter.get_total_flops()


def same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for want, got in zip(one, other, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", few(MODELS, "gpt2", "mixtral", "t5", "densenet"))
def test_zoo_trains_as_without(name: str) -> None:
    """To the last bit; and backward does again the arithmetic that was foretold."""
    case, found = ZOO[name], recomputed_blocks(traced(name))
    data = case.data(8)
    assert found

    def train(word: str | None) -> tuple[list[Any], int]:
        model = case.build().train()
        names = [*model.state_dict()]
        if word is not None:
            Recompute(word=word, blocks=found).apply(model)
        assert [*model.state_dict()] == names
        return trained(model, lambda step: mean_loss(case, model, take(data, torch.arange(4) + 4 * (step % 2))))

    want, flops = train(None)
    for word in WORDS:
        got, more = train(word)
        same(want, got)
        after, cost = Recompute(word=word, blocks=found).cost(traced(name))
        assert more - flops == cost.flops
        assert after.cost.flops_backward == traced(name).cost.flops_backward + cost.flops


def live(model: nn.Module, inputs: Any) -> int:
    call(model, inputs)  # what it changes is learnt
    with LiveBytes() as held:
        outputs = call(model, inputs)
    graph = [out.view_as(out).grad_fn for out in tree.tensors(outputs) if out.requires_grad]
    del outputs
    gc.collect()
    return held.bytes if graph else 0


@pytest.mark.parametrize("name", few(MODELS, "gpt2", "mixtral", "t5", "densenet"))
def test_zoo_keeps_what_is_foretold(name: str) -> None:
    case, trace = ZOO[name], traced(name)
    model, inputs, found = case.build().train(), inputs_of(case, case.data(4)), recomputed_blocks(trace)
    left = {"none": live(model, inputs)}
    assert trace.cost.kept == pytest.approx(left["none"], rel=0.005)
    for word in WORDS:
        recompute = Recompute(word=word, blocks=found)
        recompute.apply(model)
        left[word] = live(model, inputs)
        assert recompute.cost(trace)[0].cost.kept == pytest.approx(left[word], rel=0.03)
        unwrap(model)
    assert left["full"] < left["selective"] < left["none"]
    assert left["full"] < 0.6 * left["none"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())
        self.layer, self.rest = layer(), nn.Sequential(*(layer() for _ in range(40)))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.layer(self.layer(x)))


@pytest.mark.parametrize("word", WORDS)
def test_each_call_keeps_its_input(word: str) -> None:
    model, x = Twice().train(), torch.randn(32, 16)
    recompute = Recompute(word=word, blocks=("layer",))
    foretold = recompute.cost(metered(model, x))[0].cost.kept
    recompute.apply(model)
    assert foretold == live(model, x)


def test_blocks_are_those_worth_it() -> None:
    """Neither embeddings nor heads; stacks layer by layer, whether or not the layers are alike to the last module."""
    assert recomputed_blocks(traced("gpt2")) == ("transformer.h.0", "transformer.h.1")
    assert recomputed_blocks(traced("llama")) == tuple(f"model.layers.{i}" for i in range(3))
    assert recomputed_blocks(traced("t5")) == tuple(
        f"{half}.block.{i}" for half in ("encoder", "decoder") for i in (0, 1)
    )
    assert {"layer1", "layer2", "layer3", "layer4"} <= {*recomputed_blocks(traced("resnet10"))}
    assert recomputed_blocks(metered(ZOO["masked"].build(), zoo.points(4)[0])) == ()


def test_blocks_that_change_their_inputs_are_left_alone() -> None:
    def build(inplace: bool) -> nn.Module:
        block = lambda: nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        return nn.Sequential(nn.Linear(64, 64), *(block() for _ in range(6)))

    x = torch.randn(4, 64)
    assert recomputed_blocks(metered(build(False), x)) == tuple("123456")
    assert not {*"123456"} & {*recomputed_blocks(metered(build(True), x))}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_is_the_same_again(name: str, word: str) -> None:
    case, data = ZOO[name], ZOO[name].data(4)

    def train(blocks: tuple[str, ...]) -> list[Any]:
        model = case.build().train()
        for module in model.modules():
            for key, value in vars(module).items():
                if isinstance(value, float) and "drop" in key:
                    setattr(module, key, 0.2)
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        Recompute(word=word, blocks=blocks).apply(model)
        return trained(model, lambda step: mean_loss(case, model, data))[0]

    want = train(())
    same(want, train(recomputed_blocks(traced(name))))
    assert not torch.equal(want[0], trained(case.build().train(), lambda _: torch.zeros((), requires_grad=True))[0][0])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # of transformers 5.23
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("word", WORDS)
def test_beside_checkpoints_of_its_own(word: str, reentrant: bool) -> None:
    """transformers' own, around the same blocks."""
    case, data = ZOO["gpt2"], ZOO["gpt2"].data(4)

    def train(blocks: tuple[str, ...]) -> list[Any]:
        model: Any = case.build().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        Recompute(word=word, blocks=blocks).apply(model)
        return trained(model, lambda step: mean_loss(case, model, data))[0]

    same(train(()), train(("transformer.h.0", "transformer.h.1")))


@pytest.mark.parametrize("word", WORDS)
def test_cache_that_others_fill(word: str) -> None:
    """Only the second block is recomputed: the first has put its keys and values into the cache by then."""
    case, data = ZOO["gpt2"], ZOO["gpt2"].data(4)

    def train(blocks: tuple[str, ...]) -> list[Any]:
        model = case.build().train()
        Recompute(word=word, blocks=blocks).apply(model)
        return trained(model, lambda step: mean_loss(case, model, data))[0]

    same(train(()), train(("transformer.h.1",)))


# Random numbers


def test_what_draws_is_not_kept() -> None:
    """The attention kernels of all devices, by their dropout."""
    query, mask = torch.empty(2, 4, 8, 16, device="meta"), None
    calls = {
        aten._scaled_dot_product_flash_attention.default: lambda p: (query, query, query, p, True),
        aten._scaled_dot_product_flash_attention_for_cpu.default: lambda p: (query, query, query, p, True),
        aten._scaled_dot_product_efficient_attention.default: lambda p: (query, query, query, mask, True, p, True),
        aten._scaled_dot_product_cudnn_attention.default: lambda p: (query, query, query, mask, True, p, True),
        aten._scaled_dot_product_fused_attention_overrideable.default: lambda p: (query, query, query, mask, p),
    }
    for func, args in calls.items():
        assert torch.Tag.nondeterministic_seeded in func.tags
        assert worth_keeping(func, args(0.0), {})
        assert not worth_keeping(func, args(0.1), {})
        assert worth_keeping(func, (query,) * 3, {"dropout_p": 0.0})
        assert not worth_keeping(func, (query,) * 3, {"dropout_p": 0.1})
    assert worth_keeping(aten.mm.default, (query, query), {})
    assert not worth_keeping(aten.native_dropout.default, (query, 0.1, True), {})
    assert not worth_keeping(aten.addmm_.default, (query, query, query), {})


@pytest.fixture
def noisy_product() -> Iterator[Any]:
    """An operation as attention kernels are on GPUs: dear, and with a dropout of its own."""
    library = torch.library.Library("meshfit_test", "DEF")
    library.define("product(Tensor a, Tensor b, float dropout_p) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    op = torch.ops.meshfit_test.product

    def product(a: Tensor, b: Tensor, dropout_p: float) -> Tensor:
        out = a @ b
        return out * (torch.rand(out.shape) > dropout_p) if dropout_p else out

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output)

    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b, out = ctx.saved_tensors
        gradient = gradient * (out != 0)
        return gradient @ b.t(), a.t() @ gradient, None

    library.impl("product", product, "CPU")
    torch.library.register_autograd("meshfit_test::product", backward, setup_context=save, lib=library)
    register_flop_formula(op)(lambda a, b, *_, out_shape=None, **__: 2 * a[0] * a[1] * b[1])
    yield op.default
    flop_registry.pop(op)
    library._destroy()


class Drawing(nn.Module):
    def __init__(self, op: Callable[..., Tensor], p: float):
        super().__init__()
        self.op, self.p = op, p
        self.a, self.b = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.op(F.dropout(x, 0.3), self.a, self.p)), 0.3)
        scale = random.random()  # Python's own numbers too
        return F.dropout(torch.sigmoid(self.b(y) * scale), 0.3) * y


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("word", WORDS)
def test_kernels_that_draw(noisy_product: Any, word: str, p: float) -> None:
    """Were their results kept, the dropouts after them would draw other numbers the second time."""

    def train(blocks: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(Drawing(noisy_product, p), Drawing(noisy_product, p))
        x = torch.randn(8, 16)
        Recompute(word=word, blocks=blocks).apply(model)
        return [*trained(model, lambda step: model(x).square().sum())[0], torch.tensor(random.random())]

    same(train(()), train(("0", "1")))


@pytest.mark.parametrize("word", WORDS)
def test_attention_with_dropout(word: str) -> None:
    """By products, on CPUs."""

    def train(blocks: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(2))
        model, x = nn.Sequential(*layers), torch.randn(4, 8, 16)
        Recompute(word=word, blocks=blocks).apply(model)
        return trained(model, lambda step: model(x).square().sum())[0]

    same(train(()), train(("0", "1")))


# What forward changes


class Codebook(nn.Module):
    """Vectors that follow the data: changed behind autograd's back, after they were used."""

    vectors: Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("vectors", torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        nearest = torch.cdist(y.detach(), self.vectors).argmin(1)
        out = y + self.vectors[nearest] * y.exp()
        self.vectors.data.lerp_(y.detach()[:4], 0.1)
        return out


class Replaced(nn.Module):
    """A buffer set anew, a count in Python, a tensor that is not a buffer, and something left for others to read."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.calls, self.scale = 0, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.scale.mul_(1.1)
        self.penalty = (x * self.calls).square().mean()
        return torch.tanh(self.layer(x - self.mean) * self.calls * self.scale.item())


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU()),
    "batchnorm last": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.BatchNorm1d(6)),
    "cumulative": lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 6), nn.Tanh()),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()),
    "hooked": lambda: nn.Sequential(hooked_spectral_norm(nn.Linear(6, 6)), nn.Tanh()),
    "codebook": Codebook,
    "replaced": Replaced,
}


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_state_changes_once(kind: str, word: str, calls: int) -> None:
    """Also of a block that is called several times before the backward."""

    def train(recomputed: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(6, 6), STATEFUL[kind]()), torch.randn(5, 6)
        if recomputed:
            Recompute(word=word, blocks=("1",)).apply(model)

        def loss(step: int) -> Tensor:
            y, total = x + step, torch.zeros(())
            for _ in range(calls):
                y = model(y)
                total = total + y.square().sum() + getattr(model[1], "penalty", 0.0)
            return total

        seen, _ = trained(model, loss)
        return [*seen, getattr(model[1], "calls", 0), getattr(model[1], "scale", 0), getattr(model[1], "penalty", 0)]

    same(train(False), train(True))


@pytest.mark.parametrize("word", WORDS)
def test_modules_that_begin_to_train(word: str) -> None:
    """A norm that was frozen in the first step."""

    def train(blocks: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())), torch.randn(5, 6)
        Recompute(word=word, blocks=blocks).apply(model)

        def loss(step: int) -> Tensor:
            model.get_submodule("0.1").train(step > 0)
            return model(x).square().sum()

        return trained(model, loss)[0]

    same(train(()), train(("0",)))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("word", WORDS)
@distributed(world=2)
def test_global_batchnorm(word: str, counted: bool) -> None:
    """Also where one rank's samples do not count: what is computed again counts as it did at first."""
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def train(blocks: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        part = lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        model, x = nn.Sequential(part(), part(), part()), torch.randn(2, 4, 3, 5, 5)[rank]
        batchnorm.apply(model, RankGroup(dist.group.WORLD))  # pyright: ignore
        Recompute(word=word, blocks=blocks).apply(model)
        counts, seen = counted or rank == 0, []
        for _ in range(3):
            losses = []
            for microbatch in x.chunk(2):
                with batchnorm.counting(counts):
                    losses.append(model(microbatch).square().sum() * counts)
            model.zero_grad()
            sum(losses).backward()  # pyright: ignore
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [*seen, *model.buffers()]

    for want, got in zip(train(()), train(("0", "1", "2")), strict=True):
        assert torch.equal(want, got)


# Precision


class Shared(nn.Module):
    """One block, called twice: autocast makes the copy of its weights in low precision in the first call alone."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


@pytest.mark.parametrize("word", WORDS)
def test_autocast_is_the_same_again(word: str) -> None:
    kinds: list[torch.dtype] = []

    def train(blocks: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        model, x = Shared(), torch.randn(4, 8, 16)
        model.block.linear1.register_forward_hook(lambda _, __, out: kinds.append(out.dtype))
        Recompute(word=word, blocks=blocks).apply(model)

        def loss(step: int) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().sum()

        return trained(model, loss)[0]

    same(train(()), train(("block",)))
    assert {*kinds} == {torch.bfloat16}
    assert len(kinds) == 3 * 2 + 3 * 4


# Blocks of all makes


@dataclass
class Output:
    y: Tensor
    more: dict[str, Any]


class Odd(nn.Module):
    def __init__(self, returns: str):
        super().__init__()
        self.layer, self.returns = nn.Linear(8, 8), returns
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, seen: list[Tensor], *, bias: dict[str, Tensor], debug: str, factor: float = 1) -> Any:
        seen.append(x)
        y = torch.tanh(self.frozen(torch.tanh(self.layer(x) + bias["of"]))) * factor * len(seen)
        if self.returns == "tuple":
            return y, None, [y * 2, debug]
        if self.returns == "dict":
            return {"y": y, "more": {"z": y * 2}}
        return Output(y, {"z": y * 2})


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("returns", ["tuple", "dict", "dataclass"])
def test_arguments_and_results_of_any_kind(returns: str, word: str) -> None:
    """Keywords (also torch's own), lists that are added to, inputs without a gradient, frozen weights."""

    def train(recomputed: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x, bias = Odd(returns), torch.randn(4, 8), torch.randn(8, requires_grad=True)
        if recomputed:
            Recompute(word=word, blocks=("",)).apply(model)

        def loss(step: int) -> Tensor:
            seen: list[Tensor] = []
            for factor in (1.0, 2.0):
                out = model(x, seen, bias={"of": bias}, debug="name", factor=factor)
            tensors = [*tree.tensors(out)]
            assert len(tensors) == len(seen) == 2
            return sum(t.square().sum() for t in tensors)  # pyright: ignore

        seen, _ = trained(model, loss)
        return [*seen, bias.grad]

    same(train(False), train(True))


class Inside(nn.Module):
    """A module with a checkpoint of its own."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = lambda y: torch.tanh(self.b(F.dropout(torch.tanh(y), 0.2)))
        return checkpoint(inner, torch.tanh(self.a(x)), use_reentrant=self.reentrant).exp()  # pyright: ignore


class InPlace(nn.Module):
    """What is kept, changed in place: within the block and, for the last of it, outside."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += 1
        z = F.relu(self.b(y.tanh_()), inplace=True)
        return self.c(torch.sigmoid(z) * z)


MADE: dict[str, Callable[[], nn.Module]] = {
    "checkpoint inside": lambda: Inside(False),
    "reentrant checkpoint inside": lambda: Inside(True),
    "in place": InPlace,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten()
    ),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", MADE)
def test_blocks_of_many_makes(kind: str, word: str) -> None:
    def train(blocks: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), MADE[kind](), MADE[kind]()), torch.randn(4, 8)
        Recompute(word=word, blocks=blocks).apply(model)
        end = lambda y: y.mul_(2).relu_() if kind == "in place" else y
        return trained(model, lambda step: end(model(x)).square().sum())[0]

    same(train(()), train(("1", "2")))


@pytest.mark.parametrize("word", WORDS)
def test_backward_twice(word: str) -> None:
    torch.manual_seed(0)
    plain, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in "01")),
        torch.randn(4, 8),
    )
    model = copy.deepcopy(plain)
    Recompute(word=word, blocks=("0", "1")).apply(model)
    for each in (plain, model):
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    same([*plain.buffers()], [*model.buffers()])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func in (aten.addmm.default, aten.mm.default)
        return func(*args, **(kwargs or {}))


def test_only_where_a_gradient_is_asked_for() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())), torch.randn(4, 8)
    Recompute(word="full", blocks=("0",)).apply(model)
    with torch.no_grad(), LiveBytes() as held:
        out = model(x)
    assert held.bytes == out.untyped_storage().nbytes()
    model.eval()
    with LiveBytes() as evaluated:
        out = model(x)
    model.train()
    with LiveBytes() as trained:
        again = model(x)
    assert trained.bytes < evaluated.bytes
    assert torch.equal(out, again)
    unwrap(model)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("word", WORDS)
def test_backward_frees_everything(word: str) -> None:
    """At once: no cycle waits for the garbage collector."""
    part = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    model, x = nn.Sequential(part(), part()), torch.randn(4, 8)
    Recompute(word=word, blocks=("0", "1")).apply(model)
    model(x).sum().backward()  # gradients are there
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as held:
            model(x).sum().backward()
        assert held.bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("word", "counts"), [("full", 2), ("selective", 0)])
def test_products_run_again(word: str, counts: int) -> None:
    """Under full; not the last, whose result no one needs in backward."""
    part = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model, x = nn.Sequential(nn.Linear(8, 8), part), torch.randn(4, 8)
    counted = {}
    for paths in ((), ("1",)):
        Recompute(word=word, blocks=paths).apply(model)
        loss = model(x).sum()
        with Products() as products:
            loss.backward()
        counted[paths] = products.count
    assert counted[("1",)] - counted[()] == counts


@pytest.mark.parametrize("word", ["full", "selective"])
def test_a_block_that_writes_to_an_object_it_is_given(word: str) -> None:
    """The object is as it was when the block first ran, also if others have written to it since."""
    ends = []
    for paths in ((), ("blocks.0", "blocks.1")):
        torch.manual_seed(0)
        model = hostile.BlocksChangeObject().train()
        Recompute(word=word, blocks=paths).apply(model)
        model(torch.randn(4, 3)).square().sum().backward()
        ends.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*ends)
