"""Wrap a module's forward, in place: nothing to subclass, no name changes.

Strategies that act where a module runs (global BatchNorm, shards gathered for a block, recomputation, compiled
blocks) all use it, each around the wrappers before it; ``unwrap`` removes all of them.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

Around = Callable[[Callable[..., Any]], Callable[..., Any]]

_found: WeakKeyDictionary[nn.Module, tuple[Any, list[Around]]] = WeakKeyDictionary()
"""The forward that a module instance had before it was wrapped (None: its class's), and its wrappers, from the inside
out."""


def wrap(module: nn.Module, around: Around, *, innermost: bool = False) -> None:
    """Let ``around(forward)`` replace ``module.forward``; ``innermost``: inside all other wrappers."""
    found, wraps = _found.setdefault(module, (module.__dict__.get("forward"), []))
    if not innermost:
        wraps.append(around)
        module.__dict__["forward"] = around(module.forward)
        return
    wraps.insert(0, around)
    forward = MethodType(type(module).forward, module) if found is None else found
    for each in wraps:
        forward = each(forward)
    module.__dict__["forward"] = forward


def unwrap(model: nn.Module) -> None:
    """Give every module of ``model`` its own forward again."""
    for module in model.modules():
        if module not in _found:
            continue
        found, _ = _found.pop(module)
        if found is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = found


def is_wrapped(module: nn.Module) -> bool:
    return module in _found
