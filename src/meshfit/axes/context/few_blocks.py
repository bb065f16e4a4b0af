"""A large model with a few of the blocks that it repeats: what it is tried for takes the time and memory of those.

Blocks are alike if they are of one class, with parameters of the same shapes and attributes of the same values, if they
call the same functions, and if a forward gives them the same tensors beside the one that they pass on. Of each kind the
first and the last stay; the others return what they are given.
"""

import copy
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.calls import watched_calls
from meshfit.anatomy.copies import replaced
from meshfit.axes.context.find import Step
from meshfit.axes.spec import name_of
from meshfit.axes.tensor.kinds import blocks_of, kinds_of
from meshfit.torch_private.modules import emptied
from meshfit.torch_private.trees import tree_leaves

SMALL = 2**24
"""Parameters up to which a model is tried as a whole."""


def with_few_blocks(model: nn.Module, step: Step, batch: Any, needed: Collection[str] = ()) -> nn.Module:
    """A copy with the same parameters; the model itself, if it is small or repeats nothing. The modules at ``needed``
    stay."""
    if sum(p.numel() for p in model.parameters()) <= SMALL:
        return model
    alike, times = _observed(model, step, batch)
    left_out = {
        path: _passing_on(model.get_submodule(path), in_tuple=alike[path][1])
        for paths in blocks_of(model, alike, times).values()
        for path in paths[1:-1]
        if not any(each == path or each.startswith(f"{path}.") for each in needed)
    }
    thin = replaced(model, left_out)
    try:
        with torch.no_grad():
            return thin if left_out and step(thin, copy.copy(batch)).isfinite() else model
    except Exception:  # code of the model's that looks into its blocks
        return model


def _observed(model: nn.Module, step: Step, batch: Any) -> tuple[dict[str, tuple], dict[str, int]]:
    """What modules must have in common, and how often each was called that passes one tensor on, and no more."""
    kinds, alike, held = kinds_of(model), {}, []
    times: Counter[str] = Counter()
    functions = _Functions()

    def called(path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        inside, leaves = functions.within.pop(), tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        in_tuple = isinstance(out, tuple)
        made = out[0] if in_tuple and len(out) == 1 else out
        if isinstance(made, Tensor) and given and (made.shape, made.dtype) == (given[0].shape, given[0].dtype):
            held.append(given)  # an id must not be used again
            beside = tuple(id(x) if isinstance(x, Tensor) else str(x) for x in leaves if x is not given[0])
            alike[path] = kinds[path], in_tuple, beside, tuple(inside)
            times[path] += 1
        else:
            times[path] += 2

    with watched_calls(model, functions.entered, called), torch.no_grad(), functions:
        step(model, copy.copy(batch))
    return {path: alike.get(path, (kinds[path],)) for path in kinds}, times


class _Functions(TorchFunctionMode):
    """What each module under way has called, on what."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[list[tuple]] = []

    def entered(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.within.append([])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = name_of(func), *map(_kind, tree_leaves((args, kwargs)))
        for calls in self.within:
            calls.append(call)
        return func(*args, **kwargs)


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    return x if isinstance(x, int | float | str | bool | torch.dtype) else type(x)


def _passing_on(block: nn.Module, *, in_tuple: bool) -> nn.Module:
    """With the attributes of ``block``, which the model may read."""
    block = emptied(block)
    block.forward = partial(_passed_on, in_tuple)
    return block


def _passed_on(in_tuple: bool, *args: Any, **kwargs: Any) -> Any:
    given = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    return (given,) if in_tuple else given
