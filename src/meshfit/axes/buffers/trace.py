"""The operations of one call of a module, and the part of them that updates its buffers.

That part begins where the batch is summed up: in

    counts = one_hot.sum(0)                                 a statistic: of the whole batch, the sum over its parts
    self.size.mul_(0.9).add_(counts, alpha=0.1)             made again, from the sum over all parts
    self.codes.copy_(self.total / self.size[:, None])       made again: what is derived follows

``BufferUpdate`` names the statistics and the operations after them by their place in the call. ``Collect`` picks the
statistics out of a call, ``replay`` makes the update from those of the whole batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from meshfit.anatomy.aten import WRITES
from meshfit.torch_private import (
    ThreadValue,
    TorchDispatchMode,
    schema_of,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

SUM, MEAN, MAX, MIN = "sum", "mean", "max", "min"
SAME = ("aten.detach.default", "aten.alias.default")
"""Operations that autograd adds as it sees fit: they do not count."""


@dataclass(frozen=True, slots=True)
class View:
    """A state, or a part of its memory, as an operation met it."""

    state: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an operation of the call made."""

    value: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number that counts samples: of the whole batch, the sum of the parts'."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Whatever the call has there: a setting, or a tensor that does not depend on samples."""


Argument = View | Made | Number | Setting


@dataclass(frozen=True, slots=True)
class Statistic:
    """How the results of an operation for parts of a batch make that for the whole."""

    kind: str
    base: int | None = None
    """The argument to which the operation adds it, if the result is more than the statistic."""
    in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class BufferUpdate:
    """How one call of a module updates buffers, as plain data."""

    names: tuple[str, ...]
    """Of all operations of the call, in order."""
    steps: Mapping[int, tuple[Argument, ...]]
    """The operations that are made again, by place: where each argument comes from."""
    makes: Mapping[int, tuple[int, ...]]
    """What the values that an operation makes are known as; -1 where it makes none."""
    statistics: Mapping[int, Statistic]
    """The operations whose (first) result is a statistic."""
    results: Mapping[str, View | Made]
    """Where the new value of each buffer is at the end."""

    @property
    def exchanged(self) -> bool:
        """Whether it depends on the samples at all."""
        return bool(self.statistics) or any(Number() in step for step in self.steps.values())


def storage(tensor: Tensor) -> int:
    return storage_id(tensor)


@cache
def _written(func: Any) -> tuple[tuple[int | None, str], ...]:
    """Places and names of the arguments that an operation writes to."""
    unsaid = WRITES.get(schema_of(func).name.partition("::")[2], ())
    found: list[tuple[int | None, str]] = []
    for place, argument in enumerate(schema_of(func).arguments):
        said = argument.alias_info is not None and argument.alias_info.is_write
        if said or argument.name in unsaid:
            found.append((None if argument.kwarg_only else place, argument.name))
    return tuple(found)


def written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found = [
        args[place] if place is not None and place < len(args) else kwargs.get(name) for place, name in _written(func)
    ]
    return [t for each in found for t in tree_leaves(each) if isinstance(t, Tensor)]


@cache
def name_of(func: Any) -> str:
    return str(func)


def without_dropout(name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operation; of dropout's, with nothing dropped: so that parts can be compared with the whole."""
    if name == "aten.bernoulli_.float":
        return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
    if name == "aten.native_dropout.default":
        return func(args[0], 0.0, *args[2:], **kwargs)
    return func(*args, **kwargs)


class Differs(Exception):
    """A call did other operations than those it was tried with."""


@dataclass
class Collected:
    """What one call leaves for the update: its statistics, and the settings of the operations after them."""

    update: BufferUpdate
    statistics: dict[int, Tensor] = field(default_factory=dict)
    numbers: dict[tuple[int, int], float] = field(default_factory=dict)
    """Those that count samples, by operation and argument."""
    calls: dict[int, tuple[Any, list[Any], Any]] = field(default_factory=dict)


class Opaque(TorchDispatchMode):
    """One that does not look into calls of some modules: see ``look_away``."""

    looks = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.looks:
            return func(*args, **kwargs)
        if name_of(func) in SAME:
            out = func(*args, **kwargs)
            self.same(args[0], out)
            return out
        return self.see(func, args, kwargs)

    def same(self, tensor: Tensor, other: Tensor) -> None:
        """``other`` is another name for ``tensor``."""

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def called(self, result: Any) -> None:
        """A module that was not looked into has returned."""

    @contextmanager
    def watching(self) -> Iterator["Self"]:
        with _active.set_to(self), self:
            yield self


_active: ThreadValue[Opaque | None] = ThreadValue("buffers.watched", None)
"""The call that is being watched in this thread, if there is one."""


def look_away(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Around the forward of a module inside one that is watched: none of its operations count as that one's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mode = _active.get()
        if mode is None or not mode.looks:
            return forward(*args, **kwargs)
        mode.looks = False
        try:
            result = forward(*args, **kwargs)
        finally:
            mode.looks = True
        mode.called(result)
        return result

    return run


class Collect(Opaque):
    """Within ``watching`` a module is called once; ``done`` is what its update needs. Which of ``updates`` it is shows
    as it goes."""

    def __init__(self, updates: Iterable[BufferUpdate], *, dropout: bool = True):
        super().__init__()
        self._dropout = dropout
        self._open = [Collected(update) for update in updates]
        self._at = 0

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        at, name = self._at, name_of(func)
        self._at += 1
        self._open = [c for c in self._open if at < len(c.update.names) and c.update.names[at] == name]
        bases: dict[int, Tensor] = {}
        flat, spec = [], None
        for place, found in enumerate(self._open):
            step, statistic = found.update.steps.get(at), found.update.statistics.get(at)
            if step is None and statistic is None:
                continue
            if spec is None:
                flat, spec = tree_flatten((args, kwargs))
            if statistic is not None and statistic.base is not None:
                bases[place] = flat[statistic.base].detach().clone()
            if step is not None:
                kept = [None if isinstance(a, View | Made) else leaf for a, leaf in zip(step, flat, strict=True)]
                found.calls[at] = (func, kept if statistic is None else [None] * len(kept), spec)
                found.numbers |= {(at, i): leaf for i, leaf in enumerate(flat) if isinstance(step[i], Number)}
        out = func(*args, **kwargs) if self._dropout else without_dropout(name, func, args, kwargs)
        for place, found in enumerate(self._open):
            if at in found.update.statistics:
                made = tree_leaves(out)[0].detach()
                found.statistics[at] = made - bases[place] if place in bases else made.clone()
        return out

    @property
    def done(self) -> Collected:
        whole = [found for found in self._open if len(found.update.names) == self._at]
        if not whole:
            raise Differs
        return whole[0]


@torch.no_grad()
def replay(
    update: BufferUpdate,
    calls: Mapping[int, tuple[Any, list[Any], Any]],
    statistics: Mapping[int, Tensor],
    numbers: Mapping[tuple[int, int], float],
    states: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The new values of the buffers; ``states`` holds the old ones, and is changed."""
    values: dict[int, Tensor] = {}

    def argument(at: int, place: int, where: Argument, given: Any) -> Any:
        if isinstance(where, Made):
            return values[where.value]
        if isinstance(where, View):
            return _view(states, where)
        return numbers[at, place] if isinstance(where, Number) else given

    for at in sorted({*update.steps, *statistics}):
        statistic, makes = update.statistics.get(at), update.makes.get(at, ())
        if statistic is not None and statistic.base is None:
            values[makes[0]] = statistics[at].clone()
            continue
        func, given, spec = calls[at]
        flat = [argument(at, i, a, given[i]) for i, a in enumerate(update.steps[at])]
        if statistic is not None and statistic.base is not None:
            base = flat[statistic.base]
            out: Any = base.add_(statistics[at]) if statistic.in_place else base + statistics[at]
        else:
            args, kwargs = tree_unflatten(flat, spec)
            out = func(*args, **kwargs)
        for number, made in zip(makes, tree_leaves(out), strict=False):
            if number >= 0:
                values[number] = made
    return {
        name: (values[where.value] if isinstance(where, Made) else _view(states, where)).detach().clone()
        for name, where in update.results.items()
    }


def _view(states: Mapping[str, Tensor], where: View) -> Tensor:
    held = states[where.state]
    if (tuple(held.shape), held.stride(), held.storage_offset()) == (where.size, where.stride, where.offset):
        return held
    return held.as_strided(where.size, where.stride, where.offset)
