"""What a model that came to a rank by pickle lacks, because libraries do it where a model is built."""

import sys

from torch import nn


def complete(model: nn.Module) -> None:
    """Tell transformers which outputs its models can record (router logits, hidden states, attentions): it notes that
    by class when one is built, and records nothing, without a word, for classes that it has no note of."""
    registry = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            registry.setdefault(str(type(module)), module._can_record_outputs)
