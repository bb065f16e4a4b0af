"""Weights that no layer holds: regions are entered and left at the very products that read them.

While the module that holds them runs, every function of torch it calls is looked at. A product with a column weight
takes inputs whose gradients are summed; one with a row weight is summed over the ranks, its bias added after that.
Slower than wrapping a layer, and with a collective for each product: used where the border of the module will not do.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfit.torch_private.trees import tree_leaves, tree_map

VIEWS = {"__getitem__", "__get__", "t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "expand"}
VIEWS |= {"unbind", "chunk", "split", "movedim", "contiguous", "to", "flatten", "unflatten", "narrow", "select"}
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "linear", "einsum", "_grouped_mm", "grouped_mm"}
PRODUCTS |= {"addmm", "baddbmm", "addmv"}

BIAS = {"linear": 2, "addmm": 0, "baddbmm": 0, "addmv": 0}
"""Where products take something to add."""

PLAIN: Mapping[str, Callable[..., Tensor]] = {"addmm": torch.mm, "baddbmm": torch.bmm, "addmv": torch.mv}
"""The same without."""


class Border(Protocol):
    def enter(self, x: Any) -> Any: ...

    def leave(self, x: Tensor) -> Tensor: ...


class Products(TorchFunctionMode):
    """Looks for products with ``columns`` and ``rows``; one for each call of the module."""

    def __init__(self, columns: list[Tensor], rows: list[Tensor], border: Border):
        super().__init__()
        self.border = border
        self.known = {id(x): (x, "column") for x in columns} | {id(x): (x, "row") for x in rows}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [self.known[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self.known]
        name = getattr(func, "__name__", "")
        if not found or (name not in VIEWS and name not in PRODUCTS):
            return func(*args, **kwargs)
        role = found[0][1]
        if name in VIEWS:
            out = func(*args, **kwargs)
            self.known |= {id(x): (x, role) for x in tree_leaves(out) if isinstance(x, Tensor)}
            return out
        if role == "column":
            args, kwargs = tree_map(lambda x: x if id(x) in self.known else self.border.enter(x), (args, kwargs))
            return func(*args, **kwargs)
        bias, args, kwargs = _without_bias(name, args, kwargs)
        out = self.border.leave(PLAIN.get(name, func)(*args, **kwargs))
        return out if bias is None else out + bias


def _without_bias(name: str, args: tuple, kwargs: dict) -> tuple[Tensor | None, tuple, dict]:
    at = BIAS.get(name)
    if at is None:
        return None, args, kwargs
    if len(args) > at:
        return args[at], (*args[:at], *args[at + 1 :]), kwargs
    word = "bias" if name == "linear" else "input"
    return kwargs.get(word), args, {key: value for key, value in kwargs.items() if key != word}
