"""Mixtures of experts, for the expert axis: Hugging Face's, which hold experts as slices of one parameter, and some
whose experts are modules in a list."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import (
    LENGTH,
    VOCABULARY,
    Case,
    labels_kept,
    labels_kept_shifted,
    next_tokens,
    seeded,
    text,
    transformers,
    unpadded_text,
)

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


@seeded
def qwen_moe() -> nn.Module:
    """With an expert that sees every token, beside those that are chosen."""
    hf = transformers()
    return hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **SMALL,
            intermediate_size=48,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
        )
    )


@seeded
def olmoe() -> nn.Module:
    hf = transformers()
    return hf.OlmoeForCausalLM(
        hf.OlmoeConfig(**SMALL, intermediate_size=24, num_experts=8, num_experts_per_tok=3, pad_token_id=None)
    )


@seeded
def balanced_mixtral() -> nn.Module:
    """With an auxiliary loss that is no mean over samples."""
    hf = transformers()
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **SMALL,
            intermediate_size=48,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
    )


@seeded
def gpt_oss() -> nn.Module:
    """Experts with biases, laid out the other way around."""
    hf = transformers()
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **SMALL,
            head_dim=8,
            intermediate_size=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            attn_implementation="eager",
        )
    )


@seeded
def deepseek() -> nn.Module:
    """Choices limited to groups of experts; the first layer has none."""
    hf = transformers()
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **(SMALL | {"num_key_value_heads": 4}),
            intermediate_size=48,
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


class Chosen(nn.Module):
    """Each token goes to two of four experts, each a module."""

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):  # one without a token gets no gradient
                made = expert(rows[token]) * weights[token, place, None]
                out = out.index_add(0, token, made.to(out.dtype))
        return out.view_as(x)


class Mixed(nn.Module):
    """Every expert sees every token."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * self.gate(x).softmax(-1)[..., None, :]).sum(-1)


class ListGPT(nn.Module):
    """A small language model, its first layer with a router, its second without."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList((Chosen(width), Mixed(width)))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place[: ids.shape[1]]
        for layer, mix, norm in zip(self.layers, self.mix, self.norms, strict=True):
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            x = x + mix(past)
            x = x + layer(norm(x))
        return self.head(x)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


CASES = (
    Case(name="qwen-moe", build=qwen_moe, data=text, weight_of=labels_kept_shifted),
    Case(name="olmoe", build=olmoe, data=unpadded_text, weight_of=labels_kept_shifted),
    Case(name="mixtral-balanced", build=balanced_mixtral, data=text, weight_of=labels_kept_shifted),
    Case(name="gpt-oss", build=gpt_oss, data=unpadded_text, weight_of=labels_kept_shifted),
    Case(name="deepseek", build=deepseek, data=text, weight_of=labels_kept_shifted),
    Case(name="expert-list", build=seeded(ListGPT), data=next_tokens, loss=token_loss, weight_of=labels_kept),
)
