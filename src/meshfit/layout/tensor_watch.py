"""What is seen of a model in one forward and backward: which modules are called, with what, and what of it is used."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshfit.errors import JobError
from meshfit.layout.tensor_check import Call, alias, tensors_of


@dataclass(eq=False)
class Watched:
    inputs: Any
    """Of the model: a tuple of arguments, or a dict of keyword arguments."""

    within: dict[str, frozenset[str]]
    """Of each module that was called, the modules under way at every one of its calls, itself included."""

    times: dict[str, int]
    """How often each was called."""

    shapes: dict[str, tuple]
    """Of the tensors that it was given at its first call."""

    calls: dict[str, Call] = field(default_factory=dict)
    """The first call of each module that was asked for."""

    def called(self, path: str) -> bool:
        return path in self.within

    def nearest(self, path: str) -> str:
        """The module at ``path``, or the lowest around it that is called."""
        while path and path not in self.within:
            path = path.rpartition(".")[0]
        return path


def watch(model: nn.Module, run: Callable[[nn.Module], Any], paths: Collection[str] = ()) -> Watched:
    """Run ``model``, a copy to look into, and keep what the modules at ``paths`` are given."""
    under_way: list[str] = []
    within: dict[str, frozenset[str]] = {}
    times: dict[str, int]
    """How often each was called."""

    shapes: dict[str, tuple]
    """Of the tensors that it was given at its first call."""

    times: dict[str, int] = {}
    shapes: dict[str, tuple] = {}
    calls: dict[str, Call] = {}
    given: list[Any] = []
    returned: dict[str, list[Tensor]] = {}
    wanted = {"", *paths}

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        under_way.append(path)
        within[path] = within.get(path, frozenset(under_way)) & frozenset(under_way)
        times[path] = times.get(path, 0) + 1
        shapes.setdefault(path, _shapes((args, kwargs)))
        if path == "" and not given:
            given.append(_as_inputs(module, args, kwargs))
        if path in wanted and path not in calls:
            calls[path] = Call(_kept((args, kwargs)))

    def after(path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        del under_way[len(under_way) - 1 - under_way[::-1].index(path) :]
        if path not in wanted:
            return None
        out = alias(out)
        tensors = tensors_of(out)
        if path not in returned:
            returned[path] = tensors
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.retain_grad()
        return out

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda m, a, k, p=path: before(p, m, a, k), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda m, a, k, o, p=path: after(p, m, a, k, o), with_kwargs=True))
    try:
        with torch.enable_grad():
            loss = run(model)
            loss = loss[0] if isinstance(loss, (tuple, list)) else loss
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    if not given:
        raise JobError("the objective never calls the model itself, so there is nothing to split over devices")
    for path, call in calls.items():
        call.used = tuple(not t.requires_grad or t.grad is not None for t in returned[path])
    model.zero_grad()
    return Watched(given[0], within, times, shapes, calls)


def _shapes(inputs: Any) -> tuple:
    return tuple((tuple(x.shape), x.requires_grad) for x in tree_flatten(inputs)[0] if isinstance(x, Tensor))


def _kept(inputs: Any) -> Any:
    leaves, spec = tree_flatten(inputs)
    kept: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in kept:
            kept[id(leaf)] = leaf
            if isinstance(leaf, Tensor):
                kept[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return tree_unflatten([kept[id(leaf)] for leaf in leaves], spec)


def _as_inputs(model: nn.Module, args: tuple, kwargs: dict) -> Any:
    if not kwargs or not args:
        return args or kwargs
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments) if set(bound.arguments) >= set(kwargs) else args
