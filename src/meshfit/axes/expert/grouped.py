"""Experts of a list as one: the code of the first runs once, on the rows of all, and each of its linear layers
multiplies the rows of every expert by that expert's own weights, in one grouped product.

That holds for experts of one kind without buffers, whose parameters are all those of linear layers, and whose code
treats each row by itself; the check tries it (check.py). It pays where torch has a kernel for it: on GPUs, in bfloat16.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.forward import is_wrapped
from meshfit.axes.prove import Refused
from meshfit.torch_private.modules import has_forward_hooks
from meshfit.transfer import upload


class Grouped:
    """``experts`` of one kind; ``forward`` is that of the first."""

    def __init__(self, experts: Sequence[nn.Module], forward: Callable[[Tensor], Tensor], *, always: bool):
        self.forward, self.always = forward, always
        plain = all(map(linears, experts))
        found = linears(experts[0]) if plain else {}
        self._layers: list[tuple[nn.Linear, list[Any]]] = [
            (layer, [expert.get_submodule(path) for expert in experts]) for path, layer in found.items()
        ]

    def fits(self, rows: Tensor) -> bool:
        """Whether it would pay."""
        if self.always or not self._layers:
            return bool(self._layers)
        narrow = rows.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        whole = all(size % 8 == 0 for layer, _ in self._layers for size in layer.weight.shape)
        plain = not any(is_wrapped(each) for _, same in self._layers for each in same)
        return narrow is torch.bfloat16 and whole and plain and len(rows) > 0

    def __call__(self, rows: Tensor, counts: Sequence[int], called: Sequence[bool]) -> Tensor:
        """``rows`` lie by expert, ``counts`` of each. One that nobody called gets no gradient."""
        groups = _Groups(counts, called, rows.device, kernel=not self.always)
        with self._multiplying(groups):
            return self.forward(rows)

    @contextmanager
    def _multiplying(self, groups: "_Groups") -> Iterator[None]:
        for layer, same in self._layers:
            layer.__dict__["forward"] = partial(groups.linear, same)
        try:
            yield
        finally:
            for layer, _ in self._layers:
                del layer.__dict__["forward"]


class _Groups:
    """Which rows are whose. ``kernel``: multiply by torch's own; else one by one, in any precision."""

    def __init__(self, counts: Sequence[int], called: Sequence[bool], device: torch.device, *, kernel: bool):
        self.counts, self.called, self.kernel = list(counts), called, kernel
        ends = torch.tensor(self.counts).cumsum(0)
        self.ends = upload(ends.tolist(), device, torch.int32)

    def linear(self, layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
        if x.dim() != 2 or len(x) != sum(self.counts):
            raise Refused("an expert gives its linear layers other rows than its own")
        weights = [self._own(i, each.weight) for i, each in enumerate(layers)]
        biases = [None if each.bias is None else self._own(i, each.bias) for i, each in enumerate(layers)]
        if not self.kernel:
            parts = zip(x.split(self.counts), weights, biases, strict=True)
            return torch.cat([F.linear(*part) for part in parts])
        low = torch.bfloat16
        made = F.grouped_mm(x.to(low), torch.stack([w.to(low) for w in weights]).mT, offs=self.ends)
        if any(bias is None for bias in biases):
            return made
        starts = F.pad(self.ends[:-1], (1, 0))
        row = torch.arange(len(x), device=x.device)[:, None]
        chosen = ((row >= starts) & (row < self.ends)).to(low)  # a product: its gradient is one too, summed in order
        return made + chosen @ torch.stack([b.to(low) for b in biases if b is not None])

    def _own(self, i: int, parameter: Tensor) -> Tensor:
        return parameter if self.called[i] else parameter.detach()


def linears(expert: nn.Module) -> dict[str, nn.Linear]:
    """By path, if all parameters of ``expert`` are those of plain linear layers, it has no buffers (those of the first
    would stand for all), and nobody listens; else nothing."""
    found = {path: each for path, each in expert.named_modules() if type(each) is nn.Linear}
    own = {id(p) for layer in found.values() for p in layer.parameters()}
    plain = all(id(p) in own for p in expert.parameters()) and "" not in found and not list(expert.buffers())
    plain = plain and not any(map(has_forward_hooks, expert.modules()))
    return found if plain and not any("forward" in vars(layer) for layer in found.values()) else {}
