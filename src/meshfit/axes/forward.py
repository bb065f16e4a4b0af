"""Put something around a module's forward, in place: nothing to subclass, no name changes.

Strategies that act where a module runs (global BatchNorm, shards gathered for a block, recomputation, compiled
blocks) all do it through here, each around what the one before left; ``unwrap`` takes all of it off again.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_found: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The forward that a module had of its own before anything was put around it; None: its class's."""


def wrap(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let ``around(forward)`` run where ``module.forward`` did."""
    _found.setdefault(module, module.__dict__.get("forward"))
    module.__dict__["forward"] = around(module.forward)


def unwrap(model: nn.Module) -> None:
    """Give every module of ``model`` the forward it was found with."""
    for module in model.modules():
        if module not in _found:
            continue
        found = _found.pop(module)
        if found is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = found


def is_wrapped(module: nn.Module) -> bool:
    return module in _found
