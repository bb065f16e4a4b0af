"""Autograd: the graph, its nodes and hooks, and values that its threads inherit."""

import ctypes
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional

from meshfit.patches import replaced


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: what it calls is computed again."""
    return torch._C._current_graph_task_id() != -1


def will_run(node: Any) -> bool:
    """Within a backward: whether it will come to ``node``, or was asked for its gradient."""
    return torch._C._will_engine_execute_node(node)


def sequence_number(node: Any) -> int:
    """Of a node of the graph, in the order in which this thread made them."""
    return node._sequence_nr()


def current_node() -> Any:
    """The node that backward is at, in this thread; None outside of one."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """What the next node of this thread will have."""
    return torch.autograd._get_sequence_nr()


def saved_tensors_hooks_now() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Innermost pack and unpack hooks under which this runs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]


def checkpoint_now(*, again: bool = False) -> Callable[..., Any] | None:
    """Pack hook of the ``torch.utils.checkpoint`` (without reentrance) in which this runs, another one for each region:
    in its forward, with ``again`` also when backward computes it again."""
    names = ("_checkpoint_hook.", "_recomputation_hook.") if again else "_checkpoint_hook."
    hooks = saved_tensors_hooks_now()
    return hooks[0] if hooks and getattr(hooks[0], "__qualname__", "").startswith(names) else None


CHECKPOINT_INPUTS = "_NoopSaveInputs"
"""The ``autograd.Function`` by which ``torch.utils.checkpoint`` holds its inputs, up to torch 2.11 or so."""

IN_PLACE_NODE, COPY_NODE = "CopySlices", "CloneBackward0"
"""Nodes of a write to a view, and of a copy that is saved before a write."""

PRODUCT_NODES = frozenset(
    f"{name}Backward0"
    for name in ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Linear", "Convolution", "GroupedMm", "ScaledMm")
)
"""Nodes that compute the gradients of their weights apart from those of their inputs."""


def watched_functions(watch: Callable[..., Any], *, everywhere: bool = False) -> AbstractContextManager[None]:
    """Every ``autograd.Function`` that this thread, or one ``everywhere``, applies within runs as ``watch(function,
    apply, args, kwargs)``.

    Below ``Function.apply``, which calls this: a method that was bound before (``f = MyFunction.apply`` at the top of a
    file) comes by here too."""
    level: Any = torch.autograd.function._SingleLevelFunction

    def real(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(level, cls), "apply")(*args, **kwargs)  # noqa: B009

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not issubclass(cls, torch.autograd.Function):  # one that functorch made for a level of its own
                return before(cls, *args, **kwargs)
            return watch(cls, functools.partial(before, cls), args, kwargs)

        return apply

    return replaced(level, "apply", make, everywhere=everywhere, bind=classmethod, real=real)


T = TypeVar("T")


class ThreadValue(Generic[T]):
    """A value for each thread; autograd's threads have that of the thread that called backward. ``name`` is unique."""

    def __init__(self, name: str, default: T):
        self._name, self._default = f"meshfit.{name}", default

    def get(self) -> T:
        return torch._C._get_obj_in_tls(self._name) if torch._C._is_key_in_tls(self._name) else self._default

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        before = self.get()
        _stash(self._name, value)
        try:
            yield
        finally:
            _stash(self._name, before)


def _stash(name: str, value: object) -> None:
    """torch 2.11 gives back a reference to what it held before, but takes none to what it is given."""
    if not _stash_counts():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


@functools.cache
def _stash_counts() -> bool:
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("meshfit.probe", probe)
    counts = sys.getrefcount(probe) > before
    if not counts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return counts


def in_a_function(error: BaseException) -> bool:
    """Whether the backward of a user's ``torch.autograd.Function`` raised it, in code that is not meshfit's."""
    files = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)]
    applied = [i for i, place in enumerate(files) if place == (torch.autograd.function.__file__, "apply")]
    ours = str(Path(__file__).parents[1])
    return bool(applied) and not any(file.startswith(ours) for file, _ in files[applied[-1] :])
