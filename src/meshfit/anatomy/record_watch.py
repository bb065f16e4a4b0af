"""Let a recorder see a forward.

nn.Module.__call__        modules, with their hooks inside
nn.Module.__setattr__     what the glue leaves in them
autograd.Function.apply   gradients of the user's own, which the operators inside do not have
operators                 below all: which calls draw random numbers, and what is computed where nobody looks
import                    a module that a forward imports makes its constants for everybody, not on meta
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from meshfit.anatomy.record_forward import Recorder
from meshfit.anatomy.record_known import OWN, GlueError
from meshfit.anatomy.record_program import Apply
from meshfit.anatomy.running import Operations
from meshfit.errors import in_short
from meshfit.patches import replaced
from meshfit.torch_private.autograd import watched_functions
from meshfit.torch_private.operators import without_torch_function


@contextlib.contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Let ``recorder`` see the calls of modules and functions that this thread makes within."""

    own = {id(p) for p in recorder.model.parameters()}

    def call(module_call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = None if recorder.busy else recorder.paths.get(id(module))
        if path is None:
            return module_call(module, *args, **kwargs)
        if path in recorder.atoms:
            if not all(id(p) in own for p in module.parameters()):
                recorder.fail("a module is called with other tensors for its parameters (torch.func.functional_call)")
            return recorder.module(path, module, module_call, args, kwargs)
        recorder.stack.append(path)
        try:
            return module_call(module, *args, **kwargs)
        except GlueError:
            raise
        except Exception as error:
            raise GlueError(in_short(error), path, line_of(error)) from error
        finally:
            recorder.stack.pop()

    def applied(cls: Any, real: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if recorder.busy:
            return real(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return looked_through(*args)
        return recorder.glue(Apply(cls), cls.__name__, real, args, kwargs)

    def looked_through(function: Callable, preserve: Any, *args: Any) -> Any:
        """A reentrant checkpoint hides what runs in it; the other kind does not."""
        with torch.set_grad_enabled(any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)):
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    def set_attribute(module_set: Callable[..., Any], module: nn.Module, name: str, value: Any) -> None:
        path = None if recorder.busy else recorder.paths.get(id(module))
        if path is not None:
            recorder.set(path, name, value)
        module_set(module, name, value)

    def imported(load: Callable[..., Any], *args: Any) -> Any:
        """Called for a module that is not there yet: every operator on meta tensors imports some that are."""
        with without_torch_function():  # nor is meta the default device here
            return load(*args)

    with (
        replaced(importlib._bootstrap, "_find_and_load", lambda real: partial(imported, real)),  # type: ignore[attr-defined]
        replaced(nn.Module, "__call__", lambda real: partial(call, real)),
        replaced(nn.Module, "__setattr__", lambda real: partial(set_attribute, real)),
        watched_functions(applied),
        Operations(recorder.operator),
        recorder,
    ):
        yield


def line_of(error: BaseException) -> str:
    """The line of the model's code, or of a library's, that raised an exception."""
    line, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(OWN):
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
