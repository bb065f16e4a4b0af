"""The planner's cost model: cases by hand, what must not get slower, and published trainings."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshfit import Cluster
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.kernels import standing_for
from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, Streaming, merged
from meshfit.anatomy.trace import EventCost
from meshfit.plan import Plan
from meshfit.planner.collectives import START, CollectiveCall, beside, seconds
from meshfit.planner.decoder import Decoder, Degrees, Experts, active_parameters, layers_of, parameters_of
from meshfit.planner.memory import in_flight, step_memory
from meshfit.planner.operations import Timing
from meshfit.planner.sizes import DecoderPredictor
from meshfit.planner.software import FSDP, MEGATRON, MEGATRON_CORE, Software
from meshfit.planner.step import StageWork, StepModel, StepWork
from meshfit.planner.transformer import step_work

A100, H100 = Cluster.of("8xA100"), Cluster.of("8xH100")


def rate(cluster: Cluster, *sizes: int, **options) -> float:
    product = MatrixProduct(*sizes, **options)
    return product.flops / Timing(cluster.accelerator)(product)


def test_large_products_reach_what_the_device_sustains() -> None:
    device = A100.accelerator
    assert rate(A100, 8192, 8192, 8192) == pytest.approx(device.sustained("bf16"), rel=0.03)
    assert rate(A100, 8192, 8192, 8192, accumulate=True) < rate(A100, 8192, 8192, 8192)
    assert rate(H100, 8192, 8192, 8192, precision="fp8") > 1.5 * rate(H100, 8192, 8192, 8192)
    assert rate(A100, 8192, 8192, 8192, precision="fp8") == rate(A100, 8192, 8192, 8192), "which it does not have"


def test_tiles_come_in_waves() -> None:
    """108 units: a tile more than fits into one wave costs a wave more."""
    timing = Timing(replace(A100.accelerator, reached={"bf16": 0.87}))
    full = timing(MatrixProduct(108 * 128, 256, 4096))
    more = timing(MatrixProduct(109 * 128, 256, 4096))
    assert more > 1.2 * full, "smaller tiles soften it"
    assert timing(MatrixProduct(1024, 1024, 256)) / timing(MatrixProduct(1024, 1024, 2048)) > 1 / 8, (
        "short k fills less"
    )


def test_odd_widths_are_slow() -> None:
    assert rate(A100, 8192, 8192, 8192 + 4) < 0.6 * rate(A100, 8192, 8192, 8192)
    assert rate(A100, 8192, 8192, 8192 + 8) < rate(A100, 8192, 8192, 8192)


def test_bytes_and_launches() -> None:
    timing, device = Timing(A100.accelerator), A100.accelerator
    assert timing(Streaming(2e9, 3)) == pytest.approx(2e9 / (0.85 * 2.039e12) + 3 * device.launch)
    assert timing(MatrixProduct(1, 8192, 8192)) > 2 * 8192 * 8192 / device.bandwidth, "reading the weights"
    causal, whole = (FusedAttention(1, 32, 8192, 8192, 128, causal=causal) for causal in (True, False))
    assert timing(whole) == pytest.approx(2 * timing(causal), rel=0.1)
    few = FusedAttention(1, 2, 1024, 1024, 128)
    assert few.flops / timing(few) < 0.3 * causal.flops / timing(causal), "16 blocks on 108 units"


def test_collectives_by_hand() -> None:
    inside = seconds(CollectiveCall("all_reduce", 1e9, 8), A100)
    assert inside == pytest.approx(START + 14 * 4e-6 + 2e9 * 7 / 8 / (300e9 * 0.75))
    two = Cluster.of("2x8xA100@8x200Gbps")
    assert seconds(CollectiveCall("all_gather", 1e9, 16), two) == pytest.approx(
        START + 7 * 4e-6 + 15e-6 + 1e9 * 15 / 16 / (8 * 25e9 * 0.85)
    ), "all ports of a node together"
    across = CollectiveCall("all_gather", 1e9, 2, stride=8)
    assert seconds(across, two) == pytest.approx(START + 15e-6 + 0.5e9 / (25e9 * 0.85)), "each its own port"
    assert seconds(CollectiveCall("send", 25e9 * 0.85, 2, stride=8), two) == pytest.approx(1, rel=1e-3)
    assert seconds(CollectiveCall("all_reduce", 1e9, 1), A100) == 0
    one, eight = (seconds(CollectiveCall("all_to_all", 8e9, 16, copies=copies), two) for copies in (1, 8))
    assert one == pytest.approx(4e9 / (25e9 * 0.6), rel=0.01), "half of it to the other node"
    assert eight == pytest.approx(1e9 * (1 - 0.5**8) / (25e9 * 0.6), rel=0.01), "to whose devices once"


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
@pytest.mark.parametrize("stride", [1, 8])
def test_more_bandwidth_is_never_slower(name: str, stride: int) -> None:
    call = CollectiveCall(name, 3e8, 16, stride)
    times = [seconds(call, Cluster.of(f"16x8xH100@{gbps}Gbps")) for gbps in (100, 400, 1600, 3200)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] or (name, stride) == ("send", 1), "which stays in a node"
    assert seconds(replace(call, bytes=6e8), H100) >= seconds(call, H100)


def test_what_runs_beside_computing() -> None:
    assert beside(1.0, 0.0, "nvlink") == 1.0
    assert beside(1.0, 0.5, "nvlink") == pytest.approx(1.075), "it takes units from it"
    assert beside(1.0, 2.0, "nvlink") == 2.0
    assert beside(1.0, 0.5, "network") < beside(1.0, 0.5, "nvlink")
    times = [beside(1.0, hidden / 10, "nvlink") for hidden in range(30)]
    assert times == sorted(times)


def plain(**options) -> Software:
    return Software("plain", slack=1.0, host=0.0, exposed=0.0, **options)


def stage(ahead: float, back: float) -> StageWork:
    """Seconds of forward and backward, as bytes on an A100."""
    per_second = 0.85 * 2.039e12
    return StageWork((Streaming(ahead * per_second, 0),), (Streaming(back * per_second, 0),))


def test_a_pipeline_by_hand() -> None:
    model = StepModel(A100, plain())
    work = StepWork((stage(1, 2),) * 4, microbatches=8, ranks=4)
    found = model(work)
    assert found.seconds == pytest.approx(3 * (8 + 3), rel=1e-3)
    assert found.items["bubble"] == pytest.approx(9, rel=1e-3)
    assert sum(found.items.values()) == pytest.approx(found.seconds)
    assert model(replace(work, microbatches=64)).seconds == pytest.approx(3 * 67, rel=1e-3), "goes on in a line"
    interleaved = model(replace(work, stages=(stage(0.5, 1),) * 8))
    assert interleaved.seconds == pytest.approx(3 * 8 + 4.5, rel=0.02), "half of the bubble"
    slow = model(replace(work, stages=(stage(1, 2), stage(2, 4), stage(1, 2), stage(1, 2))))
    assert 6 * 8 + 1 + 2 <= slow.seconds <= 6 * 8 + 9, "the slowest stage sets the pace"
    assert model(replace(work, schedule="zb2p")).seconds < model(replace(work, schedule="zb1p")).seconds < found.seconds


def test_sends_that_block_cost_time() -> None:
    work = StepWork((stage(1, 2),) * 2, microbatches=8, ranks=2, sent=0.8 * 300e9 * 0.1)
    assert StepModel(A100, plain(blocks_sends=True))(work).seconds > StepModel(A100, plain())(work).seconds + 0.5


def test_small_work_waits_for_the_host() -> None:
    work = StepWork((StageWork((Streaming(1e3, 100),), (Streaming(1e3, 200),)),))
    assert StepModel(A100, replace(plain(), host=1e-5))(work).seconds == pytest.approx(3e-3)
    assert StepModel(A100, plain())(work).seconds == pytest.approx(300 * A100.accelerator.launch, rel=0.01)


LLAMA = Decoder(
    **{"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    **{"gated": True, "bias": False, "dropout": False, "rotary": True, "tied": False},
)


def test_parameters() -> None:
    d = Degrees(length=8192, batch=16, microbatch=2)
    whole, experts = parameters_of(LLAMA, d, [32], 0)
    assert (whole, experts) == (pytest.approx(8.03e9, rel=0.002), 0), "Llama 3.1 8B"
    mixtral = replace(LLAMA, vocab=32000, experts=Experts(count=8, chosen=2, ffn=14336))
    assert sum(parameters_of(mixtral, d, [32], 0)) == pytest.approx(46.7e9, rel=0.01), "Mixtral 8x7B"
    assert active_parameters(mixtral) == pytest.approx(12.9e9, rel=0.02)
    halves = [parameters_of(LLAMA, replace(d, pipeline=2, tensor=2), [16, 16], rank)[0] for rank in (0, 1)]
    assert sum(halves) == pytest.approx(whole / 2)


def test_layers_of_stages() -> None:
    assert layers_of(32, 4) == (8,) * 4
    assert layers_of(126, 64) == (1, *[2] * 62, 1), "embedding and head count as layers"
    assert layers_of(61, 4) == (15, 15, 15, 16)
    assert layers_of(63, 4) == (16, 16, 16, 15), "the head counts as one"


def test_plans_cost_what_they_add() -> None:
    d = Degrees(length=8192, batch=16, microbatch=2, data=8, zero=3, attention="cudnn")
    run = lambda d, software=FSDP, cluster=H100: StepModel(cluster, software)(step_work(LLAMA, d, software)).seconds
    none, half, full = (run(replace(d, recompute=word)) for word in ("none", "operations", "full"))
    assert none < half < full < 1.45 * none
    assert run(replace(d, precision="fp8")) < none
    assert run(replace(d, attention="flash1")) > run(replace(d, attention="flash2")) > none
    assert run(d, cluster=Cluster.of("8xA100")) > 2 * none
    assert run(d, cluster=Cluster.of("2x4xH100@10Gbps")) > 2 * none, "gathered over a slow network"
    tensor = replace(d, tensor=8, data=1, microbatch=16, zero=0)
    assert run(tensor, MEGATRON) > run(replace(tensor, sequence=True), MEGATRON_CORE)


class Mixed(nn.Module):
    """Convolutions (one transposed), attention, norms, an embedding that nothing reads twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(100, 64)
        self.down, self.up = nn.Conv1d(64, 128, 3, stride=2, padding=1), nn.ConvTranspose1d(128, 64, 4, 2, 1)
        self.norm, self.mix, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(F.gelu(self.down(self.rows(ids).mT))).mT
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def metered(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> EventCost:
    with Meter([*model.parameters(), *model.buffers()], rounds="each", precision="bf16") as meter:
        meter.start(0)
        found = loss(model)
        meter.stop()
        meter.reach([found])
    return meter.costs[0]


def test_any_module_by_one_pass_on_meta() -> None:
    with torch.device("meta"):
        model, ids = Mixed().to(torch.bfloat16), torch.zeros(3, 32, dtype=torch.long)
    loss = lambda model: F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
    cost = metered(model, loss)
    counter = FlopCounterMode(display=False)
    with standing_for("cuda", half=True), counter:
        loss(model).backward()
    every = (*cost.forward, *cost.backward)
    assert sum(op.flops for op in every) == counter.get_total_flops(), "as torch counts them"
    assert [op.backward for op in every if isinstance(op, FusedAttention)] == [False, True]
    (lookup,) = metered(model.rows, lambda rows: rows(ids).sum()).forward
    rows, total = 2 * (3 * 32 * 64 * 2) + 3 * 32 * 8, 3 * 32 * 64 * 2 + 2
    assert lookup == Streaming(rows + total, 2), "the rows that it returns, not the table; and their sum"


def test_a_traced_llama_is_the_described_one() -> None:
    """Same products and attention, by shape and number."""
    hidden, heads, ffn, tokens = 256, 4, 512, 128

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
            self.wide, self.narrow = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            gate, value = self.wide(x).chunk(2, -1)
            return x + self.narrow(F.silu(gate) * value)

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(512, hidden), Layer(), Layer(), nn.Linear(hidden, 512, bias=False))
        ids = torch.zeros(1, tokens, dtype=torch.long)
    traced = metered(model, lambda model: F.cross_entropy(model(ids)[0], ids[0]))
    sizes = Decoder(layers=2, hidden=hidden, heads=heads, ffn=ffn, vocab=512, gated=True)
    described = step_work(sizes, Degrees(length=tokens, batch=1, microbatch=1, attention="torch"), FSDP).stages[0]
    for a, b in ((traced.forward, described.forward), (traced.backward, described.backward)):
        dear = [[_turned(op) for op in ops if not isinstance(op, Streaming)] for ops in (a, b)]
        assert Counter(merged(dear[0])) == Counter(merged(dear[1]))


def _turned(op: Operation) -> Operation:
    """A product or its transpose: the same work."""
    return replace(op, m=min(op.m, op.n), n=max(op.m, op.n)) if isinstance(op, MatrixProduct) else op


GIB = 2**30


def test_memory_by_hand() -> None:
    d = Degrees(length=8192, batch=16, microbatch=2, data=8, attention="flash2")
    plain, states = step_memory(LLAMA, d, MEGATRON).held, 8.03e9
    assert plain["weights"] == pytest.approx(2 * states, rel=0.002)
    assert plain["gradients"] == pytest.approx(4 * states, rel=0.002)
    assert plain["optimizer"] == pytest.approx(12 * states, rel=0.002)
    for zero, cut in ((1, ["optimizer"]), (2, ["optimizer", "gradients"]), (3, ["optimizer", "gradients", "weights"])):
        found = step_memory(LLAMA, replace(d, zero=zero), MEGATRON).held
        for kind in ("weights", "gradients", "optimizer"):
            assert found[kind] == pytest.approx(plain[kind] / (8 if kind in cut else 1)), (zero, kind)
    full = step_memory(LLAMA, replace(d, recompute="full"), MEGATRON)
    assert full.held["activations"] == pytest.approx(33 * 2 * 2 * 8192 * 4096), "what enters each of 32 layers, and one"
    assert full.allocated < step_memory(LLAMA, d, MEGATRON).allocated
    low, high = full.device
    assert full.allocated < full.reserved[0] < low < high


def test_described_memory_by_phase() -> None:
    found = DecoderPredictor(LLAMA, Cluster.of("8xA100"), 4096)(Plan.parse("shard=8 precision=bf16"), 8)
    assert found.phases["start"] < found.phases["evaluation"] < found.phases["steady"] == found.memory.allocated
    assert found.kinds["save"].keys() == {"weights", "gradients", "optimizer"}


def test_microbatches_that_a_pipeline_keeps() -> None:
    d = Degrees(length=1024, batch=64, microbatch=1, pipeline=4)
    assert [in_flight(d, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(d, batch=2), 0) == 2, "no more than there are"
    assert in_flight(replace(d, schedule="zb2p"), 0) == 7
    assert in_flight(replace(d, chunks=2), 0) == pytest.approx(4 * (1 + 3 / 8)), "p (1 + (p - 1) / vp)"


@pytest.mark.parametrize(
    ("layers", "degrees", "measured"),
    [  # SimuMax, docs/b200: Llama 3 70B with 12 layers, GiB allocated
        (12, {"tensor": 8, "sequence": True, "batch": 4}, 28.29),
        (12, {"tensor": 4, "sequence": True, "data": 2, "batch": 16}, 39.07),
        (12, {"pipeline": 2, "data": 4, "batch": 16}, 66.55),
        (12, {"context": 8, "length": 32768, "batch": 4, "ulysses": True}, 104.51),
    ],
)
def test_published_memory(layers: int, degrees: dict, measured: float) -> None:
    model = replace(LLAMA, layers=layers, hidden=8192, heads=64, ffn=28672)
    d = Degrees(**({"length": 4096, "microbatch": 1, "zero": 1, "attention": "cudnn"} | degrees))
    assert step_memory(model, d, MEGATRON_CORE).allocated / GIB == pytest.approx(measured, rel=0.03)


GPT = {"vocab": 51200, "tied": True}
MPT = {"bias": False, "dropout": False, "vocab": 50432, "tied": True}
OLD = {"precision": "fp16", "attention": "unfused", "reduce_bytes": 2}

PUBLISHED = [
    (  # Korthikanti et al. 2022 (arXiv:2205.05198), Table 5
        *("8xA100", MEGATRON, Decoder(layers=48, hidden=6144, heads=64, ffn=24576, **GPT)),
        Degrees(length=2048, batch=4, microbatch=4, tensor=8, recompute="full", **OLD),
        1.42,
    ),
    (
        *("64xA100", MEGATRON, Decoder(layers=96, hidden=12288, heads=96, ffn=49152, **GPT)),
        Degrees(
            **{"length": 2048, "batch": 64, "microbatch": 1, "tensor": 8, "pipeline": 8, "chunks": 3},
            **{"recompute": "attention", "sequence": True},
            **OLD,
        ),
        13.75,
    ),
    (  # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 5,762 tokens/s a device
        *("8xH100-SXM-500W", FSDP, LLAMA),
        Degrees(length=8192, batch=16, microbatch=2, data=8, zero=3, recompute="operations", logit_bytes=28.0),
        16 * 8192 / (8 * 5762),
    ),
    (  # llm-foundry, scripts/train/benchmarking/README.md: MPT-7b on 8 A100-40GB, 29,435 tokens/s
        *("8xA100-40GB", FSDP, Decoder(layers=32, hidden=4096, heads=32, ffn=16384, **MPT)),
        Degrees(
            **{"length": 2048, "batch": 384, "microbatch": 12, "data": 8, "zero": 3, "recompute": "full"},
            **{"attention": "flash1", "logit_bytes": 28.0, "reduce_bytes": 2},
        ),
        26.72,
    ),
    (  # SimuMax, docs/b200: Llama 3 70B with 12 layers, no collective beside computing
        *("8xB200", replace(MEGATRON_CORE, hides_gradients=False, hides_tensor=False)),
        replace(LLAMA, layers=12, hidden=8192, heads=64, ffn=28672),
        Degrees(
            **{"length": 4096, "batch": 16, "microbatch": 1, "data": 4, "pipeline": 2, "zero": 1},
            **{"attention": "cudnn", "logit_bytes": 12.0},
        ),
        0.843,
    ),
]


@pytest.mark.parametrize(("on", "software", "model", "degrees", "measured"), PUBLISHED)
def test_published_trainings(on: str, software: Software, model: Decoder, degrees: Degrees, measured: float) -> None:
    found = StepModel(Cluster.of(on), software)(step_work(model, degrees, software)).seconds
    assert found == pytest.approx(measured, rel=0.15)
