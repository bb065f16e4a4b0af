"""Masks that a model derives from what it is given (packed documents, padding, windows, prefixes): every plan trains as
plain PyTorch does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import meshfit
from meshfit.axes.context.attend import attention
from meshfit.axes.context.axis import plan_context
from meshfit.axes.context.piece import RULES
from meshfit.axes.prove import Refused

VOCABULARY, LENGTH, ROWS = 48, 12, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
IDS = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def restarting(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Positions of rows of two documents; of the first rows, of one."""
    first = [length] * (rows // 2) + [3 + row for row in range(rows - rows // 2)]
    return torch.stack([torch.cat([torch.arange(n), torch.arange(length - n)]) for n in first])


def padded(left: bool) -> Tensor:
    """1 for tokens; some rows have fewer than others, on one side."""
    lengths = LENGTH - torch.tensor([0, 0, 0, 0, 5, 2, 7, 1])
    there = torch.arange(LENGTH) < lengths[:, None]
    return (there.flip(1) if left else there).long()


def labelled(mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}


PACKED = {"input_ids": IDS, "position_ids": restarting(), "labels": IDS}
PADDED, PADDED_LEFT = labelled(padded(False)), labelled(padded(True))
LLAMA = lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def trained(model: Any, content: dict[str, Tensor], steps: int = 2) -> Any:
    """By plain PyTorch: batches of four rows."""
    model.config.use_cache = False  # as transformers' Trainer has it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        model(**{key: value[4 * step : 4 * step + 4] for key, value in content.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check(build: Callable[[], nn.Module], content: dict[str, Tensor], plan: str) -> None:
    torch.manual_seed(0)
    want = build().train().double()
    got = build().train()
    got.load_state_dict(want.state_dict())
    got.double()
    given: dict[str, Any] = {"batch_size": 4, "steps": 2, "shuffle": False, "progress": False, "devices": "cpu"}
    meshfit.fit(got, content, plan=plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), **given)
    theirs = dict(trained(want, content).named_parameters())
    for name, weight in got.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


PLANS = [
    "data=1",
    "data=2",
    "shard=2",
    "tensor=2",
    "context=2",
    "pipeline=2 microbatches=2",
    "server=1 data=2",
    "recompute=full",
]


@pytest.mark.parametrize("plan", PLANS)
def test_packed_rows_are_kept_apart_under_every_plan(plan: str) -> None:
    """The first batch has no packed row. With a cache, which is on by default, transformers would not look."""
    check(LLAMA, PACKED, plan)


class PrefixLM(nn.Module):
    """Attention over a prefix both ways and causal after it, without padding: both masks come from what it is given,
    scores get a bias by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.PretrainedConfig()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.bias = nn.Embedding(2 * LENGTH, 2)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, token_type_ids: Tensor) -> Any:
        n, length = input_ids.shape
        q, k, v = self.qkv(self.embed(input_ids)).view(n, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        there = input_ids != 0
        places = torch.arange(length)
        seen = (places[:, None] >= places) | (token_type_ids[:, None, :] == 0)
        mask = (seen & there[:, None, :])[:, None] | torch.eye(length, dtype=torch.bool)
        bias = self.bias(places[:, None] - places + LENGTH).permute(2, 0, 1)
        bias = bias.masked_fill(~mask, -1e9) if not bool(there.all()) else bias.masked_fill(~seen[:, None], -1e9)
        x = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        logits = self.out(x.transpose(1, 2).reshape(n, length, 16))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)
        return hf.modeling_outputs.CausalLMOutput(loss=loss)  # type: ignore[arg-type]


T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
TYPES = (torch.arange(LENGTH) >= torch.tensor([4, 2, 0, 6, 3, 12, 5, 1])[:, None]).long()
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "window and padding": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=3)), PADDED),
    "padding on the left": (LLAMA, PADDED_LEFT),
    "packed window": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, sliding_window=3)), PACKED),
    "distances and padding": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        PADDED,
    ),
    "prefix": (PrefixLM, {"input_ids": IDS * padded(False), "labels": IDS * padded(False), "token_type_ids": TYPES}),
}


@pytest.mark.parametrize("name", MODELS)
def test_masks_of_the_data_are_exact_where_sequences_are_cut(name: str) -> None:
    check(*MODELS[name], "context=2")


# A plan that loses a mask is refused, whichever samples show it


def loses_the_mask(func: Any, q: Any, k: Any, v: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
    return attention(func, q, k, v, attn_mask=None, **{**kwargs, "is_causal": True})


@pytest.mark.parametrize(
    "content",
    [
        {key: value[:4] for key, value in PACKED.items()},  # no restart in these
        {key: value[:4] for key, value in PADDED.items()},  # no padding
        {key: value[[0, 1, 2, 3, 7]] for key, value in PADDED.items()},  # in the last of them
        {**PACKED, "position_ids": restarting(ROWS)},
    ],
    ids=["not yet packed", "not yet padded", "the last is padded", "packed"],
)
def test_a_plan_that_loses_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch, content: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    model = LLAMA()
    step = lambda twin, batch: twin(**batch).loss
    plan_context(model, step, content, 2)
    monkeypatch.setitem(RULES, "scaled_dot_product_attention", loses_the_mask)
    with pytest.raises(Refused, match=r"the loss is"):
        plan_context(model, step, content, 2)
