"""Gradients of a model that is spread over ranks which work on the same samples, as tensor parallelism does.

``AllReduce`` or ``Scatter`` sums gradients over the ranks that hold the same part of the model, and differ in their
samples. What is left are sums over the parts: of gradients that a rank has only some terms of, and of a few numbers
that every rank must know before it steps: the norm, in which each element counts once, and whether to stop.

    traffic   the gradients of parameters that are whole on every rank but used in part by each, once a step; one
              small all_reduce over all ranks
"""

from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.exchange.allreduce import AllReduce, Riders
from meshfit.exchange.scatter import Scatter
from meshfit.exchange.update import total_norm
from meshfit.layout.tensor import Parts

RIDERS = 2  # squared norm, stop; then one a partial parameter: whether any rank reached it


class Across:
    """``inner`` sums over samples; ``parts`` says how the model lies. ``copies``: of the whole model, in the world."""

    def __init__(self, inner: AllReduce | Scatter, parts: Parts, device: torch.device, *, copies: int):
        self.inner, self.parts, self.device, self.copies = inner, parts, device, copies
        self.norm: Tensor | None = None
        """Of all gradients together, after ``finish``."""
        self._added: list[Tensor] = []
        """Gradients that other ranks have terms of, and this one has not."""

    @property
    def degree(self) -> int:
        """Ranks that share a batch."""
        return self.inner.degree

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.inner.parameters

    def arm(self, loss: Tensor | float, count: Tensor | float, *, stop: bool, broken: Tensor | bool) -> None:
        """The next backward is the last of this step."""
        self._stop = stop
        self.inner.arm(loss, count, stop=stop, broken=broken)

    def finish(self) -> Riders:
        """Wait until every gradient is summed, and hear what the other ranks have to say."""
        riders = self.inner.finish()
        partial = self.parts.partial
        behind = {p for p in partial if p.grad is None and p.numel()}
        for p in behind:
            p.grad = torch.zeros_like(p)
        self.parts.sum_partial()
        numbers = torch.zeros(RIDERS + len(partial), dtype=torch.float64, device=self.device)
        numbers[0] = self._square() / self.copies
        numbers[1] = float(self._stop)
        for i, p in enumerate(partial):
            numbers[RIDERS + i] = float(p.grad is not None and p not in behind)
        dist.all_reduce(numbers)
        self._added = []
        if behind:
            for p, reached in zip(partial, numbers[RIDERS:].tolist(), strict=True):
                if not reached:
                    p.grad = None
                elif p in behind and p.grad is not None:
                    self._added.append(p.grad)
        self.norm = numbers[0].sqrt()
        if self._gradient_device.type == "cpu":
            self.norm = self.norm.cpu()
        stop = numbers[1] if numbers.is_cuda else float(numbers[1])
        return replace(riders, stop=stop)

    @property
    def _gradient_device(self) -> torch.device:
        gradients = self.gradients
        return gradients[0].device if gradients else self.device

    def _square(self) -> Tensor:
        """This rank's part of the squared norm: elements that several ranks hold count in part on each."""
        kinds: dict[float, list[Tensor]] = defaultdict(list)
        for p in self.parameters:
            if p.grad is not None:
                kinds[self.parts.weight(p)].append(p.grad)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for weight, grads in kinds.items():
            total += weight * total_norm(grads).double().square().to(self.device)
        return total

    @property
    def gradients(self) -> list[Tensor]:
        """Tensors that together hold every gradient of this rank once; they may be scaled in place."""
        return [*self.inner.gradients, *self._added]

    def clear(self) -> None:
        """Forget the gradients, ready for the next step; the weights have changed."""
        self._added = []
        self.inner.clear()

    def remove(self) -> None:
        self.inner.remove()


def share_state(optimizer: torch.optim.Optimizer, parts: Parts) -> None:
    """Cut what an optimizer holds already as its parameters are cut: some make state when they are built."""
    for parameter in parts.cuts:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][key] = parts.share(parameter, value)
