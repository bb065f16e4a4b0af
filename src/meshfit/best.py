"""The best evaluation so far, by a metric, its weights, and when to give up waiting for a better one."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.tensors import tensors_of
from meshfit.optimizers import measure_named


class Best:
    """Watches ``metric``: "accuracy" for the highest, "-loss" for the lowest. Keeps the weights of the best."""

    def __init__(self, metric: str, patience: int | None):
        self.metric, self.patience = metric, patience
        self.measured: dict[str, float] | None = None
        """What the best evaluation gave."""
        self.weights: dict[str, Tensor] = {}
        self.misses = 0
        """Evaluations since then."""

    def consider(self, measured: dict[str, float], model: nn.Module) -> None:
        value = self._value(measured)
        if self.measured is not None and not value > self._value(self.measured):
            self.misses += 1
            return
        self.measured, self.misses = measured, 0
        self.weights = {name: tensor.clone() for name, tensor in tensors_of(model).items()}

    def _value(self, measured: dict[str, float]) -> float:
        """Higher is better; NaN is worst."""
        value = measure_named(self.metric.lstrip("-"), measured)
        value = -value if self.metric.startswith("-") else value
        return -math.inf if math.isnan(value) else value

    def facts(self) -> dict[str, Any]:
        """All but the weights, for a checkpoint."""
        return {"measured": self.measured, "misses": self.misses}

    def restore_facts(self, facts: dict[str, Any]) -> None:
        self.measured, self.misses = facts["measured"], facts["misses"]

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Put the best weights back."""
        for name, tensor in tensors_of(model).items():
            tensor.copy_(self.weights[name])

    @property
    def given_up(self) -> bool:
        return self.patience is not None and self.misses >= self.patience
