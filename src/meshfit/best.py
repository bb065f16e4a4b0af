"""The best weights so far, by a metric, and when to give up waiting for better ones."""

import math

import torch
from torch import Tensor, nn

from meshfit.axes.tensors import tensors_of
from meshfit.optimizers import measure_named


class Best:
    """Watches ``metric``: "accuracy" for the highest, "-loss" for the lowest. Keeps the weights of the best."""

    def __init__(self, metric: str, patience: int | None):
        self.metric, self.patience = metric, patience
        self.value: float | None = None
        self.weights: dict[str, Tensor] = {}
        self.misses = 0

    def consider(self, measured: dict[str, float], model: nn.Module) -> None:
        value = measure_named(self.metric.lstrip("-"), measured)
        value = -value if self.metric.startswith("-") else value
        if self.value is not None and not (value > self.value or math.isnan(self.value)):
            self.misses += 1
            return
        self.value, self.misses = value, 0
        self.weights = {name: tensor.clone() for name, tensor in tensors_of(model).items()}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Put the best weights back."""
        for name, tensor in tensors_of(model).items():
            tensor.copy_(self.weights[name])

    @property
    def given_up(self) -> bool:
        return self.patience is not None and self.misses >= self.patience
