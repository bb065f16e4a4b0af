"""Wrap a module's forward, in place: nothing to subclass, no name changes.

Strategies that act where a module runs (global BatchNorm, shards gathered for a block, recomputation, compiled
blocks) all use it, each around the wrappers before it; ``unwrap`` removes all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(slots=True)
class _Wrapped:
    """Kept by the module: wrappers hold it, and kept anywhere else they would hold it for ever."""

    forward: Any
    """What the module instance had before (None: its class's)."""
    wraps: list[Around] = field(default_factory=list)
    """From the inside out."""


def wrap(module: nn.Module, around: Around, *, innermost: bool = False) -> None:
    """Let ``around(forward)`` replace ``module.forward``; ``innermost``: inside all other wrappers."""
    own = vars(module)
    held = own.setdefault("_wrapped", _Wrapped(own.get("forward")))
    if not innermost:
        held.wraps.append(around)
        own["forward"] = around(module.forward)
        return
    held.wraps.insert(0, around)
    forward = MethodType(type(module).forward, module) if held.forward is None else held.forward
    for each in held.wraps:
        forward = each(forward)
    own["forward"] = forward


def unwrap(model: nn.Module) -> None:
    """Give every module of ``model`` its own forward again."""
    for module in model.modules():
        if not is_wrapped(module):
            continue
        own = vars(module)
        held = own.pop("_wrapped")
        if held.forward is None:
            del own["forward"]
        else:
            own["forward"] = held.forward


def is_wrapped(module: nn.Module) -> bool:
    return "_wrapped" in vars(module)
