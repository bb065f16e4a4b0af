"""What code keeps in Python from call to call: numbers, texts, containers, tensors and random generators in attributes
of its objects, in closures and in globals of its module. ``self.calls += 1`` in a forward, ``state["step"] += 1`` in a
step.

Trials run a step before the training does, and must leave nothing behind; buffers and parameters are not looked at
here: see axes/buffers.
"""

import copy
import functools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshfit.torch_private.modules import own_buffers
from meshfit.torch_private.tensors import version

DEPTH, ITEMS, OBJECTS = 8, 1000, 20_000  # of the search: levels, of each container, in all
LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "meshfit", "PIL", "pyarrow", "pandas", "scipy"}
"""Whose code keeps nothing of the user's in globals."""
SCALARS = (bool, int, float, complex, str, bytes, type(None))
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
LARGEST = 2**16
"""Elements of a tensor up to which its values are kept too."""
_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module())) | {"_forward_hooks_with_kwargs", "forward", "__class__"}


class PythonState:
    """As it is now, of ``model`` and of functions; ``restore`` puts it back."""

    def __init__(self, model: nn.Module, *code: Any):
        self._owned = {id(module) for module in model.modules()}
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # ids are of objects that live
        self._slots: list[_Slots] = []
        self._trains = [(p, p.requires_grad) for p in model.parameters()]
        queue = deque((name, module, 0) for name, module in model.named_modules())
        queue.extend((getattr(one, "__name__", type(one).__name__), one, 0) for one in code if one is not None)
        while queue and len(self._seen) < OBJECTS:
            path, thing, depth = queue.popleft()
            if id(thing) in self._seen or isinstance(thing, (*SCALARS, types.ModuleType, type)):
                continue
            self._seen.add(id(thing))
            self._alive.append(thing)
            slots = self._slots_of(path, thing)
            self._slots += slots
            if depth < DEPTH and not isinstance(thing, (Tensor, np.ndarray, *GENERATORS)):
                queue.extend((each.path(key), value, depth + 1) for each in slots for key, value in each.was.items())
                queue.extend((f"{path}.{name}", value, depth + 1) for name, value in _parts(thing))

    @property
    def modules(self) -> set[nn.Module]:
        """All that can be reached."""
        return {thing for thing in self._alive if isinstance(thing, nn.Module)}

    def drew(self, *, torchs: bool) -> bool:
        """Whether one of torch's generators that the code holds was drawn from, or one of others."""
        own = (each for each in self._slots if isinstance(each, _GeneratorSlot))
        return any(any(each.changed()) for each in own if isinstance(each.held, torch.Generator) is torchs)

    def changed(self) -> dict[str, Any]:
        """What is not as it was, by its path: the value now, None where it is gone."""
        return {slots.path(key): value for slots in self._slots for key, value in slots.changed()}

    def restore(self) -> None:
        for slots in self._slots:
            slots.restore()
        for p, trains in self._trains:
            if p.requires_grad is not trains:
                p.requires_grad_(trains)

    def take(self) -> None:
        """From now on ``restore`` puts it back to what it is now."""
        for slots in self._slots:
            slots.take()

    def only(self, paths: Collection[str]) -> "PythonState":
        """These alone, as they are now."""
        some = PythonState(nn.Module())
        some._alive = self._alive
        for slots in self._slots:
            if keys := slots.keys_of(paths):
                some._slots.append(slots.only(keys))
        return some

    def _slots_of(self, path: str, thing: Any) -> "list[_Slots]":
        if isinstance(thing, nn.Module):
            held = [_Slots(path, vars(thing), skip=_OF_MODULES)]
            return held if id(thing) in self._owned else [*held, _Slots(path, own_buffers(thing))]
        if isinstance(thing, dict):
            return [_Slots(path, thing, item=True)]
        if isinstance(thing, list | deque | set):
            return [_ListSlots(path, thing)]
        if isinstance(thing, Tensor | np.ndarray):
            return [_TensorSlot(path, thing) if isinstance(thing, Tensor) else _ArraySlot(path, thing)]
        if isinstance(thing, GENERATORS):
            return [] if isinstance(thing, random.SystemRandom) else [_GeneratorSlot(path, thing)]
        if isinstance(thing, types.FunctionType):
            names = () if is_library(thing) else names_in(thing.__code__)
            used = [name for name in names if isinstance(thing.__globals__.get(name), (*SCALARS, Tensor))]
            return [_CellSlots(path, thing), _Slots("", thing.__globals__, only=used)]
        if is_library(type(thing)):
            return []
        own = getattr(thing, "__dict__", None)
        slots: list[_Slots] = [_AttributeSlots(path, thing)] if hasattr(type(thing), "__slots__") else []
        return [_Slots(path, own), *slots] if isinstance(own, dict) else slots


@contextmanager
def python_state_kept(model: nn.Module, *code: Any) -> Iterator[None]:
    """Afterwards it is as before."""
    state = PythonState(model, *code)
    try:
        yield
    finally:
        state.restore()


def code_of(objective: Any) -> tuple[Any, ...]:
    """The user's functions in an objective."""
    return getattr(objective, "code", (objective,))


class _Slots:
    """Entries of a dict: of a module's or an object's attributes, of globals, or of the user's own."""

    def __init__(
        self,
        path: str,
        held: Any,
        *,
        only: Collection[Any] | None = None,
        skip: Collection[str] = (),
        item: bool = False,
    ):
        self.prefix, self.held, self.skip, self.all, self.item = path, held, skip, only is None, item
        self.was = {key: value for key, value in self._now() if only is None or key in only}

    def only(self, keys: Collection[Any]) -> "_Slots":
        some = copy.copy(self)
        some.was, some.all = dict.fromkeys(keys), False
        some.take()
        return some

    def take(self) -> None:
        now = dict(self._now())
        self.was = now if self.all else {key: now.get(key, _MISSING) for key in self.was}

    def keys_of(self, paths: Collection[str]) -> list[Any]:
        """Of those that are here, or may come to be."""
        known = [key for key in self.was if self.path(key) in paths]
        named = [path.removeprefix(f"{self.prefix}.") for path in paths if path.startswith(f"{self.prefix}.")]
        later = (named if self.prefix else paths) if self.all and not self.item else ()
        return known + [key for key in later if key.isidentifier() and key not in self.was]

    def path(self, key: Any) -> str:
        return f"{self.prefix}[{key!r}]" if self.item else f"{self.prefix}.{key}" if self.prefix else str(key)

    def changed(self) -> Iterator[tuple[Any, Any]]:
        now = dict(self._now())
        for key, value in self.was.items():
            there = now.get(key, _MISSING)
            if there is not value and not (
                isinstance(value, SCALARS) and type(there) is type(value) and there == value
            ):
                yield key, None if there is _MISSING else there
        if self.all:
            yield from ((key, value) for key, value in now.items() if key not in self.was and _is_data(value))

    def restore(self) -> None:
        for key, value in [*self.changed()]:
            if self.was.get(key, _MISSING) is _MISSING:
                self._remove(key)
            elif _is_data(value) or value is None:
                self._put(key, self.was[key])

    def _now(self) -> Iterator[tuple[Any, Any]]:
        return ((key, value) for key, value in [*islice(dict.items(self.held), ITEMS)] if key not in self.skip)

    def _put(self, key: Any, value: Any) -> None:
        self.held[key] = value

    def _remove(self, key: Any) -> None:
        del self.held[key]


class _CellSlots(_Slots):
    """The closure of a function."""

    def _now(self) -> Iterator[tuple[Any, Any]]:
        for name, cell in zip(self.held.__code__.co_freevars, self.held.__closure__ or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue

    def _put(self, key: Any, value: Any) -> None:
        dict(zip(self.held.__code__.co_freevars, self.held.__closure__, strict=False))[key].cell_contents = value


class _AttributeSlots(_Slots):
    """Attributes of an object whose class names them in ``__slots__``."""

    def _now(self) -> Iterator[tuple[Any, Any]]:
        for kind in type(self.held).__mro__:
            named = vars(kind).get("__slots__", ())
            for name in (named,) if isinstance(named, str) else named:
                if not name.startswith("__") and hasattr(self.held, name):
                    yield name, getattr(self.held, name)

    def _put(self, key: Any, value: Any) -> None:
        object.__setattr__(self.held, key, value)

    def _remove(self, key: Any) -> None:
        object.__delattr__(self.held, key)


class _ListSlots(_Slots):
    """A list or set, as a whole."""

    def _now(self) -> Iterator[tuple[Any, Any]]:
        return enumerate([*islice(self.held, ITEMS)])

    def path(self, key: Any) -> str:
        return f"{self.prefix}[{key}]"

    def restore(self) -> None:
        if len(self.held) <= ITEMS and any(True for _ in self.changed()):
            self.held.clear()
            (self.held.update if isinstance(self.held, set) else self.held.extend)(self.was.values())


class _TensorSlot(_Slots):
    """The values of a tensor."""

    def __init__(self, path: str, held: Any):
        self.prefix, self.held, self.all = path, held, False
        self.take()

    def take(self) -> None:
        t = self.held
        self.version = version(t)
        kept = t.numel() <= LARGEST and t.layout is torch.strided and not t.is_meta
        self.was = {None: t.detach().clone() if kept else None}

    def only(self, keys: Collection[Any]) -> "_TensorSlot":
        return type(self)(self.prefix, self.held)

    def path(self, key: Any) -> str:
        return self.prefix

    def changed(self) -> Iterator[tuple[Any, Any]]:
        was = self.was[None]
        if version(self.held) != self.version or (was is not None and not torch.equal(self.held, was)):
            yield None, self.held  # the second: BatchNorm's kernel does not move the version

    def restore(self) -> None:
        if self.was[None] is not None and any(True for _ in self.changed()):
            self.held.data.copy_(self.was[None])
            self.version = version(self.held)


class _ArraySlot(_TensorSlot):
    """Those of an array of NumPy."""

    was: dict[Any, Any]

    def take(self) -> None:
        self.was = {None: self.held.copy()} if self.held.size <= LARGEST else {}

    def changed(self) -> Iterator[tuple[Any, Any]]:
        if self.was and self.held.tobytes() != self.was[None].tobytes():
            yield None, self.held

    def restore(self) -> None:
        if any(True for _ in self.changed()):
            np.copyto(self.held, self.was[None])


class _GeneratorSlot(_TensorSlot):
    """Where a random generator stands."""

    def take(self) -> None:
        self.was = {None: self._state()}

    def changed(self) -> Iterator[tuple[Any, Any]]:
        if self._state() != self.was[None]:
            yield None, self.held

    def restore(self) -> None:
        state, held = pickle.loads(self.was[None]), self.held
        if isinstance(held, np.random.Generator):
            held.bit_generator.state = state
        else:
            (held.setstate if isinstance(held, random.Random) else held.set_state)(state)

    def _state(self) -> bytes:
        held = self.held
        if isinstance(held, np.random.Generator):
            return pickle.dumps(held.bit_generator.state)
        return pickle.dumps(held.getstate() if isinstance(held, random.Random) else held.get_state())


def _is_data(value: Any) -> bool:
    return isinstance(value, (*SCALARS, Tensor, np.ndarray, dict, list, tuple, set, deque))


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What is held by other things than dicts, lists and modules."""
    if isinstance(thing, tuple):
        yield from ((str(i), value) for i, value in enumerate(islice(thing, ITEMS)))
    elif isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from (("self", thing.__self__), ("func", thing.__func__))
    elif isinstance(thing, types.FunctionType) and not is_library(thing):
        for name in names_in(thing.__code__):
            value = thing.__globals__.get(name)
            if value is not None:
                yield name, value


def names_in(code: types.CodeType) -> list[str]:
    """Globals and attributes that a function names, those that it defines too."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in names_in(one))]))


def is_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in LIBRARIES
