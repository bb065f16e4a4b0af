"""The calls of a model's modules, seen by hooks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

Before = Callable[[str, nn.Module, tuple, dict[str, Any]], None]
"""Given the path of a module, the module, and the arguments of a call."""

After = Callable[[str, nn.Module, tuple, dict[str, Any], Any], Any]
"""Given what was returned too; what it returns itself, if not None, takes the place of that."""


@contextmanager
def watched_calls(model: nn.Module, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Call ``before`` and ``after`` around each call of a module of ``model``, and around the module's own hooks."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if before is not None:
                hook = module.register_forward_pre_hook(partial(before, path), with_kwargs=True, prepend=True)
                hooks.callback(hook.remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(partial(after, path), with_kwargs=True).remove)
        yield
