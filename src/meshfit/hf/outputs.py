"""What models return and labels, as Hugging Face's Trainer hands them on: NumPy arrays, padded with -100."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from meshfit.data.tree import PerSample, Ragged

PADDING = -100
"""As in the original, of labels and of predictions."""


def ignored(model: nn.Module) -> tuple[str, ...]:
    """What a model returns beside its predictions: a cache, say."""
    named = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None)
    return ("loss", *(named or ("past_key_values",)))


def predictions_of(outputs: Any, left_out: Sequence[str]) -> Any:
    """One tensor, or a tuple of them."""
    if isinstance(outputs, Mapping):
        values = tuple(value for name, value in outputs.items() if name not in left_out)
        return values[0] if len(values) == 1 else values
    return outputs


def arrays(outputs: Any) -> Any:
    if isinstance(outputs, PerSample | Ragged):
        return padded([arrays(each) for each in outputs])
    if isinstance(outputs, tuple | list):
        return type(outputs)(arrays(each) for each in outputs)
    return outputs.detach().float().cpu().numpy() if isinstance(outputs, torch.Tensor) else outputs


def padded(samples: Sequence[np.ndarray]) -> np.ndarray:
    """One array of samples that differ in their shapes."""
    shape = tuple(max(sizes) for sizes in zip(*(each.shape for each in samples), strict=True))
    whole = np.full((len(samples), *shape), PADDING, samples[0].dtype)
    for i, each in enumerate(samples):
        whole[(i, *(slice(0, n) for n in each.shape))] = each
    return whole


class WholeSet:
    """``compute_metrics`` as a metric with state: called once, with all predictions and labels."""

    def __init__(
        self,
        compute_metrics: Callable[[Any], Mapping[str, Any]],
        preprocess: Callable[..., Any] | None,
        left_out: Sequence[str],
    ):
        self._compute_metrics, self._preprocess, self._left_out = compute_metrics, preprocess, left_out
        self.reset()

    def reset(self) -> None:
        self._predictions: Any = None
        self._labels: Any = None

    def update(self, outputs: Any, labels: Any) -> None:
        from transformers.trainer_pt_utils import nested_concat, nested_detach

        found = predictions_of(outputs, self._left_out)
        found = nested_detach(self._preprocess(found, labels) if self._preprocess is not None else found)
        held = self._predictions
        self._predictions = found if held is None else nested_concat(held, found, padding_index=PADDING)
        self._labels = labels if self._labels is None else nested_concat(self._labels, labels, padding_index=PADDING)

    def compute(self) -> dict[str, float]:
        from transformers import EvalPrediction
        from transformers.trainer_pt_utils import nested_numpify

        predictions, labels = (nested_numpify(each) for each in (self._predictions, self._labels))
        said = self._compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))  # type: ignore[arg-type]
        return {name: float(value) for name, value in said.items()}
