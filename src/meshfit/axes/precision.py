"""The arithmetic of forward and backward.

    fp32   as the model is built
    bf16   matrix products, grouped ones too, and convolutions in bfloat16 (autocast)
    fp16   likewise in float16; the loss is scaled so that small gradients survive, and the scale follows
           overflows: halved when a gradient overflows (the step is skipped), doubled after 2,000 good steps

What stays fp32 under both: weights, gradients, optimizer state, BatchNorm statistics, softmax, norms,
losses and sums, and the gradients of weights on their way between ranks. Activations with their gradients, and weights
that are gathered for products, travel as the products take them. The scale is the same on every rank, because all of
them see the same summed gradients.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from meshfit.torch_private import autocast_grouped_products, update_loss_scale_

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    word: str = "fp32"

    def arithmetic(self, device: torch.device) -> AbstractContextManager:
        """A context in which operations run in this precision."""
        if self.word == "fp32":
            return nullcontext()
        if self.word == "bf16" and device.type == "cuda":
            autocast_grouped_products()
        return torch.autocast(device.type, DTYPES[self.word])

    @contextmanager
    def rounded_once(self) -> Iterator[None]:
        """Weights that several ``arithmetic`` use within it are rounded once, not once in each, and one copy of them is
        kept. They must not change meanwhile, nor be used first where gradients are off."""
        if self.word == "fp32":
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


class LossScale:
    """The loss scale of fp16, kept on the device: the host does not wait for it."""

    def __init__(self, device: torch.device, *, start: float = 2.0**16, growth_interval: int = 2000):
        self.value = torch.full((), start, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._interval = growth_interval

    def update(self, overflow: torch.Tensor) -> None:
        """Halve after an overflow (1.0), double after enough steps without."""
        update_loss_scale_(self.value, self._good_steps, overflow.float(), 2.0, 0.5, self._interval)
