"""What is particular to Hugging Face's models: what one that came to a rank by pickle lacks, because the library does
it where a model is built; the token that it takes for padding; the names that its tensors have in files."""

import re
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BASE = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


def complete(model: nn.Module) -> None:
    """Tell transformers which outputs its models can record (router logits, hidden states, attentions): it notes that
    by class when one is built, and records nothing, without a word, for classes that it has no note of."""
    registry = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            registry.setdefault(str(type(module)), module._can_record_outputs)


def padding_token(model: Any) -> int | None:
    """0 for a model that has none; None: not known, of a function that builds one."""
    if not isinstance(model, nn.Module):
        return None
    token = getattr(getattr(model, "config", None), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0


# Adapters, as peft adds them


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> nn.Module:
    """The model that adapters were added to; ``model`` itself if it has none."""
    return model.get_base_model() if has_adapters(model) else model


def is_adapter(model: Any, name: str) -> bool:
    """Whether a tensor came with the adapters."""
    if not has_adapters(model):
        return False
    prefix = getattr(model.base_model, "prefix", None) or "lora_"
    return prefix in name or name.startswith("prompt_encoder.")


def names_in_files(model: Any, name: str) -> list[str]:
    """What a tensor of ``model`` may be called in files: without adapters; and of an adapter, in a file of adapters."""
    if not has_adapters(model):
        return [name]
    if is_adapter(model, name):
        for adapter in model.peft_config:
            name = name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
        return [name]
    plain = name.removeprefix(BASE).replace(".base_layer.", ".").replace(".original_module.", ".")
    plain = re.sub(r"\.modules_to_save\.[^.]+\.", ".", plain)
    return [plain, BASE + plain] if ".modules_to_save." in name else [plain]


def adapters_in_files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """By the key that peft gives it in a file of adapters, the name of a tensor."""
    from peft import get_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    stand = {name: torch.empty(0) for name in names}
    by_id = {id(tensor): name for name, tensor in stand.items()}
    kept = get_peft_model_state_dict(
        model, state_dict=stand, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    return {key: by_id[id(tensor)] for key, tensor in kept.items()}


# Names, as transformers changes them on the way from a file


@dataclass
class Conversion:
    """A tensor that transformers makes of others, of all experts of a layer say."""

    model: Any
    transform: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Keys, and the pattern that each matches."""

    def of(self, name: str, read: Callable[[str], Tensor]) -> Tensor | None:
        """The tensor ``name``; None if that is not what comes out, alone."""
        transform = deepcopy(self.transform)
        for key, pattern in self.sources:
            transform.add_tensor(name, key, pattern, read(key))
        made = transform.convert(name, model=self.model, config=self.model.config)
        if made.keys() != {name}:
            return None
        (tensor,) = made[name] if isinstance(made[name], list) else [made[name]]
        return tensor


@dataclass
class FileNames:
    """What the keys of a file are in a model: by the name of a tensor, its key, or what makes it of several."""

    keys: dict[str, str] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    """Keys that the model's class says it has no use for."""


def file_names(model: nn.Module, names: Iterable[str], keys: Iterable[str]) -> FileNames:
    """``names``: of the model without adapters. Keys that no name fits stand for themselves."""
    base, known, found = base_of(model), set(names), FileNames()
    prefix = getattr(base, "base_model_prefix", None)
    if not isinstance(prefix, str) or not hasattr(base, "config"):
        found.keys = {key: key for key in keys}
        return found
    renamings, converters, rename, order = _transforms(base)
    if rename is None:  # of an older transformers
        rename = lambda key, *_: (_with_prefix(key, prefix, known), None)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    unused = [re.compile(each) for each in getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ()]
    there = dict.fromkeys(known, True)
    for key in sorted(keys, key=order):
        name, pattern = rename(key, renamings, converters, prefix, there)
        if pattern is not None:
            found.conversions.setdefault(name, Conversion(base, by_pattern[pattern])).sources.append((key, pattern))
        else:
            found.keys[name] = key
            if name not in known and any(each.search(name) for each in unused):
                found.ignored.add(key)
    return found


def in_files(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of ``model`` as ``from_pretrained`` expects it: itself, but for what transformers converts."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {name: tensor}
    if not isinstance(model, PreTrainedModel):
        return {name: tensor}
    made = revert_weight_conversion(model, {name: tensor})
    return {key: value.contiguous() for key, value in made.items()}


def ties_itself(model: Any, name: str) -> bool:
    """Whether transformers ties this tensor of ``model`` when it opens a file."""
    known = getattr(model, "all_tied_weights_keys", None)
    known = getattr(model, "_tied_weights_keys", None) if known is None else known
    return any(re.fullmatch(each, name) or each == name for each in known or ())


def _transforms(model: Any) -> tuple[list[Any], list[Any], Any, Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:
        return [], [], None, None
    every = get_model_conversion_mapping(model)
    renamings = [each for each in every if isinstance(each, WeightRenaming)]
    converters = [each for each in every if isinstance(each, WeightConverter)]
    return renamings, converters, rename_source_key, dot_natural_key


def _with_prefix(key: str, prefix: str, known: set[str]) -> str:
    key = re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{'weight' if m[1] == 'gamma' else 'bias'}", key)
    candidates = key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")
    return next((each for each in candidates if each in known), key)


def uses_flash(model: Any) -> bool:
    """Whether its attention is a flash-attention kernel, which takes no mask."""
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def give_lengths(model: nn.Module) -> Any:
    """Let ``model`` be called with the lengths of packed documents, as flash-attention kernels take them: by itself it
    looks at position_ids only where there is a single row. Returns what removes it."""

    def before(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        positions = given.get("position_ids")
        if positions is None or "cu_seq_lens_q" in given:
            return None
        starts = (positions.flatten() == 0).nonzero().flatten()
        edges = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
        longest = positions.shape[-1]
        lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}
        return args, {**given, **lengths}

    return model.register_forward_pre_hook(before, with_kwargs=True)
