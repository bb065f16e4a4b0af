"""The border of a region as a compiler sees it: plain tensors, and collectives that it can trace.

Inside a compiled block a rank's rows (sequence=split) are plain tensors too. A region gathers its input where it is
called, so that its code reads the shapes of the whole, and hands on the rank's rows of the sum. What else a block does
to rows must be the same for each row: see axes/compile/parts.py, which tries that before anything is compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.spec import SplitTensor
from meshfit.axes.tensor.column import in_autocast, is_product, product_weights
from meshfit.axes.tensor.region import SEQUENCE, Region, joined
from meshfit.comm import traced
from meshfit.comm.group import Group
from meshfit.torch_private.autograd import ThreadValue
from meshfit.torch_private.trees import tree_flatten, tree_unflatten

trying: ThreadValue[str] = ThreadValue("tensor.plain", "")
"""In an eager trial: "plain", or "noting" which inputs of regions are rows."""


def is_plain() -> bool:
    return torch.compiler.is_compiling() or trying.get() == "plain"


def product(layer: nn.Module, x: Tensor, *, bias: bool = True) -> Tensor:
    """Of ``x`` with the weight of a layer for which ``is_product`` holds."""
    return F.linear(x, product_weights(layer), layer.bias if bias else None)  # type: ignore[arg-type]


class PlainCrossing:
    """One region's border."""

    def __init__(self, group: Group, *, alone: bool):
        self._group, self._size, self._alone = traced.number_of(group), group.size, alone
        self._rows: tuple[bool, ...] = ()
        """Which leaves of what the region is given are rows."""
        self._column_rows = False
        """Whether what enters its layers are rows: where the region itself is not called by what is compiled."""
        self._entered: list[tuple[Tensor, Tensor]] = []

    def note(self, args: Any, kwargs: Any) -> None:
        if trying.get() == "noting":
            leaves, _ = tree_flatten((args, kwargs))
            self._rows = tuple(isinstance(leaf, SplitTensor) for leaf in leaves)

    def note_column(self, x: Any) -> None:
        if trying.get() == "noting":
            self._column_rows = isinstance(x, SplitTensor)

    def around(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._entered = []
        if True in self._rows:
            leaves, spec = tree_flatten((args, kwargs))
            for i, is_rows in enumerate(self._rows):
                if is_rows:
                    whole = self._gathered(leaves[i])
                    self._entered.append((whole, whole))
                    leaves[i] = whole
            args, kwargs = tree_unflatten(leaves, spec)
        made = forward(*args, **kwargs)
        self._entered = []
        return made

    def enter(self, x: Tensor) -> Tensor:
        for known, own in self._entered:
            if known is x:
                return own
        if self._column_rows:
            own = self._gathered(x)
        else:
            own = traced.copy(in_autocast(x) if self._alone else x, self._group, self._size)
        self._entered.append((x, own))
        return own

    def leave(self, layer: nn.Module, x: Tensor, *, rows: bool) -> Tensor:
        share = product(layer, x, bias=False)
        name = "reduce_scatter" if rows and share.dim() > 1 else "reduce"
        total = traced.collective(share, name, self._group, self._size, SEQUENCE)
        return total if layer.bias is None else total + layer.bias.to(total.dtype)  # type: ignore[union-attr]

    def _gathered(self, x: Tensor) -> Tensor:
        x = in_autocast(x) if self._alone else x
        return traced.collective(x, "all_gather", self._group, self._size, SEQUENCE)


def untraceable(model: nn.Module, region: Region) -> list[str]:
    """Paths of modules at whose calls ``region`` does what a compiler cannot trace."""
    home = model.get_submodule(region.module)
    borders = [*region.enters, *(each.module for each in region.leaves)]
    other = region.gathers or region.lookups or region.slices
    if other or (region.rows and region.draws):
        paths = [*borders, *(path for path, _ in region.gathers), *region.lookups, *region.slices, *region.rows]
        return [joined(region.module, path) for path in paths]
    plain = all(is_product(home.get_submodule(path)) for path in borders)
    biases = all(each.bias in ("", joined(each.module, "bias")) and each.dim == -1 for each in region.leaves)
    fits = plain and biases and not (region.draws or region.raw or region.sources or region.heads)
    return [] if fits else [region.module]
