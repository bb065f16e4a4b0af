"""``recompute=loss``: the training of one device, and all logits are never there at once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import memory
from benchmarks.collectives import Collectives
from benchmarks.zoo import ZOO, seeded, take, transformers
from meshfit.anatomy.record import TraceError
from meshfit.axes import refuse
from meshfit.axes.forward import wrap
from meshfit.axes.head_loss import chunks
from meshfit.axes.head_loss.logits import Head, PendingLogits
from meshfit.axes.shard.units import traced
from meshfit.errors import PlanError
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.plan_cost import cost
from tests.distributed import distributed
from tests.few import few, more
from tests.ranked import ADAMW, SGD, assert_alike, built, trained

CLASSES, WIDTH, TOKENS = 97, 16, 33


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few tokens."""
    monkeypatch.setattr(chunks, "LEAST", 64)
    monkeypatch.setattr(chunks, "INPUTS", 0.5)


def heads(dtype: torch.dtype, *, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """Two alike; the second returns logits that wait for their loss."""
    plain = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    waiting = copy.deepcopy(plain)
    wrap(waiting, Head("head", waiting).around)
    return plain, waiting


def gradients(head: nn.Linear, loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, TOKENS, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(CLASSES, (4, TOKENS), generator=generator)
    target[0, :5] = -100
    made = loss(head(x), target)
    (3 * made).backward()
    assert x.grad is not None
    return [made.detach(), x.grad, *(p.grad for p in head.parameters() if p.grad is not None)]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, t: F.cross_entropy(x.view(-1, CLASSES), t.view(-1)),
    "sum": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), reduction="sum"),
    "each": lambda x, t: (F.cross_entropy(x.transpose(1, 2), t, reduction="none") * torch.arange(TOKENS)).mean(),
    "smooth": lambda x, t: F.cross_entropy(x.view(-1, CLASSES), t.view(-1), label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(x.mT, t, weight=torch.arange(CLASSES).to(x.dtype), label_smoothing=0.2),
    "ignored": lambda x, t: nn.CrossEntropyLoss(ignore_index=7)(x.view(-1, CLASSES), t.view(-1).clamp(min=7)),
    "shifted": lambda x, t: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, CLASSES), t[..., 1:].reshape(-1)),
    "capped": lambda x, t: F.cross_entropy((torch.tanh(x.float() / 3.0) * 3.0).view(-1, CLASSES), t.view(-1)),
    "read": lambda x, t: F.cross_entropy(x.view(-1, CLASSES), t.view(-1)) + x.logsumexp(-1).square().mean(),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(name: str, bias: bool) -> None:
    plain, waiting = heads(torch.float64, bias=bias)
    want, got = (gradients(head, LOSSES[name], torch.float64) for head in (plain, waiting))
    limit = 1e-5 if name == "capped" else 1e-10  # capped in fp32
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mean", "each", "smooth"])
def test_rounded_products(name: str, dtype: torch.dtype) -> None:
    """As far from the truth as all logits at once, not farther."""

    def rounded(head: nn.Linear) -> list[Tensor]:
        with torch.autocast("cpu", dtype):
            return gradients(head, LOSSES[name], torch.float32)

    plain, waiting = heads(torch.float32, bias=True)
    true = copy.deepcopy(plain).double()
    want, got, exact = rounded(plain), rounded(waiting), gradients(true, LOSSES[name], torch.float64)
    for there, here, truth in zip(want, got, exact, strict=True):
        assert here.dtype == there.dtype
        limit = 1.2 * (there - truth).norm() + torch.finfo(dtype).eps / 8 * truth.norm()
        assert (here - truth).norm() <= limit


def test_what_is_asked_of_logits() -> None:
    plain, waiting = heads(torch.float32, bias=True)
    x = torch.randn(2, 3, WIDTH)
    want, got = plain(x), waiting(x)
    assert isinstance(got, PendingLogits)
    assert got.shape == want.shape
    assert (got.dtype, got.half().dtype, got.requires_grad) == (want.dtype, torch.float16, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert waiting(x).dtype == torch.bfloat16
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(got[0, 1:].exp().sum(), want[0, 1:].exp().sum())
    with torch.no_grad():
        assert type(waiting(x)) is Tensor
    assert type(waiting.eval()(x)) is Tensor


def test_a_second_backward_is_refused() -> None:
    """Gradients are scaled where they are: a second time they would be wrong."""
    _, head = heads(torch.float32, bias=True)
    loss = LOSSES["mean"](head(torch.randn(4, TOKENS, WIDTH)), torch.zeros(4, TOKENS, dtype=torch.long))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@pytest.mark.usefixtures("small")
def test_two_losses_on_their_way() -> None:
    """As in a pipeline: the second keeps no gradient of the weight, and is computed again."""
    plain, waiting = heads(torch.float64, bias=True)
    for head in (plain, waiting):
        xs = [
            torch.randn(4, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            for i in (1, 2)
        ]
        losses = [LOSSES["mean"](head(x), torch.full((4, TOKENS), 5)) for x in xs]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(waiting.weight.grad, plain.weight.grad, atol=1e-12, rtol=1e-10)


# Models


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that anything makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and not x.is_meta:
                self.elements = max(self.elements, x.numel())
        return made


WORDS, LENGTH = 4096, 64


def ids(n: int) -> Tensor:
    return torch.randint(WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(1))


@seeded
def gpt2() -> nn.Module:
    hf = transformers()
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2))


@seeded
def llama() -> nn.Module:
    hf = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, **sizes, use_cache=False))


@seeded
def gemma() -> nn.Module:
    hf = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 5.0}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(vocab_size=WORDS, **sizes, **heads, use_cache=False))


@seeded
def t5() -> nn.Module:
    hf = transformers()
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **sizes, decoder_start_token_id=0))


@seeded
def bert() -> nn.Module:
    hf = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, **sizes))


class Own(nn.Module):
    """Tied, and a loss that is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.token(input_ids))))


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


MODELS = {"gpt2": gpt2, "llama": llama, "gemma": gemma, "t5": t5, "bert": bert, "own": seeded(Own)}


@pytest.mark.parametrize("name", few(MODELS, "gpt2", "gemma", "t5", "own"))
def test_all_logits_are_never_there(name: str) -> None:
    """And the training is the same."""
    loss = {"loss": next_token} if name == "own" else {"loss": None}
    data = {"input_ids": ids(16), "labels": ids(16).flip(1)}
    asked = {"data": data, **loss, "optimizer": ADAMW, "batch_size": 8, "steps": 2}
    found = []
    for plan in ("data=1", "data=1 recompute=loss"):
        with Largest() as largest:
            run, losses, norms = trained(MODELS[name](), plan, **asked)
        found.append((losses, norms, largest.elements))
        run.close()
    (*want, whole), (*got, chunked) = found
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert whole >= 8 * (LENGTH - 1) * WORDS
    assert chunked < whole / 3, (chunked, whole)


# Plans

PLANS = {
    "data=2": "llama",
    "data=2 microbatches=2": "tied-gpt",
    "shard=2": "tied-gpt",
    "shard=2 zero=2 microbatches=2": "t5",
    "tensor=2": "tied-gpt",
    "tensor=2 sequence=split": "llama",
    "pipeline=2 microbatches=2": "tied-gpt",
    "pipeline=2 microbatches=4 schedule=gpipe": "llama",
    "context=2": "tied-gpt",
    "context=2 tensor=2 sequence=split": "tied-gpt",
    "shard=2 tensor=2": "llama",
    "pipeline=2 tensor=2 microbatches=2": "tied-gpt",
    "pipeline=2 context=2 microbatches=2": "tied-gpt",
    "pipeline=2 schedule=zbv microbatches=4": "tied-gpt",
    "data=2 offload=optimizer": "t5",
    "data=2 compile=block": "tied-gpt",
}
OFTEN = {"data=2 microbatches=2", "shard=2", "tensor=2 sequence=split", "pipeline=2 microbatches=2", "context=2"}


@pytest.mark.parametrize(
    ("plan", "name"), [(p, n) if p in OFTEN else more(p, n) for p, n in PLANS.items()], ids=lambda each: each
)
def test_trains_like_one_device(plan: str, name: str) -> None:
    """Several chunks a microbatch."""

    @distributed(world=Plan.parse(plan).devices, timeout=180)
    def run(plan: str, name: str) -> None:
        chunks.LEAST, chunks.INPUTS = 64, 0.2
        calls = []
        real = chunks.Chunks.losses
        chunks.Chunks.losses = lambda *args: calls.append(0) or real(*args)  # type: ignore[method-assign]
        case = ZOO[name]
        try:
            assert_alike(case.build, f"{plan} recompute=full+loss", data=case.data(18), loss=case.loss, clip=1.0)
        finally:
            chunks.Chunks.losses = real  # type: ignore[method-assign]
        total = torch.tensor(len(calls))
        dist.all_reduce(total)
        assert total > 6

    run(plan=plan, name=name)


class SameSizes(nn.Module):
    """Its head has the size of other layers, so ``tensor`` takes it for one of them: cut by rows, and summed; or, with
    ``alone``, by columns, and gathered."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.token, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32) if alone else nn.Identity()
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token(input_ids)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


@pytest.mark.parametrize("alone", [True, False])
@distributed(world=2)
def test_a_head_that_is_cut_like_another_layer(alone: bool) -> None:
    tokens = torch.randint(64, (18, 12), generator=torch.Generator().manual_seed(1))
    loss = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    data = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    assert_alike(seeded(lambda: SameSizes(alone)), "tensor=2 recompute=loss", data=data, loss=loss, clip=1.0)


@pytest.mark.parametrize("plan", ["data=1 recompute=loss", more("data=1 recompute=full+loss")])
def test_keeps_what_it_says(plan: str) -> None:
    """To the byte, when the forward is over."""
    case, asked = memory.CASES[0], Plan.parse(plan)
    want = cost(asked, *memory.trace_of(case))
    got = memory.watch(memory.job_of(case, asked), World(0, 1, torch.device("cpu")))
    assert got.held["activations"] == pytest.approx(want.held["activations"], rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("data=2", "tied-gpt"),
        more("shard=2 offload=activations", "llama"),
        more("tensor=2 sequence=split", "tied-gpt"),
        more("pipeline=2 microbatches=2", "tied-gpt"),
        more("context=2", "tied-gpt"),
        more("data=2 microbatches=2 precision=fp16", "tied-gpt"),
    ],
)
def test_half_precision(plan: str, name: str) -> None:
    """As near to one device as without."""

    @distributed(world=2, timeout=180)
    def run(plan: str, name: str) -> None:
        chunks.LEAST, chunks.INPUTS = 64, 0.2
        case, plan = ZOO[name], plan if "precision" in plan else f"{plan} precision=bf16"
        asked = {"data": case.data(18), "loss": case.loss, "optimizer": SGD, "clip": 1.0}
        alone = f"data=1 precision={Plan.parse(plan).precision}"
        series = [trained(built(case.build), each, **asked)[1] for each in (alone, f"{plan} recompute=full+loss")]
        torch.testing.assert_close(*series, atol=1e-3, rtol=0)

    run(plan=plan, name=name)


def test_collectives_are_those_foretold() -> None:
    """Classes over two ranks: a sum and a maximum for each chunk, of as many bytes as at once."""

    @distributed(world=2, timeout=180)
    def run() -> None:
        chunks.LEAST, chunks.INPUTS = 64, 0.2
        case, counted, foretold = ZOO["tied-gpt"], [], []
        for plan in ("tensor=2", "tensor=2 recompute=loss"):
            with Collectives() as seen:
                run, *_ = trained(built(case.build), plan, data=case.data(16), loss=case.loss, steps=2)
            counted.append((seen.calls["all_reduce"], seen.moved["all_reduce"]))
            content = take(case.data(16), torch.arange(8))
            trace = traced(case.build(), run.job.objective, content, device="cpu")
            assert not isinstance(trace, TraceError)
            said = cost(run.plan, trace, torch.optim.AdamW(case.build().parameters()), found=run.placed.found)
            foretold.append((2 * said.calls["all_reduce"], 2 * said.moved["all_reduce"]))
        more, bytes_more = (b - a for a, b in zip(*counted, strict=True))
        assert (more, bytes_more) == tuple(b - a for a, b in zip(*foretold, strict=True))
        assert more > 8
        assert bytes_more == 0

    run()


# What cannot be


def refusal(model: nn.Module, **asked: Any) -> str:
    how = {"data": {"input_ids": ids(4), "labels": ids(4)}, "optimizer": ADAMW, "batch_size": 4, "steps": 1}
    with pytest.raises(PlanError) as caught:
        trained(model, "data=1 recompute=loss", **{**how, **asked})
    assert "data=1 works" in str(caught.value)
    return str(caught.value)


def test_refusals_say_what_was_looked_for() -> None:
    def with_metric(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["input_ids"])
        right = (logits.argmax(-1) == batch["labels"]).float().mean()
        return next_token(logits, batch["labels"]), {"right": right}

    def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()

    def normed(logits: Tensor, labels: Tensor) -> Tensor:
        return next_token(F.layer_norm(logits, (WORDS,)), labels)

    assert "logits are also read by argmax" in refusal(Own(), step=with_metric)
    assert "no cross entropy is called in a step" in refusal(Own(), loss=by_hand)
    assert "stands layer_norm" in refusal(Own(), loss=normed)
    twice = Own()
    assert "is called 2 times" in refusal(
        twice, step=lambda model, batch: next_token(model(batch["input_ids"]), batch["labels"])
        + next_token(model(batch["labels"]), batch["input_ids"])
    )  # fmt: skip
    assert "looked for: an nn.Linear" in refusal(Own(), loss=by_hand)


def test_plans() -> None:
    assert str(Plan.parse("recompute=loss+full")) == "data=1 recompute=full+loss"
    with pytest.raises(PlanError, match="recompute=loss takes the logits in chunks"):
        refuse.check(Plan.parse("recompute=loss compile=whole"), Own())
