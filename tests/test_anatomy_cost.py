"""The meter: its arithmetic against torch's counter, its kept bytes against what a real forward holds."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.anatomy_live import LiveBytes, unpacked
from benchmarks.zoo import ZOO, Case, mean_loss, take
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.flops import FORMULAS
from meshfit.anatomy.recompute import after_recompute
from meshfit.anatomy.trace import Event, EventCost, Trace, Value
from tests.few import few

READS_VALUES = {"mixtral", "bert", "partial", "class-weights"}
"""They look at a value of the batch, which meta tensors do not have; the last holds a tensor of the CPU in its loss."""

STEP_BY_STEP = {"lstm"}
"""One kernel on the CPU, with a workspace only the kernel knows; one product after the other on meta tensors."""


def metered(forward: Callable[[], Tensor], known: Any, target: str = "cpu") -> Meter:
    with Meter([leaf for leaf in tree_leaves(known) if isinstance(leaf, Tensor)], target=target) as meter:
        meter.reach([forward()])
    return meter


def cost_of(model: nn.Module, *inputs: Tensor, target: str = "cpu") -> EventCost:
    return metered(lambda: model(*inputs), [*model.parameters(), *model.buffers(), *inputs], target).total


def counted(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Operations of forward and backward, run for real, by torch's counter."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        out = forward()
        there = counter.get_total_flops()
        out.sum().backward()
        return there, counter.get_total_flops() - there


def held(forward: Callable[[], Tensor]) -> int:
    with LiveBytes() as live:
        out = forward()
    graph = out.view_as(out).grad_fn
    del out
    gc.collect()
    assert graph is not None
    return live.bytes


def known_to(case: Case, model: nn.Module, batch: Any) -> list[Any]:
    of_loss = list(case.loss.buffers()) if isinstance(case.loss, nn.Module) else []
    return [*model.parameters(), *model.buffers(), *of_loss, batch]


@pytest.mark.parametrize("name", few(ZOO, "gpt2", "mixtral", "t5", "mamba", "batchnorm-cnn", "partial", "lstm"))
def test_zoo(name: str) -> None:
    """To the last operation, on real tensors and on meta tensors, where nothing is computed or held."""
    case = ZOO[name]
    model, batch = case.build().train(), take(case.data(4), torch.arange(4))
    forward = lambda: mean_loss(case, model, batch)
    flops, live = counted(forward), held(forward)
    cost = metered(forward, known_to(case, model, batch)).total
    assert (cost.flops, cost.flops_backward) == flops
    assert cost.kept == pytest.approx(live, rel=0.005)
    if name in READS_VALUES:
        return
    model, batch = model.to("meta"), tree_map_only(Tensor, lambda tensor: tensor.to("meta"), batch)
    if name == "gpt2":  # transformers looks whether the mask masks anything
        del batch["attention_mask"]
    with unpacked():
        cost = metered(lambda: mean_loss(case, model, batch), known_to(case, model, batch)).total
    assert cost.flops == flops[0]
    if name in STEP_BY_STEP:  # the first step has no state before it to give a gradient to
        assert 0.9 * flops[1] < cost.flops_backward < flops[1]
        assert 0.4 * live < cost.kept < live
    else:
        assert cost.flops_backward == flops[1]
        assert cost.kept == pytest.approx(live, rel=0.03)


class Doubled(torch.autograd.Function):
    """A function of one's own with two products forward and, for a frozen second weight, three backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, frozen: Tensor) -> Tensor:
        hidden = torch.tanh(x @ weight)
        ctx.save_for_backward(x, weight, frozen, hidden)
        return hidden @ frozen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        x, weight, frozen, hidden = ctx.saved_tensors
        inner = (gradient @ frozen.t()) * (1 - hidden * hidden)
        return inner @ weight.t(), x.t() @ inner, None


class Hard(nn.Module):
    """One hard thing for a meter after a plain layer."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.frozen = nn.Parameter(torch.eye(32), requires_grad=False)
        self.convolution = nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2)
        self.gru = nn.GRU(32, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.what.replace(" ", "_"))(self.a(x).relu())

    def function(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.b.weight, self.frozen)  # pyright: ignore

    def frozen_weight(self, x: Tensor) -> Tensor:
        return (x @ self.frozen).exp()

    def unused_branch(self, x: Tensor) -> Tensor:
        self.b(x).exp()
        return x.exp()

    def without_grad(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.b(x)
        return (x * y).exp()

    def written_slices(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, 0].mul_(self.b(x)[:, 1])
        y[:, 3:5] = self.a(x)[:, :2]
        y[:16].addmm_(x[:16], self.b.weight)
        return F.hardswish(y, inplace=True).relu_()

    def recomputed(self, x: Tensor) -> Tensor:
        """Its input is kept by nothing else, and the last node before it is of no use."""
        inner, y = lambda y: self.b(torch.tanh(self.a(y))).sigmoid(), x + 1
        x.exp()
        return checkpoint(inner, y, use_reentrant=False)  # pyright: ignore

    def recomputed_reentrant(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.b(torch.tanh(self.a(x))).sigmoid(), x + 1, use_reentrant=True)  # pyright: ignore

    def transposed_convolution(self, x: Tensor) -> Tensor:
        return self.convolution(x.view(-1, 4, 8))

    def vector(self, x: Tensor) -> Tensor:
        return self.b(x) @ self.b.bias

    def attention(self, x: Tensor) -> Tensor:
        query, key = self.b(x).view(4, 4, 16, 8), self.a(x).view(4, 4, 16, 8)
        return F.scaled_dot_product_attention(query, key, key, is_causal=True)

    def attention_by_products(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.attention(x)

    def recurrent(self, x: Tensor) -> Tensor:
        return self.gru(x.view(4, 16, 32))[0]


HARD = [name.replace("_", " ") for name in vars(Hard) if not name.startswith("_") and name != "forward"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", HARD)
def test_hard_forwards(what: str, device: str) -> None:
    if (what, device) == ("attention by products", "meta"):
        pytest.skip("meta tensors stand for a fused kernel")
    model, x = Hard(what), torch.randn(64, 32)
    forward = lambda: model(x)
    flops, live = counted(forward), held(forward)
    model, x = model.to(device), x.to(device)
    cost = cost_of(model, x)
    assert (cost.flops, cost.flops_backward) == flops
    if (what, device) != ("recurrent", "meta"):  # torch copies the transposed input on the CPU, and not on meta
        assert cost.kept == live


def test_leaves_gradients_and_memory_alone() -> None:
    model, x = Hard("written slices"), torch.randn(64, 32)
    model(x).sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    out: list[Tensor] = []
    apply = torch.autograd.Function.__dict__["apply"]
    with LiveBytes() as live:
        meter = metered(lambda: out.append(model(x)) or out[0], [*model.parameters(), x])
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert live.bytes >= meter.total.kept > 0
    out.pop().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=0)
    gc.collect()
    assert live.bytes == 0  # nothing that backward freed is held by the meter


def test_events_share_out_the_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with Meter([*model.parameters(), x]) as meter:
        y = x + 1
        for key, module in enumerate(model):
            meter.start(key)
            y = module(y)
            meter.stop()
        meter.reach([y])
    first, activation, last = meter.costs.values()
    read, made, hidden = 4 * (5 * 8 + 16 * 8 + 16), 4 * 5 * 16, 2 * 5 * 8 * 16
    assert first == EventCost(hidden, hidden, read, made, 4 * 5 * 8, passed=made)  # y is kept, its gradient not wanted
    assert activation == EventCost(0, 0, made, made, made, passed=2 * made)
    assert last.flops_backward == 2 * last.flops == 2 * (2 * 5 * 16 * 4)
    assert last.kept == 0  # what the activation keeps already
    assert meter.outside == EventCost(0, 0, 4 * 5 * 8, 4 * 5 * 8, 0)
    meter.start(7)
    with pytest.raises(RuntimeError, match="event 8 starts inside event 7"):
        meter.start(8)


def test_lookups_and_expansions_cost_what_they_touch() -> None:
    table, ids = torch.randn(1000, 4, requires_grad=True), torch.arange(3)
    with Meter([table, ids]) as meter:
        rows = F.embedding(ids, table)
        rows.view(12)[None].expand(100, 12).sum()
    assert meter.outside.bytes_read == 24 + 3 * 16 + 3 * 16
    assert meter.outside.bytes_written == 3 * 16 + 4


def test_without_outputs_counts_what_lives() -> None:
    model, x = Hard("unused branch"), torch.randn(64, 32)
    with Meter([*model.parameters(), x]) as meter:
        out = model(x)
    kept = meter.total.kept
    assert kept == held(lambda: model(x))
    assert meter.total.flops_backward > cost_of(model, x).flops_backward
    assert out.requires_grad


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_meta_tensors_stand_for_kernels(target: str) -> None:
    """In half precision: fused attention keeps its inputs, its output and one number a row; dropout a byte."""
    shape, bytes = (2, 4, 64, 32), 2 * 2 * 4 * 64 * 32
    query, key, value = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.empty(64, 64, device="meta", dtype=torch.bool)

    def kept(**options: Any) -> int:
        known = [query, key, value, mask]
        forward = lambda: F.scaled_dot_product_attention(query, key, value, **options)
        return metered(forward, known, target).total.kept

    row = 4 * 2 * 4 * 64
    assert kept(is_causal=True) == pytest.approx(bytes + row, abs=64)
    assert kept(attn_mask=mask) == pytest.approx(bytes + row + 2 * 64 * 64, abs=64)
    scores = 2 * 2 * 4 * 64 * 64
    assert (kept(dropout_p=0.1) > scores) == (target == "cpu")
    forward = lambda: F.dropout(query, 0.1)
    assert metered(forward, [query], target).total.kept == bytes // (2 if target == "cuda" else 1)
    outside = torch.ops.aten.scaled_dot_product_attention.default
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(outside.name(), "AutogradMeta")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fake_tensors_follow_autocast(precision: str) -> None:
    """Copies of weights in low precision are kept, once each."""
    half = precision == "bf16"
    within = (lambda: torch.autocast("cpu", torch.bfloat16)) if half else nullcontext

    def build() -> tuple[nn.Module, Tensor]:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 16, 32)

    def forward() -> Tensor:  # leaving autocast drops its cache of copies: those that stay are kept by autograd
        with within():
            return model(x)

    model, x = build()
    live = held(forward)
    with FakeTensorMode():
        model, x = build()
        cost = metered(forward, [*model.parameters(), x]).total
    assert cost.kept == live
    assert cost.flops > 0


class Tiny(nn.Module):
    """A transformer whose blocks may be recomputed."""

    def __init__(self, recompute: tuple[int, ...] = ()):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.norm, self.head, self.recompute = nn.LayerNorm(32), nn.Linear(32, 50), recompute

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        yield "embed", self.embed
        yield from ((f"blocks.{i}", block) for i, block in enumerate(self.blocks))
        yield from (("norm", self.norm), ("head", self.head))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if i in self.recompute:
                x = checkpoint(block, x, mask, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore
            else:
                x = block(x, mask)
        return self.head(self.norm(x))


def traced(model: Any, first: Tensor, *others: Tensor) -> Trace:
    """A trace of a chain of modules: each event takes the last value."""
    events, values, seen = [], {0: _value(0, first, -1)}, [first]
    with Meter([*model.parameters(), *model.buffers(), first, *others], target="cpu") as meter:
        for index, (path, module) in enumerate(model.parts()):
            meter.start(index)
            seen.append(module(seen[-1], *others) if "blocks" in path else module(seen[-1]))
            meter.stop()
            values[index + 1] = _value(index + 1, seen[-1], index)
            events.append((index, path))
        meter.reach(seen[-1:])
    made = tuple(
        Event(index, "module", path, "", (index,), (index + 1,), cost=meter.costs[index]) for index, path in events
    )
    return Trace(made, values, (0,), (len(made),), {}, {}, {})


def _value(number: int, tensor: Tensor, made_by: int) -> Value:
    size = tensor.numel() * tensor.element_size()
    return Value(number, tuple(tensor.shape), str(tensor.dtype), size, made_by, storage=number)


@pytest.mark.parametrize("recompute", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_recomputed_blocks_keep_their_inputs(recompute: tuple[int, ...]) -> None:
    ids, mask = torch.randint(50, (8, 16)), torch.zeros(16, 16)
    trace = traced(Tiny().to("meta"), ids.to("meta"), mask.to("meta"))
    model = Tiny(recompute)
    live, paths = held(lambda: model(ids, mask)), [f"blocks.{i}" for i in recompute]
    assert sum(after_recompute(trace, paths)[0].values()) == pytest.approx(live, rel=0.03)


class Convolutions(nn.Module):
    """Blocks that pass on what their last activation saved, so that the next keeps it too."""

    def __init__(self, recompute: tuple[int, ...] = ()):
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), nn.Conv2d(8, 4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.recompute = recompute

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        yield "stem", self.stem
        yield from ((f"blocks.{i}", block) for i, block in enumerate(self.blocks))
        yield "head", self.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if i in self.recompute else block(x)  # pyright: ignore
        return self.head(x)


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2)])
def test_recomputed_inputs_count_once(recompute: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 16, 16)
    trace = traced(Convolutions(), x)
    model, paths = Convolutions(recompute), [f"blocks.{i}" for i in recompute]
    kept, _ = after_recompute(trace, paths)
    assert sum(kept.values()) == pytest.approx(held(lambda: model(x)), rel=0.03)


def test_seventy_billion_parameters_in_seconds() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=80, use_cache=False, attn_implementation="sdpa", **sizes)
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config).bfloat16(), torch.zeros(1, 4096, dtype=torch.long)
    began = time.process_time()
    with unpacked():
        cost = metered(lambda: model(input_ids=ids).logits, [*model.parameters(), *model.buffers(), ids], "cuda").total
    assert time.process_time() - began < 10
    products = sum(p.numel() for p in model.parameters()) - 128256 * 8192  # all but the lookup
    scores = 80 * 2 * 2 * 64 * 4096 * 4096 * 128
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert cost.flops == pytest.approx(2 * 4096 * (products - vectors) + scores, rel=1e-6)  # some rotate by a product


class _Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Language(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(500, width), nn.Sequential(_Block(width), _Block(width))
        self.head = nn.Linear(width, 500, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(ids))).flatten(0, 1), ids.flatten())


def _images() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 12 * 12, 10))


@pytest.mark.parametrize(
    ("build", "inputs"),
    [(_Language, lambda: torch.zeros(2, 32, dtype=torch.long)), (_images, lambda: torch.zeros(4, 3, 16, 16))],
)
def test_what_autocast_keeps_is_told_from_a_forward_in_fp32(build: Any, inputs: Callable[[], Tensor]) -> None:
    model, x = build(), inputs()
    known = [*model.parameters(), *model.buffers(), x]
    with Meter(known, target="cpu") as real, torch.autocast("cpu", torch.bfloat16):
        real.reach([model(x)])
    model, x = model.to("meta"), x.to("meta")
    with Meter([*model.parameters(), *model.buffers(), x], target="cpu", rounds="each") as told:
        told.reach([model(x)])
    products = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert told.total.rounded == sum(weight.nbytes for weight in products) // 2  # autograd keeps no bias
    assert told.total.kept + told.total.rounded == pytest.approx(real.total.kept, rel=0.005)


def test_one_kernel_for_rms_norm_on_gpus() -> None:
    x, weight = torch.zeros(2, 5, 8, device="meta", requires_grad=True), nn.Parameter(torch.ones(8, device="meta"))
    meter = metered(lambda: F.rms_norm(x * 2, (8,), weight), [x, weight], target="cuda")
    assert meter.total.kept == 2 * 5 * 8 * 4 + 2 * 5 * 4
