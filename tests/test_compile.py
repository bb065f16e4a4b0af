"""Blocks compiled one by one, inside whatever else acts on the model. Traced by dynamo and taken apart by autograd as
in earnest; the kernels are torch's own (aot_eager), since generating others takes half a minute."""

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from benchmarks.zoo import ZOO, Case, labels_kept, next_tokens, seeded
from benchmarks.zoo_branches import BRANCHES
from benchmarks.zoo_experts import token_loss
from meshfit.axes.compile import pieces
from meshfit.axes.compile.axis import Blocks, compilable, own_numbers
from meshfit.axes.compile.parts import BlockOfParts, _kind
from meshfit.axes.compile.pieces import InPieces
from meshfit.axes.context.axis import plan_context
from meshfit.axes.context.piece import Piece
from meshfit.axes.context.span import SplitDim
from meshfit.axes.find import as_number
from meshfit.axes.forward import unwrap
from meshfit.axes.shard.units import traced
from meshfit.axes.spec import whole_output
from meshfit.axes.tensor.sliced import SlicedTensor
from meshfit.comm.group import RankGroup
from meshfit.exchange import allreduce
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.protocol import StepScalars
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.loss.objective import Objective
from tests.distributed import distributed
from tests.few import more


@pytest.fixture(scope="module", autouse=True)
def _the_template_has_the_compiler() -> None:
    """Which each rank would import, in a second, as soon as it compiles."""
    with warnings.catch_warnings(action="ignore"):
        from torch._inductor.compile_fx import compile_fx
    with LocalRanks(lambda *_: compile_fx.__name__, size=1, devices=Devices("cpu", None)) as ranks:
        assert ranks.results == ["compile_fx"]


@pytest.mark.filterwarnings("ignore")  # dynamo looks at what it warns of itself
@pytest.mark.parametrize("plan", ["compile=block", "recompute=full compile=block", "offload=parameters compile=block"])
def test_compiled_blocks_train_alike(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    plain = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward) or plain(forward))
    case = ZOO["tied-gpt"]
    verdict = meshfit.verify(
        case.build(),
        case.data(16),
        loss=case.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=8,
        steps=3,
        plan=plan,
    )
    assert verdict.equal
    assert len(compiled) >= 2  # at least the two blocks


def test_blocks_with_a_global_batchnorm_are_left_alone() -> None:
    case = ZOO["resnet10"]
    trace = traced(case.build(), Objective(case.loss), case.data(4), device="cpu")
    assert not isinstance(trace, Exception)
    norms = [path for path, kind in trace.kinds.items() if "BatchNorm" in kind]
    alone, spread = compilable(trace, ()), compilable(trace, norms)
    assert any(norm.startswith(path) for path in alone for norm in norms)
    assert not any(norm.startswith(path) for path in spread for norm in norms)


def test_of_a_block_that_talks_the_other_parts_are_compiled() -> None:
    case = ZOO["mixtral"]
    trace = traced(case.build(), Objective(case.loss), case.data(4), device="cpu")
    assert not isinstance(trace, Exception)
    experts = [path for path in trace.kinds if path.endswith(".mlp") or path.endswith(".block_sparse_moe")]
    assert experts
    found = compilable(trace, experts)
    assert any(path.endswith(".self_attn") for path in found)
    assert not any(path.startswith(each) or each.startswith(f"{path}.") for path in found for each in experts)


def test_under_context_what_treats_positions_alike_is_compiled() -> None:
    case = ZOO["llama"]
    objective, batch = Objective(case.loss), case.data(4)
    found = plan_context(case.build(), lambda model, some: as_number(objective(model, some)), batch, 2)
    assert [path for path in found.meeting if "layers" in path] == [f"model.layers.{i}.self_attn" for i in range(3)]
    trace = traced(case.build(), objective, batch, device="cpu")
    assert not isinstance(trace, Exception)
    parts = ("input_layernorm", "mlp", "post_attention_layernorm")
    inside = {path for path in compilable(trace, (), found.meeting) if path.startswith("model.layers.0.")}
    assert {path.removeprefix("model.layers.0.") for path in inside} >= set(parts)
    assert not any("self_attn" in path for path in inside)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["alike", "mean", "number", "weight"])
@distributed(world=2, timeout=240)
def test_positions_are_plain_tensors_to_a_compiled_block_that_treats_them_alike(how: str) -> None:
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
    block, span = OverRows(how), SplitDim.even(1, 7, 2, zigzag=True)
    ran, made = [], BlockOfParts(block, block.forward, [group])
    compiled = made._compiled
    made._compiled = lambda *args: ran.append(args) or compiled(*args)
    block.forward = made  # type: ignore[method-assign]
    whole = torch.arange(28.0).view(1, 7, 4)
    own = span.of(whole, group.rank).clone().requires_grad_()
    for _ in range(2):
        found = block(Piece(own, span, group))
        assert isinstance(found, Piece)
        torch.testing.assert_close(whole_output(found), OverRows(how)(whole))
    assert [type(x) for (x,) in ran] == [Tensor] * (2 if how in ("alike", "weight") else 0)


def aot_eager_adamw(params: Any) -> torch.optim.Optimizer:
    """Made in every rank before it compiles anything: from then on, with torch's own kernels."""
    if not isinstance(torch.compile, functools.partial):
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    return torch.optim.AdamW(params, lr=1e-3)


class MLPInCode(nn.Module):
    """A region that is compiled by itself: what is around it acts inside the block's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(96, 16), nn.Linear(16, 96)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.head(x)


OWN = {
    "mlp-in-code": Case(
        name="mlp-in-code", build=seeded(MLPInCode), data=next_tokens, loss=token_loss, weight_of=labels_kept
    )
}
SPREAD_PLANS = [
    ("mlp-in-code", "tensor=2 sequence=split compile=block"),
    more("tied-gpt", "pipeline=2 microbatches=2 compile=block"),
    ("tied-gpt", "pipeline=2 schedule=zbv microbatches=4 compile=block"),
    ("mixtral", "expert=2 compile=block"),
    more("tied-gpt", "shard=2 compile=block"),
    more("ensemble", "branch=2 compile=block"),
    more("llama", "tensor=2 compile=block"),
    ("llama", "tensor=2 sequence=split compile=block"),
    ("llama", "context=2 compile=block"),
    more("llama", "context=2 tensor=2 sequence=whole compile=block"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan"), SPREAD_PLANS)
def test_blocks_are_compiled_inside_other_axes(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)
    case = (ZOO | BRANCHES | OWN)[name]
    verdict = meshfit.verify(
        case.build(), case.data(16), loss=case.loss, optimizer=aot_eager_adamw, batch_size=8, steps=3, plan=plan
    )
    assert verdict.equal, str(verdict)


class OverRows(nn.Module):
    """What it does to a rank's rows: to each alike, by their mean, or by their number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "alike":
                return x * 3 + x
            case "mean":
                return x - x.mean(-2, keepdim=True)
            case "number":
                return x / x.shape[-2]
        return x * self.weight  # whose gradient is a sum over all rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["alike", "mean", "number", "weight"])
@distributed(world=2, timeout=240)
def test_rows_are_plain_tensors_to_a_compiled_block_that_treats_them_alike(how: str) -> None:
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
    block = OverRows(how)
    ran, made = [], BlockOfParts(block, block.forward, [group])
    compiled = made._compiled
    made._compiled = lambda *args: ran.append(args) or compiled(*args)
    block.forward = made  # type: ignore[method-assign]
    whole = torch.arange(24.0).view(1, 6, 4)
    own = whole[:, 3 * group.rank : 3 * group.rank + 3].clone().requires_grad_()
    for _ in range(2):
        found = block(SlicedTensor.rows(own, 6, group))
        torch.testing.assert_close(whole_output(found), OverRows(how)(whole))
    block(whole.clone().requires_grad_())  # all of it on every rank: regions inside know one way alone
    found = block(SlicedTensor.rows(own, 6, group))
    torch.testing.assert_close(whole_output(found), OverRows(how)(whole))
    assert [type(x) for (x,) in ran if x.shape == own.shape] == [Tensor] * (3 if how == "alike" else 0)
    assert how != "alike" or len(ran) == 3


def test_what_a_block_is_compiled_for_anew() -> None:
    x, block = torch.ones(2), nn.Linear(2, 2)
    plain = _kind(block, [x, 3, object()])
    assert plain == _kind(block, [x + 1, 3, object()])
    assert plain != _kind(block, [x, 4, object()])
    with torch.autocast("cpu", torch.bfloat16):
        assert plain != _kind(block, [x, 3, object()])


# A block that knows its number


class Numbered(nn.Module):
    """Scales by its number, and does something else in the first place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(8, 8)
        self.inner.number, self.heads, self.number = number, 2, number

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1)).flatten(-2) / float(self.number + 1)
        return x + self.inner(x * self.inner.number if self.number else x)


@pytest.mark.filterwarnings("ignore")
def test_blocks_that_know_their_number_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all places in which they do the same: here, the first and the others."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Numbered(i) for i in range(8))), torch.randn(3, 8)
    want = model(x)
    blocks = Blocks(model, tuple(str(i) for i in range(8)))
    blocks.compile()
    try:
        counters.clear()
        torch.testing.assert_close(model(x), want)
        assert counters["stats"]["unique_graphs"] == 2
    finally:
        blocks.undo()
        unwrap(model)
    assert own_numbers(model) == {"number"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_layers_of_transformers_are_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    case = ZOO[name]
    model = case.build()
    found = compilable(traced(model, Objective(case.loss), case.data(4), device="cpu"), ())  # type: ignore[arg-type]
    layers = [path for path in found if path.rpartition(".")[2].isdigit()]
    assert len(layers) > 1
    batch = case.data(4) | {"use_cache": False}
    want = model(**batch).loss
    blocks = Blocks(model, tuple(layers))
    blocks.compile()
    try:
        counters.clear()
        torch.testing.assert_close(model(**batch).loss, want)
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        blocks.undo()
        unwrap(model)


# In pieces, so that gradients are summed while backward runs


class Layer(nn.Module):
    """With something changed in place, a buffer that a forward writes, and a wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.up(x)
        hidden += 1
        hidden = F.relu(hidden, inplace=True)
        return x + self.down(hidden)


class Deep(nn.Module):
    """Embeddings tied to the last layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), targets.flatten())


LAYER_BYTES = 4 * (2 * 16 * 64 + 64 + 16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("copies", [False, True])
def test_graphs_are_cut_between_layers_and_not_before_the_loss(copies: bool) -> None:
    """``copies``: in place of the weights, as under precision=bf16-compute."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found: list[tuple[list[str], list[int | None]]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
        handed_on, starts = pieces._handed_on(graph, nodes), pieces.cuts(graph, LAYER_BYTES)
        found.append(([str(node.target) for node in starts], [handed_on[nodes.index(node)] for node in starts]))
        return graph

    tokens = torch.randint(200, (2, 8))
    model = Deep()
    for module in model.modules() if copies else ():
        module._parameters.update({name: p.clone() for name, p in module._parameters.items() if p is not None})  # type: ignore[misc]
    torch.compile(model.forward, backend=look)(tokens, tokens)
    ((starts, handed_on),) = found
    assert 3 <= len(starts) <= 5
    assert all("linear" in start or "iadd" in start for start in starts)  # where a layer begins
    assert handed_on == [4 * 2 * 8 * 16] * len(starts)  # one narrow activation


@pytest.mark.filterwarnings("ignore")
@distributed(world=2, timeout=240)
def test_sums_start_while_a_compiled_backward_runs() -> None:
    """And gradients are those of the plain model, through tied weights, writes in place and a second step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, alone = Deep(), Deep()
    alone.load_state_dict(model.state_dict())
    tokens, targets = torch.randint(200, (2, 2, 8)), torch.randint(200, (2, 2, 8))
    rank = dist.get_rank()
    allreduce.BUCKET_BYTES = allreduce.FIRST_BUCKET_BYTES = LAYER_BYTES
    exchange, happened = AllReduce(model.parameters(), dist.group.WORLD, torch.device("cpu")), []
    run = torch.compile(model.forward, backend=InPieces(LAYER_BYTES, backend="aot_eager"))
    plain = dist.all_reduce
    for step in range(2):
        alone.zero_grad()
        torch.stack([alone(tokens[r], targets[r]) for r in range(2)]).sum().backward()
        exchange.arm(StepScalars())
        loss = run(tokens[rank], targets[rank])
        dist.all_reduce = lambda tensor, **kwargs: happened.append("sum") or plain(tensor, **kwargs)
        hook = model.layers[0].get_parameter("up.weight").register_hook(lambda grad: happened.append("first layer"))
        loss.backward()
        exchange.finish()
        hook.remove()
        dist.all_reduce = plain
        for want, got in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
        assert model.layers[0].calls == step + 1
        exchange.clear()
    assert happened[: happened.index("first layer")].count("sum") >= 3


def test_a_graph_that_cannot_be_cut_is_compiled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    plain = pieces.compiled_at

    def fails_in_pieces(starts: Any, *args: Any) -> Any:
        tried.append(len(starts))
        if starts:
            raise NotImplementedError("a cut")
        return plain(starts, *args)

    monkeypatch.setattr(pieces, "compiled_at", fails_in_pieces)
    torch._dynamo.reset()
    model, tokens = Deep(), torch.randint(200, (2, 8))
    loss = torch.compile(model.forward, backend=InPieces(LAYER_BYTES, backend="aot_eager"))(tokens, tokens)
    torch.testing.assert_close(loss, model(tokens, tokens))
    assert tried[0] > 1
    assert tried[1:] == [0]
