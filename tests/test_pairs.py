"""Pairs of column and row weights: known answers for small blocks, a proof by numbers for every pair of real models."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.zoo import ZOO, transformers, unpadded_text
from meshfit.anatomy.dataflow import AtenTrace
from meshfit.anatomy.pair import Pair, ParameterShard
from meshfit.anatomy.pairs import Pairs, find_pairs
from tests.few import few

WIDTH, HEADS = 32, 4


# Proof: what a rank holds shows nowhere but through the rank's own slices of the rows


def prove(model: nn.Module, inputs: Any, pair: Pair, dtype: torch.dtype = torch.float64) -> None:
    """Each rank's columns act through its slices of the rows alone, and these slices add up.

    With a rank's slices of the rows set to zero, noise on all else that it holds must not change the output; without,
    it must. So the channels that other ranks' slices read do not depend on this rank.
    """
    twin, inputs = generic(model, dtype), cast(inputs, dtype)
    held = dict(twin.named_parameters()) | dict(twin.named_buffers())
    whole = run(twin, inputs, {})
    for rank in range(pair.degree):
        cut = {row.parameter: with_share(held[row.parameter], row, rank, torch.zeros_like) for row in pair.rows}
        noise = {s.parameter: with_share(held[s.parameter], s, rank, noisy) for s in pair.columns + pair.others}
        without = run(twin, inputs, cut)
        assert not close(without, whole, dtype), "the rank's slices of the rows have an effect"
        assert not close(run(twin, inputs, noise), whole, dtype), "the rank's columns have an effect"
        assert close(run(twin, inputs, cut | noise), without, dtype), f"{pair.module}: rank {rank} shows elsewhere"
    for shard in pair.shards:
        size = held[shard.parameter].shape[shard.dim]
        assert sorted(i for rank in range(pair.degree) for i in shard.index(rank)) == list(range(size))
        assert len({len(shard.index(rank)) for rank in range(pair.degree)}) == 1
    add_up(twin, inputs, pair)


def add_up(model: nn.Module, inputs: Any, pair: Pair) -> None:
    """Rows on each rank's input channels, summed, return what they return on all of them."""
    called = []
    hooks = []

    def check(row: ParameterShard, layer: nn.Module, x: Tensor, out: Tensor) -> None:
        channel = 1 if isinstance(layer, nn.Conv2d) else x.dim() - 1
        bias = layer(torch.zeros_like(x))
        total = bias.clone()
        for rank in range(pair.degree):
            index = torch.tensor(row.index(rank))
            total += layer(torch.zeros_like(x).index_copy(channel, index, x.index_select(channel, index))) - bias
        torch.testing.assert_close(total, out, rtol=1e-4 if x.dtype == torch.float32 else 1e-9, atol=1e-6)
        called.append(row.parameter)

    for row in pair.rows:
        path, _, name = row.parameter.rpartition(".")
        layer = model.get_submodule(path)
        if name == "weight" and (isinstance(layer, (nn.Linear, nn.Conv2d)) or type(layer).__name__ == "Conv1D"):
            once = copy.deepcopy(layer)
            hooks.append(layer.register_forward_hook(lambda _, x, out, row=row, once=once: check(row, once, x[0], out)))
    run(model, inputs, {})
    for hook in hooks:
        hook.remove()


def generic(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in ``dtype``, with noise on weights that are all zero or all one."""
    twin = copy.deepcopy(model).to(dtype).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.numel() > 1 and parameter.std() < 1e-9:
                parameter += 0.1 * torch.randn_like(parameter)
    return twin


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    if isinstance(inputs, dict):
        return {name: cast(value, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(cast(value, dtype) for value in inputs)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def run(model: nn.Module, inputs: Any, changed: dict[str, Tensor]) -> list[Tensor]:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
    with torch.no_grad():
        return tensors(functional_call(model, changed, args, kwargs))


def tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    items = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def with_share(tensor: Tensor, shard: ParameterShard, rank: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    index = torch.tensor(shard.index(rank))
    return tensor.detach().index_copy(shard.dim, index, make(tensor.detach().index_select(shard.dim, index)))


def noisy(tensor: Tensor) -> Tensor:
    return tensor + (0.1 + tensor.abs().mean()) * torch.rand_like(tensor)


def close(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> bool:
    rtol, atol = (1e-8, 1e-11) if dtype == torch.float64 else (1e-4, 1e-6)
    return all(torch.allclose(a, b, rtol=rtol, atol=atol) for a, b in zip(got, want, strict=True))


# Blocks with known answers


class Host(nn.Module):
    """A block between two norms, on a residual stream."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.enter, self.before = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.block = block
        self.after, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.after(x + self.block(self.before(x))))


def found(block: type[nn.Module] | Callable[[], nn.Module], degree: int = 2) -> Pairs:
    """The split of a block, with every pair proven."""
    torch.manual_seed(0)
    model, x = Host(block()), torch.randn(3, 7, 8)
    split = find_pairs(model, x, degree=degree)
    for pair in split.pairs:
        prove(model, x, pair)
    return split


def only(split: Pairs) -> Pair:
    assert len(split.pairs) == 1, split
    return split.pairs[0]


def names(shards: tuple[ParameterShard, ...]) -> list[str]:
    return [shard.parameter.removeprefix("block.") for shard in shards]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 96, bias=False), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def attend(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Attention over heads of ``size``, with as many query heads for each key as there are."""
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, heads: int = HEADS, keys: int = HEADS, size: int = 8) -> None:
        super().__init__()
        self.size = size
        self.q, self.o = nn.Linear(WIDTH, heads * size), nn.Linear(heads * size, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * size), nn.Linear(WIDTH, keys * size)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attend(self.q(x), self.k(x), self.v(x), self.size))


class FusedAttention(nn.Module):
    def __init__(self, keys: int = HEADS, sliced: bool = False) -> None:
        super().__init__()
        self.sizes, self.sliced = [WIDTH, keys * 8, keys * 8], sliced
        self.qkv, self.o = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv, q, k = self.qkv(x), self.sizes[0], sum(self.sizes[:2])
        parts = (qkv[..., :q], qkv[..., q:k], qkv[..., k:]) if self.sliced else qkv.split(self.sizes, -1)
        return self.o(attend(*parts, 8))


class Slopes(Attention):
    """A penalty on distance, of another strength for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 0.5 ** torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        apart = torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]
        scores = (q @ k.transpose(-1, -2) + self.slopes[:, None, None] * apart).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class MixedHeads(Attention):
    """Scores of each head from those of all heads."""

    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2)
        scores = scores.softmax(1) if self.mix is None else torch.einsum("bhij,hg->bgij", scores, self.mix)
        return self.o((scores.softmax(-1) @ v.softmax(1)).transpose(1, 2).flatten(2))


class NormedQueries(Attention):
    """One norm for the queries of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.q(x).unflatten(-1, (-1, 8))).flatten(2)
        return self.o(attend(q, self.k(x), self.v(x), 8))


class ResidualInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x + torch.tanh(self.up(x)))


class Raw(nn.Module):
    """Parameters without modules, and a learned scalar between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 64)), nn.Parameter(torch.randn(64, WIDTH))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up * self.scale) @ self.down + self.bias


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.down(self.up(x).relu())
        return x


class InPlace(nn.Module):
    """Channels written into a tensor one half after the other, changed in place, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        hidden = torch.zeros_like(up)
        hidden[..., :32] = up[..., :32]
        hidden[..., 32:] = up[..., 32:]
        return self.down(F.dropout(hidden.mul_(2).relu_(), 0.25))


def test_mlp() -> None:
    pair = only(found(mlp))
    assert (names(pair.columns), names(pair.rows), names(pair.others)) == (["0.weight"], ["2.weight"], ["0.bias"])
    assert (pair.module, pair.kind, pair.limit) == ("block", "mlp", 64)
    assert pair.columns[0] == ParameterShard("block.0.weight", 0, (((0, 32),), ((32, 64),)), 64)
    assert pair.rows[0].dim == 1
    assert pair.bytes == 4 * (64 * WIDTH * 2 + 64)


@pytest.mark.parametrize("degree", [2, 4, 3])
def test_gated_mlp(degree: int) -> None:
    pair = only(found(Gated, degree))
    assert (names(pair.columns), names(pair.rows)) == (["gate.weight", "up.weight"], ["down.weight"])
    assert names(pair.others) == ["gate.bias", "up.bias"]


def test_fused_gate_is_cut_in_both_halves() -> None:
    pair = only(found(FusedGate))
    assert pair.columns[0].ranges == (((0, 24), (48, 72)), ((24, 48), (72, 96)))
    assert pair.rows[0].ranges == (((0, 24),), ((24, 48),))


@pytest.mark.parametrize("degree", [2, 4])
def test_attention(degree: int) -> None:
    pair = only(found(Attention, degree))
    assert (names(pair.columns), names(pair.rows)) == (["q.weight", "k.weight", "v.weight"], ["o.weight"])
    assert sorted(names(pair.others)) == ["k.bias", "q.bias", "v.bias"]
    assert (pair.kind, pair.limit) == ("attention", HEADS)


def test_fused_attention() -> None:
    pair = only(found(FusedAttention))
    assert (names(pair.columns), names(pair.rows)) == (["qkv.weight"], ["o.weight"])
    assert pair.columns[0].ranges[0] == ((0, 16), (32, 48), (64, 80))
    assert (names(pair.others), pair.limit) == (["qkv.bias"], HEADS)


def test_grouped_queries() -> None:
    """Two heads of keys and values allow two ways, not four."""
    pair = only(found(lambda: Attention(keys=2)))
    assert (names(pair.columns), pair.limit) == (["q.weight", "k.weight", "v.weight"], 2)
    assert [shard.limit for shard in pair.columns] == [4, 2, 16]  # values alone need no heads
    assert names((pair.narrowest,)) == ["k.weight"]
    for sliced in (False, True):
        pair = only(found(lambda sliced=sliced: FusedAttention(keys=2, sliced=sliced)))
        assert pair.columns[0].ranges[1] == ((16, 32), (40, 48), (56, 64))
    assert found(lambda: Attention(keys=2), degree=4).pairs == ()


def test_one_head_of_keys_stays_whole() -> None:
    pair = only(found(lambda: Attention(keys=1)))
    assert (names(pair.columns), names(pair.rows)) == (["q.weight"], ["o.weight"])
    assert pair.entries == ("block.k.weight", "block.v.weight")


def test_one_head_is_no_pair() -> None:
    assert found(lambda: Attention(heads=1, keys=1)).pairs == ()


def test_buffer_by_head_is_cut_along() -> None:
    pair = only(found(Slopes))
    assert "slopes" in names(pair.others)
    assert pair.limit == HEADS


def test_norm_shared_by_heads_has_part_of_its_gradient() -> None:
    pair = only(found(NormedQueries))
    assert pair.partial == ("block.norm.bias", "block.norm.weight")
    assert names(pair.columns) == ["q.weight", "k.weight", "v.weight"]


def test_a_learned_mixture_of_heads_is_a_row() -> None:
    pair = only(found(MixedHeads))
    assert (names(pair.columns), names(pair.rows)) == (["q.weight", "k.weight"], ["mix"])
    assert pair.summed == 3 * HEADS * 7 * 7


def test_raw_parameters() -> None:
    pair = only(found(Raw))
    assert (names(pair.columns), names(pair.rows), pair.partial) == (["up"], ["down"], ("block.scale",))
    assert (pair.columns[0].dim, pair.rows[0].dim) == (1, 0)


def test_a_block_that_is_used_twice() -> None:
    assert names(only(found(Twice)).rows) == ["down.weight"]


def test_writes_in_place_and_dropout() -> None:
    torch.manual_seed(0)
    split = find_pairs(Host(InPlace()), torch.randn(3, 7, 8))
    assert names(only(split).columns) == ["up.weight"]
    assert only(split).rows[0].ranges == (((0, 32),), ((32, 64),))
    assert only(split).draws


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, WIDTH)), "layer_norm"),
        (ResidualInside, "both column and row"),
        (lambda: MixedHeads(learned=False), "mixed by _softmax"),
    ],
)
def test_no_pair(block: Callable[[], nn.Module], reason: str) -> None:
    split = found(block)
    assert split.pairs == ()
    weight = next(name for name in split.gathered if name.startswith("block."))
    assert reason in split.why[weight]


class Images(nn.Module):
    """Convolutions between two norms over channels."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.enter, self.before = nn.Conv2d(3, 16, 3), nn.GroupNorm(1, 16)
        self.block = nn.Sequential(*layers)
        self.after = nn.GroupNorm(1, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(self.enter(x)))).mean((2, 3))


def found_in_images(*layers: nn.Module) -> Pairs:
    x = torch.randn(3, 3, 8, 8)
    model = Images(*layers)
    split = find_pairs(model, x)
    for pair in split.pairs:
        prove(model, x, pair)
    return split


def test_convolutions_with_batchnorm() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24)
    pair = only(found_in_images(nn.Conv2d(16, 24, 3), norm, nn.ReLU(inplace=True), nn.Conv2d(24, 16, 3)))
    assert (names(pair.columns), names(pair.rows), pair.kind) == (["0.weight"], ["3.weight"], "conv")
    assert sorted(names(pair.others)) == ["0.bias", "1.bias", "1.running_mean", "1.running_var", "1.weight"]


def test_groups_of_channels_limit_the_ways() -> None:
    torch.manual_seed(0)
    pair = only(found_in_images(nn.Conv2d(16, 24, 3), nn.GroupNorm(6, 24), nn.ReLU(), nn.Conv2d(24, 16, 3)))
    assert pair.limit == 6


def test_depthwise_convolution_is_cut_along() -> None:
    torch.manual_seed(0)
    deep = nn.Conv2d(24, 24, 3, groups=24)
    pair = only(found_in_images(nn.Conv2d(16, 24, 1), nn.SiLU(), deep, nn.SiLU(), nn.Conv2d(24, 16, 1)))
    assert (names(pair.columns), names(pair.rows)) == (["0.weight"], ["4.weight"])
    assert sorted(names(pair.others)) == ["0.bias", "2.bias", "2.weight"]


def test_flatten_after_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(3, 3, 8, 8)
    pair = only(find_pairs(model, x))
    prove(model, x, pair)
    assert pair.rows[0].ranges == (((0, 144),), ((144, 288),))
    assert pair.limit == 8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.token(ids)))


def test_tied_embedding_and_head_are_no_pair() -> None:
    split = find_pairs(Tied(), torch.arange(12).view(2, 6))
    assert (split.pairs, split.whole, split.cover) == ((), ("token.weight",), 0.0)


def test_proof_refuses_a_wrong_cut() -> None:
    """Contiguous halves of fused queries, keys and values are no cut by heads."""
    torch.manual_seed(0)
    model, x = Host(FusedAttention()), torch.randn(3, 7, 8)
    pair = only(find_pairs(model, x))
    wrong = ParameterShard("block.qkv.weight", 0, (((0, 48),), ((48, 96),)), 4)
    fields = {name: getattr(pair, name) for name in Pair.__dataclass_fields__}
    with pytest.raises(AssertionError, match="shows elsewhere"):
        prove(model, x, Pair(**fields | {"columns": (wrong,), "others": ()}))


# Real models

PAIRS = {
    "gpt2": 4,
    "llama": 6,
    "mixtral": 4,
    "bert": 5,
    "t5": 8,
    "vit": 6,
    "convnext": 5,
    "unet-diffusers": 13,
    "resnet10": 4,
    "mobilenet": 12,
    "densenet": 6,
    "tied-gpt": 4,
    "batchnorm-cnn": 1,
    "two-inputs": 1,
}


@pytest.mark.parametrize("name", few(PAIRS, "gpt2", "mixtral", "t5", "convnext", "batchnorm-cnn"))
def test_every_pair_of_a_real_model_is_proven(name: str) -> None:
    case = ZOO[name]
    model, data = case.build(), case.data(3)
    inputs = data if case.loss is None else data[0]
    split = find_pairs(model, inputs)
    assert len(split.pairs) == PAIRS[name]
    assert sorted([*split.gathered, *split.whole, *_held(model, split)]) == sorted(
        n for n, _ in model.named_parameters()
    )
    assert list(split.why) == [n for n, _ in model.named_parameters() if n not in _held(model, split)]
    assert all(split.why.values())
    for pair in split.pairs:
        prove(model, inputs, pair, torch.float32 if name == "mixtral" else torch.float64)


def _held(model: nn.Module, split: Pairs) -> list[str]:
    held = {shard.parameter for pair in split.pairs for shard in pair.shards}
    return [name for name, _ in model.named_parameters() if name in held]


def test_four_ways_need_four_heads() -> None:
    vit, llama = ZOO["vit"], ZOO["llama"]
    model, inputs = vit.build(), vit.data(3)
    split = find_pairs(model, inputs, degree=4)
    assert [pair.kind for pair in split.pairs] == ["attention", "mlp"] * 3
    prove(model, inputs, split.pairs[0])
    assert {pair.kind for pair in find_pairs(llama.build(), llama.data(3), degree=4).pairs} == {"mlp"}
    with pytest.raises(ValueError, match="two ways or more"):
        find_pairs(model, inputs, degree=1)


def test_equal_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    replay = AtenTrace.replay

    def counted(*args: Any) -> Any:
        counts[-1] += 1
        return replay(*args)

    monkeypatch.setattr(AtenTrace, "replay", counted)
    hf = transformers()
    splits = []
    for layers in (2, 32):
        counts.append(0)
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        model = hf.LlamaForCausalLM(config)
        splits.append(find_pairs(model, unpadded_text(2)))
    assert counts[1] == counts[0]
    assert [len(split.pairs) for split in splits] == [4, 64]
    for number, pair in enumerate(splits[1].pairs):
        like = splits[0].pairs[number % 2]
        assert pair.module == like.module.replace("layers.0", f"layers.{number // 2}")
        assert [(s.dim, s.ranges, s.limit) for s in pair.shards] == [(s.dim, s.ranges, s.limit) for s in like.shards]


def test_the_model_stays_as_it_was_and_the_result_is_the_same_each_time() -> None:
    case = ZOO["batchnorm-cnn"]
    model, inputs = case.build().eval(), case.data(3)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first = find_pairs(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert find_pairs(model, inputs) == first


# The recorded operations


class Hostile(nn.Module):
    """Views, writes through views, lists, keywords, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        window = y.t()[1:3]
        window += 1
        y.view(-1)[::2] *= torch.rand(x.shape[0] * 2, generator=torch.Generator().manual_seed(3))
        self.seen += y.detach().sum(0)
        parts = torch.stack([y, F.dropout(y, 0.5)], dim=0)
        return torch.cat(parts.unbind(0), dim=1) + torch.randn_like(y[:, :1])


def test_replay_returns_what_was_recorded() -> None:
    trace = AtenTrace.of(Hostile(), torch.randn(3, 4))
    for _ in range(2):
        for op in trace.ops:
            made = trace.replay(op, {})
            assert made is not None
            assert sorted(made) == sorted(op.made)
            assert not any(bool(trace.differs(value, storage).any()) for value, storage in made.items())
    assert trace.value_of["seen"] in [value for op in trace.ops for value in op.written]


def test_replay_of_all_that_follows_is_a_forward() -> None:
    """With one value changed, replaying what depends on it returns what the model returns."""
    torch.manual_seed(0)
    model, x = Hostile().double(), torch.randn(3, 4, dtype=torch.float64)
    trace = AtenTrace.of(model, x)
    other = trace.contents[trace.value_of["weight"]].clone()
    trace.whole[trace.value_of["weight"]].on(other).mul_(2)
    changed = {trace.value_of["weight"]: other}
    for op in trace.ops:
        if any(window.value in changed for window in op.reads):
            made = trace.replay(op, changed)
            assert made is not None
            changed |= made
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.weight *= 2
        torch.manual_seed(0)
        want = model.train()(x)
    (out,) = trace.outputs
    torch.testing.assert_close(trace.whole[out].on(changed[out]), want)
