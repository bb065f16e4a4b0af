"""One call of a block that is computed again: what it saw, what it changed, which results it keeps.

Beside torch's random numbers and autocast, which torch.utils.checkpoint restores by itself:

    state     buffers and attributes that forward changes are put back to what they were, and after it to what they
              are. Found by comparing all of them before and after the first call: BatchNorm's running statistics
              change without a new version, others are changed through ``.data``
    random    the numbers of Python and numpy
    inputs    lists, dicts and caches are handed in as they were: a block may have added to them
    results   under selective, those of dear operations, in order. One that is gone is computed like the rest: it drew
              random numbers, was changed in place, is made after all that is saved, or was used up by a backward
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshfit.anatomy.running import worth_keeping
from meshfit.axes.data import batchnorm
from meshfit.data import tree
from meshfit.torch_private.autograd import saved_tensors_hooks_now
from meshfit.torch_private.modules import own_buffers
from meshfit.torch_private.operators import TorchDispatchMode
from meshfit.torch_private.tensors import detached_alias, version
from meshfit.torch_private.trees import tree_leaves, tree_map_only

Changes = dict[tuple[bool, ...], "list[_Slot]"]
"""What a block's forward changes beside its result, by which of its modules are in training."""


class Call:
    """One call of a block: run at first, and again for each backward through it."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        changes: Changes,
        selective: bool,
    ):
        self._module, self._forward, self._changes, self._selective = module, forward, changes, selective
        self._given: tuple[tuple, dict[str, Any]] | None = (args, kwargs)
        plain = [x if type(x) is Tensor else None for x in tree.tensors((args, kwargs))]
        places = {id(x): _Input(place) for place, x in enumerate(plain) if x is not None}
        self._inputs = _copied((args, kwargs), lambda x: places.get(id(x), x))
        """Without the plain tensors: those torch saves, by their places."""
        self._counted, self._draws = batchnorm.counted(), _draws()
        self._results: list[_Result] = []

    def __call__(self, *tensors: Tensor) -> Any:
        if self._given is None:
            return self._again(tensors)
        (args, kwargs), self._given = self._given, None
        modes = tuple(each.training for each in self._module.modules())
        slots = self._changes.get(modes)
        self._before = [slot.state() for slot in (_slots(self._module) if slots is None else slots)]
        result = self._keeping(args, kwargs) if self._selective else self._forward(*args, **kwargs)
        if slots is None:
            known = {(id(state.slot.owner), state.slot.name) for state in self._before}
            new = [slot.missing() for slot in _slots(self._module) if (id(slot.owner), slot.name) not in known]
            self._before = [state for state in (*self._before, *new) if state.is_past()]
            self._changes[modes] = [state.learnt() for state in self._before]
        return result

    def _keeping(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        hooks = saved_tensors_hooks_now()
        assert hooks is not None  # those of torch.utils.checkpoint
        pack, unpack = hooks
        needed = 0  # results made before the last tensor was saved: torch computes again no further than that

        def packed(tensor: Tensor) -> Any:
            nonlocal needed
            needed = len(self._results)
            return pack(tensor)

        packed.__qualname__ = pack.__qualname__  # by which meters know that they are in a checkpoint
        with saved_tensors_hooks(packed, unpack), _Keep(self._results):
            result = self._forward(*args, **kwargs)
        for place, kept in enumerate(self._results):
            if place >= needed or kept.is_past():
                kept.drop()
        return result

    def _again(self, tensors: tuple[Tensor, ...]) -> Any:
        args, kwargs = _copied(self._inputs, lambda x: tensors[x.place] if isinstance(x, _Input) else x)
        with ExitStack() as stack:
            stack.enter_context(batchnorm.counting(self._counted))
            stack.enter_context(_drawing(self._draws))
            stack.enter_context(_as_before(self._before))
            if self._selective:
                stack.enter_context(_Reuse(self._results))
            return self._forward(*args, **kwargs)


# What a block changes beside its result


@dataclass(frozen=True, slots=True)
class _Slot:
    """A buffer or an attribute of a module."""

    owner: dict[str, Any]
    name: str
    in_place: bool = True

    def state(self) -> "_State":
        value = self.owner.get(self.name, _MISSING)
        copies = self.in_place and isinstance(value, Tensor)
        return _State(self, value, value.detach().clone() if copies else None, version(value) if copies else 0)

    def missing(self) -> "_State":
        return _State(self, _MISSING, None, 0)


_MISSING = object()


@dataclass(frozen=True, slots=True)
class _State:
    """A slot as it was at some time."""

    slot: _Slot
    value: Any
    copy: Tensor | None
    version: int

    def is_past(self) -> bool:
        """Whether the slot is in another state now."""
        if self.slot.owner.get(self.slot.name, _MISSING) is not self.value:
            return True
        return self.copy is not None and (
            version(self.value) != self.version or not torch.equal(self.value.detach(), self.copy)
        )

    def learnt(self) -> _Slot:
        """The slot, once it is past: of what is replaced, not changed, there is nothing to copy."""
        return replace(self.slot, in_place=self.slot.owner.get(self.slot.name) is self.value)

    def put(self) -> None:
        if self.value is _MISSING:
            self.slot.owner.pop(self.slot.name, None)
            return
        self.slot.owner[self.slot.name] = self.value
        if self.copy is not None:
            self.value.data.copy_(self.copy)  # not a change to those who have saved it: it is put back


def _slots(module: nn.Module) -> Iterator[_Slot]:
    for each in module.modules():
        yield from (_Slot(own_buffers(each), name) for name, buffer in own_buffers(each).items() if buffer is not None)
        yield from (
            _Slot(vars(each), name) for name in vars(each) if not name.startswith("_") and name not in _NO_STATE
        )


_NO_STATE = {"training", "forward"}


@contextmanager
def _as_before(before: list[_State]) -> Iterator[None]:
    now = [state.slot.state() for state in before]
    for state in before:
        state.put()
    try:
        yield
    finally:
        for state in now:
            state.put()


def _draws() -> tuple[Any, Any]:
    """The state of the random numbers that are not torch's."""
    return random.getstate(), numpy.random.get_state()


@contextmanager
def _drawing(draws: tuple[Any, Any]) -> Iterator[None]:
    now = _draws()
    try:
        _draw_from(draws)
        yield
    finally:
        _draw_from(now)


def _draw_from(draws: tuple[Any, Any]) -> None:
    random.setstate(draws[0])
    numpy.random.set_state(draws[1])


@dataclass(frozen=True, slots=True)
class _Input:
    """In place of a tensor that a block is given."""

    place: int


def _copied(thing: Any, leaf: Callable[[Any], Any]) -> Any:
    """Containers and objects anew, ``leaf`` of all else: a block may add or write to what it is given."""
    if type(thing) in (list, tuple):
        return type(thing)(_copied(item, leaf) for item in thing)
    if type(thing) is dict:
        return {key: _copied(item, leaf) for key, item in thing.items()}
    if _is_cache(thing):
        new = copy.copy(thing)
        for name, value in vars(thing).items():  # of layers, or of other caches: an encoder's and a decoder's
            if isinstance(value, list):
                setattr(new, name, [copy.copy(each) for each in value])
            elif isinstance(value, dict) or _is_cache(value):
                setattr(new, name, _copied(value, leaf))
        return new
    if _carries_tensors(thing):
        new = copy.copy(thing)
        vars(new).update({name: _copied(value, leaf) for name, value in vars(thing).items()})
        return new
    return leaf(thing)


def _carries_tensors(thing: Any) -> bool:
    """Whether it is an object of the user's that takes tensors from block to block."""
    if isinstance(thing, Tensor | nn.Module | type) or callable(thing) or not hasattr(thing, "__dict__"):
        return False
    return any(isinstance(leaf, Tensor | _Input) for leaf in tree_leaves(vars(thing)))


def _is_cache(thing: Any) -> bool:
    """Of keys and values, as transformers hand them through their blocks."""
    return hasattr(thing, "get_seq_length") and not isinstance(thing, nn.Module)


def is_empty_cache(thing: Any) -> bool:
    """Of no use in training, and would hold the keys and values of all blocks: transformers leave it out too."""
    return _is_cache(thing) and thing.get_seq_length() == 0


# What selective recomputation keeps


class _Result:
    """What an operation made; None once it was dropped."""

    def __init__(self, func: Any, value: Any):
        self.func, self.value = func, tree_map_only(Tensor, detached_alias, value)
        self._versions = [version(leaf) for leaf in tree_leaves(self.value) if isinstance(leaf, Tensor)]

    def is_past(self) -> bool:
        """Whether it was changed in place."""
        now = [version(leaf) for leaf in tree_leaves(self.value) if isinstance(leaf, Tensor)]
        return now != self._versions

    def drop(self) -> None:
        self.value, self._versions = None, []


class _Keep(TorchDispatchMode):
    """Notes the results worth keeping, in order."""

    def __init__(self, results: list[_Result]):
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if worth_keeping(func, args, kwargs or {}):
            self._results.append(_Result(func, out))
        return out


class _Reuse(TorchDispatchMode):
    """Hands them out again, each once; computes those that were dropped or used."""

    def __init__(self, results: list[_Result]):
        super().__init__()
        self._results = iter(results)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kept = next(self._results, None) if worth_keeping(func, args, kwargs or {}) else None
        if kept is None or kept.func is not func or kept.value is None or kept.is_past():
            return func(*args, **(kwargs or {}))
        out = kept.value
        kept.drop()
        return out
