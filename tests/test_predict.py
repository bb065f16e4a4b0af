"""Seconds and bytes of a traced model under a plan: against the described one, and against itself."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from meshfit import Cluster
from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, Streaming, merged
from meshfit.anatomy.samples import at_samples
from meshfit.anatomy.trace import Trace
from meshfit.axes.context.piece import guarded
from meshfit.axes.shard.units import traced
from meshfit.axes.tensor.cache import planned
from meshfit.axes.tensor.cost import tensor_cost
from meshfit.axes.tensor.cut import cut
from meshfit.comm.draws import Stream
from meshfit.comm.group import CountingGroup
from meshfit.errors import PlanError
from meshfit.launch.folders import CACHE
from meshfit.plan import Plan
from meshfit.planner import predict
from meshfit.planner.decoder import Decoder, Degrees
from meshfit.planner.predict import TracedPredictor
from meshfit.planner.software import MESHFIT
from meshfit.planner.step import StepModel
from meshfit.planner.transformer import step_work

H100 = Cluster.of("8xH100")
GIB = 2**30


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mix, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.wide, self.narrow = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, value = self.wide(self.between(x)).chunk(2, -1)
        return x + self.narrow(F.silu(gate) * value)


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.layers = nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def predictor(sizes: tuple[int, ...], tokens: int, *, device: str = "meta") -> TracedPredictor:
    with torch.device(device):
        model, ids = Llama(*sizes), torch.zeros(2, tokens, dtype=torch.long)
    return TracedPredictor(model, loss, ids, torch.optim.AdamW(model.parameters()), H100)


LARGE = (4, 4096, 32, 11008, 32000)


@pytest.fixture(scope="module")
def large() -> TracedPredictor:
    return predictor(LARGE, 4096)


@pytest.mark.parametrize(
    ("plan", "batch", "degrees"),
    [
        ("data=8", 16, {"data": 8, "microbatch": 2}),
        ("shard=8", 16, {"data": 8, "microbatch": 2, "zero": 3}),
        ("data=8 recompute=full", 16, {"data": 8, "microbatch": 2, "recompute": "full"}),
        ("pipeline=4 data=2 microbatches=8", 16, {"data": 2, "pipeline": 4, "microbatch": 1}),
    ],
)
def test_a_traced_model_takes_as_long_as_the_described_one(
    large: TracedPredictor, plan: str, batch: int, degrees: dict[str, Any]
) -> None:
    """Within 15 %: the same products, element-wise work as eager mode does it and not as Megatron's kernels."""
    layers, hidden, heads, ffn, vocab = LARGE
    kinds: dict[str, Any] = {"gated": True, "bias": False, "dropout": False, "tied": False}
    model = Decoder(layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, **kinds)
    described = StepModel(H100, MESHFIT)(
        step_work(model, Degrees(length=4096, batch=batch, attention="torch", **degrees), MESHFIT)
    )
    found = large(Plan.parse(f"{plan} precision=bf16"), batch)
    assert found.seconds == pytest.approx(described.seconds, rel=0.15)
    assert sum(found.items.values()) == pytest.approx(found.seconds)
    assert found.work.tokens == batch * 4096


def products(operations: tuple[Operation, ...]) -> Counter[Operation]:
    """A product or its transpose: the same work."""
    dear = [op for op in operations if not isinstance(op, Streaming)]
    turned = (replace(op, m=min(op.m, op.n), n=max(op.m, op.n)) if isinstance(op, MatrixProduct) else op for op in dear)
    return Counter(merged(turned))


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_of_a_tensor_group_has_its_share_of_each_product(degree: int) -> None:
    sizes = (2, 64, 4, 160, 512)
    found = predictor(sizes, 32, device="cpu")(Plan.parse(f"tensor={degree} precision=bf16 sequence=whole"), 3)
    layers, hidden, heads, ffn, vocab = sizes
    kinds: dict[str, Any] = {"gated": True, "bias": False, "dropout": False, "tied": False}
    model = Decoder(layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, **kinds)
    software = replace(MESHFIT, fp32_gradients=False)
    described = step_work(
        model, Degrees(length=32, batch=3, microbatch=3, tensor=degree, attention="torch"), software
    ).stages[0]
    assert products(found.work.stages[0].forward) == products(described.forward)
    assert products(found.work.stages[0].backward) == products(described.backward)
    said = [call for call in found.collectives if call.axis == "tensor" and call.phase == "forward"]
    assert {(call.degree, call.stride) for call in said} == {(degree, 1)}


def test_any_batch_from_two_traces() -> None:
    with torch.device("meta"):
        model = Llama(2, 64, 4, 160, 512)
    of = lambda samples: traced(
        *(model, loss, torch.zeros(samples, 32, dtype=torch.long, device="meta")),
        plan=Plan(precision="bf16"),
        operations=True,
    )
    three, five, seven = map(of, (3, 5, 7))
    assert isinstance(three, Trace)
    assert isinstance(five, Trace)
    assert isinstance(seven, Trace)
    found = at_samples(three, 3, five, 5, 7)
    assert [event.cost for event in found.events] == [event.cost for event in seven.events]
    assert found.values == seven.values
    assert [[use.bytes for use in event.cost.uses] for event in found.events] == [
        [use.bytes for use in event.cost.uses] for event in seven.events
    ]


def test_stages_of_a_pipeline_share_the_operations_out(large: TracedPredictor) -> None:
    def flops(plan: str) -> float:
        work = large(Plan.parse(f"{plan} precision=bf16"), 8).work
        assert work is not None
        return work.microbatches * sum(op.flops for s in work.stages for op in (*s.forward, *s.backward))

    whole = flops("microbatches=8")
    assert flops("pipeline=4 microbatches=8") == pytest.approx(whole)
    assert flops("pipeline=2 microbatches=8 schedule=interleaved") == pytest.approx(whole)


def test_what_is_computed_again_is_the_forward_of_blocks(large: TracedPredictor) -> None:
    full, none = (large(Plan.parse(f"precision=bf16 recompute={word}"), 2) for word in ("full", "none"))
    assert full.work is not None
    (stage,) = full.work.stages
    layers, hidden, _, ffn, _ = LARGE
    again = Counter(type(op) for op in stage.again)
    assert again[FusedAttention] == 1
    a_layer = 2 * 2 * 4096 * (4 * hidden * hidden + 2 * hidden * ffn)
    recomputed = sum(op.flops for op in stage.again if isinstance(op, MatrixProduct))
    assert recomputed == pytest.approx(layers * a_layer), "but for the last product, which nothing in backward needs"
    assert full.seconds > 1.15 * none.seconds
    assert full.memory.held["activations"] < 0.4 * none.memory.held["activations"]


def test_memory_by_phase(large: TracedPredictor) -> None:
    one, eight = (large(Plan.parse(f"{plan} precision=bf16"), 8) for plan in ("data=8", "shard=8"))
    weights = sum(p.numel() * 4 for p in large.model.parameters())
    assert one.kinds["start"]["weights"] == weights
    assert one.kinds["steady"]["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert eight.kinds["start"]["weights"] == pytest.approx(weights / 8, rel=0.01)
    assert max(one.phases.values()) == one.phases["steady"]
    assert "optimizer" not in one.kinds["start"]
    assert one.memory.device[0] < one.memory.device[1] < 80 * GIB
    assert one.fits
    assert not large(Plan.parse("data=8 precision=bf16"), 2048).fits


def test_what_cannot_be_predicted_is_refused(large: TracedPredictor) -> None:
    with pytest.raises(PlanError, match="trials"):
        large(Plan.parse("tensor=2"), 8)
    with pytest.raises(PlanError, match="not predicted"):
        large(Plan.parse("server=1 data=2"), 8)


class SizedGroup(CountingGroup):
    """Counts bytes, too, as they are under autocast."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.moved: Counter[str] = Counter()

    def _counted(self, op: str, x: Tensor, times: int = 1) -> Tensor:
        self.moved[op] += x.nbytes * times
        return super()._counted(op, x, times)


def test_collectives_of_a_tensor_group_are_in_half_precision_under_autocast() -> None:
    torch.manual_seed(0)
    model, ids = Llama(2, 64, 4, 160, 512), torch.randint(512, (13, 32))
    found = planned(model, loss, ids, 2, by_rows=False)
    trace = traced(model, loss, ids, plan=Plan(precision="bf16"))
    assert isinstance(trace, Trace)
    group = SizedGroup(2)
    for region in found.regions:
        cut(model, region, group, Stream(group))
    with guarded():
        with torch.autocast("cpu", torch.bfloat16):
            total = loss(model, ids)
        total.backward()
    _, added = tensor_cost(trace, replace(found, elements={}), half="bfloat16")
    assert added.moved == group.moved


def test_a_narrow_stand_in_tells_what_trials_on_the_model_itself_would() -> None:
    """Of a model that is on meta: the same operations and collectives."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=512)
    found = []
    torch.manual_seed(0)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, ids = transformers.LlamaForCausalLM(config), torch.randint(512, (13, 128))
        labelled = lambda model, ids: model(input_ids=ids, labels=ids).loss
        predict = TracedPredictor(model, labelled, ids, torch.optim.AdamW(model.parameters()), H100)
        found.append(predict(Plan.parse("pipeline=2 tensor=2 microbatches=2 precision=bf16"), 4))
    with_weights, on_meta = found
    assert on_meta.work is not None
    assert with_weights.work is not None
    for one, other in zip(on_meta.work.stages, with_weights.work.stages, strict=True):
        assert (Counter(one.forward), Counter(one.backward)) == (Counter(other.forward), Counter(other.backward))
    assert Counter(on_meta.collectives) == Counter(with_weights.collectives)
    assert on_meta.memory == with_weights.memory
    assert any(call.axis == "tensor" for call in on_meta.collectives)


def test_a_second_look_at_a_model_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    plan = Plan.parse("shard=2 precision=bf16 recompute=full")

    def look(model: nn.Module) -> Any:
        data = torch.zeros(4, 16), torch.zeros(4, 16)
        objective = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
        optimizer = torch.optim.AdamW(model.parameters())
        return TracedPredictor(model, objective, data, optimizer, Cluster.of("2xH100"))(plan, 8)

    deep = lambda layers, act: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), act()) for _ in range(layers)))
    first = look(deep(4, nn.ReLU))
    traces = lambda: sorted(path.name for path in (tmp_path / "traces").iterdir())
    kept = traces()
    refused = lambda *args, **how: pytest.fail("it was traced again")
    with monkeypatch.context() as patched:
        patched.setattr(predict, "traced", refused)
        again = look(deep(4, nn.ReLU))
    assert (again.seconds, again.memory, again.collectives) == (first.seconds, first.memory, first.collectives)
    assert traces() == kept
    look(deep(4, nn.GELU))  # computes something else
    assert len(traces()) == 2 * len(kept)


def test_a_mask_that_is_looked_at_runs_nothing_on_zeros() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    with torch.device("meta"):
        model, ids = transformers.LlamaForCausalLM(config), torch.zeros(3, 16, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": ids}
    found = traced(model, lambda model, batch: model(**batch).loss, batch, operations=True)
    assert isinstance(found, Trace)
    assert not any("zeros" in note or "as a whole" in note for note in found.notes)
    assert sum(len(block.paths) for block in found.blocks if "DecoderLayer" in block.kind) == 2
