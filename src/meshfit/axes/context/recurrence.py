"""What carries a state from position to position in a model: recurrent layers, scans, loops over positions.

Found to say why sequences are not cut. A rank would need the state of the rank before it, one after another.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.calls import watched_calls
from meshfit.data import tree

SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "associative_scan")
LEAST = 4
"""Positions in a row, each taken by itself, that make a loop."""


def recurrences(model: nn.Module, step: Any, batch: Any) -> list[str]:
    """In words, one for each kind of module and what it does. ``batch`` is of a few samples."""
    with torch.enable_grad(), _Watch(batch) as seen, watched_calls(model, seen.entered, seen.left):
        try:
            step(model, batch)
        except Exception:
            return []
    found = {f"{path} is a {kind}": path for path, kind in seen.layers.items()}
    for (path, size), taken in seen.taken.items():
        if len(taken) == size:
            found[f"{path or 'the model'} loops over {size} positions"] = path
    found |= {f"{path or 'the model'} takes {name} over positions": path for path, name in seen.scans}
    return _one_of_each(model, found)


def _one_of_each(model: nn.Module, found: dict[str, str]) -> list[str]:
    kinds: dict[tuple[type, str], list[str]] = defaultdict(list)
    for line, path in found.items():
        kinds[type(model.get_submodule(path)), line.removeprefix(path)].append(line)
    return [
        f"{lines[0]}, and {len(lines) - 1} more like it" if len(lines) > 1 else lines[0] for lines in kinds.values()
    ]


class _Watch(TorchFunctionMode):
    def __init__(self, batch: Any):
        super().__init__()
        self.samples = max((len(t) for t in tree.tensors(batch) if t.dim()), default=0)
        self.lengths = {t.shape[1] for t in tree.tensors(batch) if t.dim() > 1}
        self.stack = [""]
        self.layers: dict[str, str] = {}
        self.taken: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.scans: dict[tuple[str, str], None] = {}

    def entered(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(path)
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            self.layers[path] = type(module).__name__

    def left(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, x = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter):
            if name in SCANS:
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                if isinstance(dim, int) and self._is_length(x.shape[dim], exact=False):
                    self.scans[self.stack[-1], name] = None
            elif name == "__getitem__":
                self._index(x, args[1] if isinstance(args[1], tuple) else (args[1],))
            elif name in ("select", "unbind", "__iter__"):
                dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
                if isinstance(dim, int) and name == "select" and len(args) > 2 and isinstance(args[2], int):
                    self._take(x.shape[dim], args[2])
                elif isinstance(dim, int) and name != "select":
                    for at in range(x.shape[dim]):
                        self._take(x.shape[dim], at)
        return func(*args, **kwargs)

    def _index(self, x: Tensor, index: tuple) -> None:
        dim = 0
        for place, each in enumerate(index):
            if each is Ellipsis:
                dim = x.dim() - sum(i is not None for i in index[place + 1 :])
                continue
            if type(each) is int and dim < x.dim():
                self._take(x.shape[dim], each)
            dim += each is not None

    def _take(self, size: int, at: int) -> None:
        if self._is_length(size, exact=True):
            self.taken[self.stack[-1], size].add(at % size)

    def _is_length(self, size: int, *, exact: bool) -> bool:
        """Whether a dim may be one of positions; chunks of them are shorter."""
        if size < LEAST or size == self.samples:
            return False
        return size in self.lengths or (not exact and any(size <= length for length in self.lengths))
