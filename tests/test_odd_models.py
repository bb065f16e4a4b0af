"""Models of other libraries in small: what they do that a plan must take, or must refuse for its true reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshfit
from meshfit.axes.find import find
from meshfit.errors import PlanError
from meshfit.plan import Plan

WORDS, LENGTH, WIDTH = 12, 6, 8
IDS = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(0))


def loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), targets.flatten())


def fit(model: nn.Module, plan: str, data: Any = (IDS, IDS), **more: Any) -> meshfit.Result:
    given = {"loss": loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.2), "batch_size": 4, "steps": 2} | more
    return meshfit.fit(model, data, plan=plan, devices="cpu", progress=False, seed=0, **given)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def check(build: Callable[[], nn.Module], plan: str, **more: Any) -> meshfit.Result:
    """Weights are those of one device."""
    one, many = built(build), built(build)
    fit(one, "data=1", **more)
    result = fit(many, plan, **more)
    theirs = dict(one.named_parameters())
    for name, weight in many.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return result


def refused(build: Callable[[], nn.Module], plan: str, **more: Any) -> str:
    with pytest.raises(PlanError) as error:
        fit(built(build), plan, **more)
    return str(error.value)


PIPELINE = "pipeline=2 microbatches=2"


class Stack(nn.Module):
    """Layers in a row; what goes beside them is its subclasses'."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


# Layers over stages


class Routed(nn.Module):
    """Rows by a choice of the layer's own: how many there are of each depends on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for expert in range(2):
            mine = (rows[:, :2].argmax(-1) == expert).nonzero().squeeze(1)
            out = out.index_add(0, mine, rows[mine] @ self.weight[expert])
        return out.view(x.shape)


class ShapesAfterRouting(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).view(x.shape[0], x.shape[1], WIDTH)
        return self.head(x)


class Backwards(torch.autograd.Function):
    """Keeps no activations: a list of layers is its argument, and backward runs them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = x + layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            start = out = x.detach().requires_grad_()
            for layer in ctx.layers:
                out = out + layer(out)
        torch.autograd.backward(out, grads)  # into the parameters, which the function was not given
        return start.grad, None


class ListAsArgument(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = Backwards.apply(self.embed(ids), self.more)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class DecidesByBuffer(Stack):
    """By one that stays as it is, and that the last stage alone would hold."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x * 2 if self.scale.item() > 1 else -x


@pytest.mark.parametrize("build", [ShapesAfterRouting, ListAsArgument, DecidesByBuffer])
def test_stages_of_odd_models(build: Callable[[], nn.Module]) -> None:
    check(build, PIPELINE)


class TakesRows(Stack):
    """As many as values say."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        rows = (ids > 2 if self.by == "inputs" else x[..., 0] > 0).flatten().nonzero().squeeze(1)
        return self.head(x).flatten(0, 1).index_add(0, rows, self.head(x.flatten(0, 1)[rows])).view(*ids.shape, WORDS)


@pytest.mark.parametrize(("by", "says"), [("inputs", "values of its inputs"), ("activations", "its own activations")])
def test_the_reason_names_the_values_that_decide(by: str, says: str) -> None:
    said = refused(lambda: TakesRows(by), PIPELINE)
    assert "how many rows it takes depends on" in said
    assert says in said
    assert "nonzero in" in said


# Experts


class Listed(Stack):
    """Experts in a list, of which each row takes one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        experts: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        extra = {"none": [None], "twice": experts[:1] * 2, "plain": []}[kind]
        self.experts = nn.ModuleList(experts) if kind != "twice" else nn.ModuleList(extra)
        self.others = nn.ModuleList([nn.Identity(), *extra])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        weights = self.router(rows).softmax(-1)
        best = weights.argmax(-1)
        for i, expert in enumerate(self.experts):
            mine = (best == i).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(rows[mine]) * weights[mine, i, None])
        return self.head(x + out.view(x.shape))


class Bank(Stack):
    """Experts as slices of one parameter, all multiplied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows = x.flatten(0, 1)
        every = torch.bmm(rows.expand(4, *rows.shape), self.bank)
        out = (every * self.router(rows).softmax(-1).T[..., None]).sum(0)
        return self.head(out.view(x.shape))


def test_a_list_beside_the_experts_may_hold_none() -> None:
    check(lambda: Listed("none"), "expert=2")


def test_one_module_twice_in_a_list_is_said() -> None:
    assert "experts: it holds one module several times" in refused(lambda: Listed("twice"), "expert=2")


def test_experts_of_one_batched_product_are_said() -> None:
    said = refused(Bank, "expert=2")
    assert "bank: bmm takes all of its 4 slices at once" in said
    assert "data=2 works" in said


# Embeddings that make their own indices


class Positions(nn.Embedding):
    """Called with a shape, as those of BART are."""

    def forward(self, shape: Any) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(shape[1]))


class WithPositions(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions(32, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(ids.shape)
        return self.head(x + self.down(F.gelu(self.up(x))))


def test_tensor_takes_an_embedding_that_is_given_a_shape() -> None:
    check(WithPositions, "tensor=2")


# Caches


@pytest.mark.parametrize("asked", [None, True])
def test_a_block_computed_again_does_not_fill_its_cache_twice(asked: bool | None) -> None:
    """Of an encoder and a decoder; the cache is the model's default, or what the step asks for."""
    hf = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 2, "vocab_size": WORDS}
    config = hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    step = lambda model, batch: model(input_ids=batch[0], labels=batch[1], use_cache=asked).loss
    result = check(lambda: hf.T5ForConditionalGeneration(config), "recompute=full", loss=None, step=step)
    assert result.model.config.use_cache  # type: ignore[union-attr]  # on again


# Recurrences


class Recurrent(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, 4 * WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8 * WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def mamba(second: bool) -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
    if not second:
        return hf.MambaForCausalLM(hf.MambaConfig(**sizes))
    return hf.Mamba2ForCausalLM(hf.Mamba2Config(**sizes, num_heads=2, head_dim=8, n_groups=1, chunk_size=4))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (Recurrent, "rnn is a GRU"),
        (lambda: mamba(False), f"mixer loops over {LENGTH} positions, and 1 more like it"),
        (lambda: mamba(True), "mixer takes cumsum over positions, and 1 more like it"),
    ],
    ids=["layer", "loop", "scan"],
)
def test_a_recurrence_is_said_to_be_one(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(PlanError) as error:
        find(Plan(context=2), built(build), stepped, (IDS, IDS), "cpu")
    said = str(error.value)
    assert "carries a state from position to position" in said
    assert says in said
    assert "data=2 works" in said


def stepped(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return loss(getattr(out, "logits", out), batch[1])


# Copies


class Computed(WithPositions):
    """Weights that a hook computes, as torch.nn.utils.weight_norm leaves them, and a tensor kept from the last step."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(self.down)
        self.last = self.embed.weight.sum()

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        self.last = out.mean()
        return out


@pytest.mark.parametrize("plan", ["tensor=2", "context=2", "server=1 data=1 tensor=2"])
def test_a_model_with_computed_tensors_can_be_copied(plan: str) -> None:
    one: Any = built(Computed)
    many: Any = built(Computed)
    fit(one, "data=1")
    fit(many, plan)
    torch.testing.assert_close(many.head.weight, one.head.weight, rtol=1e-4, atol=1e-6)


class Spectral(Stack):
    """Complex weights, over frequencies of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) @ self.weight, n=x.shape[1], dim=1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("plan", ["context=2", PIPELINE])
def test_complex_weights(plan: str) -> None:
    check(Spectral, plan)


class Taking(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).tanh()


class Handing(nn.Module):
    """Hands a parameter of its own to a submodule, as generated code does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH)), Taking()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.weight)


def handing() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Handing(), Handing(), nn.Linear(WIDTH, WORDS))


@pytest.mark.parametrize("plan", ["shard=2", "shard=2 pipeline=2 microbatches=2"])
def test_a_parameter_handed_to_a_submodule_is_whole(plan: str) -> None:
    check(handing, plan)


class Caching(Stack):
    """Makes a table of positions in its first forward, and keeps it as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        if self.table is None or len(self.table) < ids.shape[1]:
            self.register_buffer("table", torch.arange(ids.shape[1]).float().view(-1, 1) / LENGTH, persistent=False)
        x = self.embed(ids) * self.scale + self.table[: ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("plan", ["data=2", "shard=2 microbatches=2"])
def test_a_buffer_that_a_forward_makes_as_a_cache_is_no_statistic(plan: str) -> None:
    check(Caching, plan)


class Seen(Stack):
    """Layers that are known by two names, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.also = nn.ModuleList(self.layers)


def test_a_buffer_with_two_names_comes_back_from_its_stage() -> None:
    check(Seen, PIPELINE)


class Transformed(nn.Module):
    """Computes in a transform of torch.func."""

    def __init__(self, by: Callable[[Any], Any]):
        super().__init__()
        self.net, self.by = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), by

    def forward(self, x: Tensor) -> Tensor:
        return self.by(self.net)(x)


@pytest.mark.parametrize("plan", ["tensor=2", "shard=2", "pipeline=2"])
def test_a_gradient_by_torch_func_is_refused_as_such(plan: str) -> None:
    model = Transformed(lambda net: torch.func.grad(lambda x: net(x).square().sum()))
    with pytest.raises(PlanError, match=r"a transform of torch\.func") as refused:
        find(Plan.parse(plan), model, lambda model, x: model(x).square().mean(), torch.randn(16, 8))
    assert "data= takes the model as it is" in str(refused.value)


def test_vmap_under_tensor_is_refused_as_such() -> None:
    with pytest.raises(PlanError, match=r"a transform of torch\.func"):
        find(
            Plan.parse("tensor=2"), Transformed(torch.func.vmap), lambda m, x: m(x).square().mean(), torch.randn(16, 8)
        )
