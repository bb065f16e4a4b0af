"""A decoder's sizes from a Hugging Face ``config.json``: nothing is downloaded, and transformers is not needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfit.errors import JobError
from meshfit.planner.decoder import Decoder, Experts, Latent

PLAIN = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "codegen")
"""Models whose feed-forward part has two matrices."""

LEARNT = ("gpt2", "gpt_neo", "opt", "bloom", "mpt")
"""Models without rotary positions."""

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}


def decoder_of(source: Path | str | Mapping[str, Any]) -> Decoder:
    """The sizes in a configuration, or in the file of one. ``JobError`` where they are not those of a decoder."""
    name, config = str(source), source
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise JobError(f"{path} cannot be read as a configuration", str(error)) from error
    else:
        name = str(source.get("model_type", "the configuration"))
    if not isinstance(config, Mapping):
        raise JobError(f"{name} is no configuration", "it holds something else than names and values")
    config = config.get("text_config", config)
    if config.get("is_encoder_decoder") or config.get("model_type") in ("bert", "roberta", "vit", "clip", "t5"):
        raise JobError(
            f"{name} describes a {config.get('model_type')}, and sizes are read of decoders alone",
            "meshfit plan train.py traces any model",
        )
    sizes = {ours: _first(config, theirs, name) for ours, theirs in _NAMES.items()}
    kind = str(config.get("model_type", ""))
    plain = kind in PLAIN and not config.get("gated")
    ffn = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim") or 4 * sizes["hidden"]
    dropout = any(config.get(word) for word in ("resid_pdrop", "hidden_dropout", "attention_dropout", "dropout"))
    return Decoder(
        **sizes,
        ffn=int(ffn),
        kv_heads=int(config.get("num_key_value_heads") or config.get("num_kv_heads") or sizes["heads"]),
        head_width=int(config.get("head_dim") or 0),
        gated=not plain,
        bias=bool(plain or config.get("attention_bias")),
        dropout=dropout,
        rotary=kind not in LEARNT,
        tied=bool(config.get("tie_word_embeddings", kind in LEARNT)),
        latent=_latent(config),
        experts=_experts(config, int(ffn)),
        predicted=int(config.get("num_nextn_predict_layers") or 0),
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return config[name]
    raise JobError(f"{where} does not say {names[0]}", f"a decoder's configuration has one of {', '.join(names)}")


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=config.get("q_lora_rank") or config["hidden_size"],
        rank=config["kv_lora_rank"],
        plain=config.get("qk_nope_head_dim", 128),
        rotated=config.get("qk_rope_head_dim", 64),
        value=config.get("v_head_dim", 128),
    )


def _experts(config: Mapping[str, Any], ffn: int) -> Experts | None:
    count = next((config[w] for w in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(w)), 0)
    if not count or count == 1:
        return None
    each = config.get("moe_intermediate_size") or ffn
    shared = (config.get("n_shared_experts") or 0) * each or config.get("shared_expert_intermediate_size") or 0
    return Experts(
        count=count,
        chosen=config.get("num_experts_per_tok") or 2,
        ffn=each,
        shared=shared,
        dense_layers=config.get("first_k_dense_replace") or 0,
    )
