"""What the user's code reads in Python, where a loop or a callback of the caller may change it: a weight of the loss
that is annealed, the level of a data set, a replay buffer. Ranks have copies from before the training.

Looked at are globals and closures that the loss, the step, the model's forwards and the data set name, and attributes
of the objects in them that they name. What such code does not name (a list in which a callback of the same object keeps
losses) may change.
"""

import dis
import functools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshfit.python_state import SCALARS, names_in
from meshfit.torch_private.tensors import version

ITEMS, LEVELS, OBJECTS = 64, 3, 2000  # of the outermost list an eighth further in; objects in all
DATA = ("__getitem__", "__getitems__", "__iter__", "__len__", "__call__", "forward")
"""Methods of an object that are called without being named."""
LIBRARIES = (*{sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")}, "<frozen")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class ReadByCode:
    """As it is now."""

    def __init__(self, *code: Any):
        self._names: set[str] = set()
        self._objects: dict[int, Any] = {}
        self._visited: dict[int, Any] = {}
        self._values: dict[str, tuple[Callable[[], Any], Any]] = {}
        queue = deque((_name(one), one) for one in code if one is not None)
        known = (-1, -1)
        while queue and known != (len(self._names), len(self._objects)):  # a name may be one of an earlier object
            known = len(self._names), len(self._objects)
            while queue:
                self._visit(*queue.popleft(), queue)
            for path, thing in list(self._objects.values()):
                queue.extend(self._named(path, thing))

    def changed(self) -> str | None:
        """A name of what is not as it was."""
        return next((path for path, (read, was) in self._values.items() if _seen(read()) != was), None)

    def _visit(self, path: str, thing: Any, queue: deque[tuple[str, Any]]) -> None:
        if id(thing) in self._visited or len(self._visited) > OBJECTS or isinstance(thing, types.ModuleType):
            return
        self._visited[id(thing)] = thing
        if isinstance(thing, functools.partial):
            queue.extend((path, each) for each in (thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, types.MethodType):
            queue.extend([(path, thing.__func__), (_name(thing.__self__), thing.__self__)])
        elif isinstance(thing, types.FunctionType):
            if not _installed(thing):
                self._names |= set(names_in(thing.__code__))
                for name, read in _variables(thing):
                    self._watch(name, read, queue)
        elif isinstance(thing, Tensor | np.ndarray):
            self._values.setdefault(path, (lambda: thing, _seen(thing)))
        elif isinstance(thing, list | tuple | dict):
            some = dict.items(thing) if isinstance(thing, dict) else enumerate(thing[:ITEMS])
            queue.extend((f"{path}[{key!r}]", each) for key, each in some if not isinstance(each, SCALARS))
        elif not isinstance(thing, type) and not _plain(thing) and hasattr(thing, "__dict__"):
            self._objects[id(thing)] = path, thing
            for name in DATA if not _installed(type(thing)) else ():
                queue.append((path, getattr(type(thing), name, None)))
            if isinstance(thing, nn.Module):
                queue.extend((f"{path}.{name}", each) for name, each in thing.named_children())
            for name in ("dataset", "datasets", "data_source"):  # of torch's own data sets
                queue.append((f"{path}.{name}", vars(thing).get(name)))

    def _named(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        """Attributes that code names, and methods."""
        if _installed(type(thing)):
            return
        queue: deque[tuple[str, Any]] = deque()
        for name in self._names:
            own = vars(thing)
            if name in own and not (isinstance(thing, nn.Module) and name in _OF_MODULES):
                self._watch(f"{path}.{name}", functools.partial(own.get, name), queue)
            elif isinstance(method := getattr(type(thing), name, None), types.FunctionType):
                queue.append((path, method))
        yield from ((name, each) for name, each in queue if id(each) not in self._visited)

    def _watch(self, path: str, read: Callable[[], Any], queue: deque[tuple[str, Any]]) -> None:
        value = read()
        if _plain(value):
            self._values.setdefault(path, (read, _seen(value)))
        queue.append((path, value))


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Globals and closures that it reads."""
    for name in _globals(function.__code__):
        if name in function.__globals__:
            yield name, functools.partial(function.__globals__.get, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:  # not filled yet
            continue
        yield name, lambda cell=cell: cell.cell_contents


def _globals(code: types.CodeType) -> set[str]:
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_globals(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _installed(thing: Any) -> bool:
    """Whether a function or class is of Python or an installed package, and not the user's own."""
    code, module = getattr(thing, "__code__", None), thing.__module__ or ""
    file = code.co_filename if code is not None else getattr(sys.modules.get(module), "__file__", None) or ""
    return file.startswith(LIBRARIES) or module.partition(".")[0] in ("meshfit", "builtins")


def _plain(value: Any) -> bool:
    return isinstance(value, (*SCALARS, list, dict, set, deque, Tensor, np.ndarray))


def _seen(value: Any, level: int = 0) -> Any:
    """Something that is equal as long as it is as it was, as far as can be seen in no time."""
    if isinstance(value, SCALARS):
        return type(value), value if value == value else "nan"
    if isinstance(value, Tensor):
        return id(value), version(value)
    if isinstance(value, np.ndarray):
        return id(value), value.shape, value.ravel()[:ITEMS].tobytes() if value.dtype != object else 0
    if isinstance(value, list | tuple | dict | set | deque) and level < LEVELS:
        some = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        most = ITEMS >> 3 * level
        return id(value), len(some), [_seen(each, level + 1) for each in (some[:most] + some[-most:])]
    return id(value)


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__
