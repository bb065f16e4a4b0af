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
from functools import cache, cached_property
from typing import Any, Self

import torch
from torch import Tensor

from meshfit.anatomy.aten import StridedView
from meshfit.torch_private.autograd import ThreadValue
from meshfit.torch_private.operators import TorchDispatchMode
from meshfit.torch_private.tensors import storage_id
from meshfit.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten

SUM, MEAN, MAX, MIN = "sum", "mean", "max", "min"
SAME = ("aten.detach.default", "aten.alias.default")
"""Operations that autograd adds as it sees fit: they do not count."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that counts samples: of the whole batch, the sum of the parts'."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Whatever the call has there: a setting, or a tensor that does not depend on samples."""


Argument = StridedView | Number | Setting
"""A view is of a buffer, or of what an earlier step made."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """How the results of an operation for parts of a batch make that for the whole."""

    kind: str
    base: int | None = None
    """The argument to which the operation adds it, if the result is more than the statistic."""
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """An operation that is made again."""

    arguments: tuple[Argument, ...]
    """Where each comes from; none for one whose result is a statistic."""
    outs: tuple[StridedView | None, ...]
    written: Mapping[int, int]
    """Values that it changes in place, each with the value that the change makes."""


@dataclass(frozen=True, kw_only=True)
class BufferUpdate:
    """How one call of a module updates buffers, as plain data."""

    names: tuple[str, ...]
    """Of all operations of the call, in order."""
    steps: Mapping[int, UpdateStep]
    """The operations that are made again, by their place among those."""
    statistics: Mapping[int, Statistic]
    """Those whose (first) result is a statistic."""
    states: Mapping[str, int]
    """The value that each buffer has at the start."""
    results: Mapping[str, StridedView]
    """Where its new value is at the end."""

    @cached_property
    def made(self) -> frozenset[StridedView]:
        """What its steps make in memory of its own, whole: another call may make it of another shape."""
        changed = {*self.states.values(), *(new for step in self.steps.values() for new in step.written.values())}
        outs = (view for step in self.steps.values() for view in step.outs if view is not None)
        return frozenset(view for view in outs if view.value not in changed)

    @property
    def exchanged(self) -> bool:
        """Whether it depends on the samples at all."""
        return bool(self.statistics) or any(Number() in step.arguments for step in self.steps.values())


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


class Opaque:
    """A mode that does not look into calls of some modules: see ``look_away``."""

    looks = True

    def called(self, result: Any) -> None:
        """A module that was not looked into has returned."""

    @contextmanager
    def watching(self) -> Iterator["Self"]:
        with _active.set_to(self), self:  # type: ignore[attr-defined]
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


class Collect(Opaque, TorchDispatchMode):
    """Within ``watching`` a module is called once; ``done`` is what its update needs. Which of ``updates`` it is shows
    as it goes."""

    def __init__(self, updates: Iterable[BufferUpdate], states: Mapping[str, Tensor], *, dropout: bool = True):
        super().__init__()
        self._offsets = {storage_id(t): t.storage_offset() for t in states.values()}
        self._dropout = dropout
        self._open = [Collected(update) for update in updates]
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs, at, name = kwargs or {}, self._at, name_of(func)
        if not self.looks or name in SAME:
            return func(*args, **kwargs)
        self._at += 1
        self._open = [c for c in self._open if at < len(c.update.names) and c.update.names[at] == name]
        bases: dict[int, Tensor] = {}
        wanted = [(place, found) for place, found in enumerate(self._open) if at in found.update.steps]
        flat, spec = tree_flatten((args, kwargs)) if wanted else ([], None)
        for place, found in wanted:
            given, statistic = found.update.steps[at].arguments, found.update.statistics.get(at)
            views = [(a, leaf) for a, leaf in zip(given, flat, strict=False) if isinstance(a, StridedView)]
            if not all(self._is_view(leaf, view) or self._is_made(leaf, view, found.update) for view, leaf in views):
                self._open = [other for other in self._open if other is not found]
                continue
            if statistic is None:
                kept = [None if isinstance(a, StridedView) else leaf for a, leaf in zip(given, flat, strict=True)]
                found.calls[at] = (func, kept, spec)
                found.numbers |= {(at, i): leaf for i, leaf in enumerate(flat) if isinstance(given[i], Number)}
            elif statistic.base is not None:
                bases[place] = flat[statistic.base].detach().clone()
        out = func(*args, **kwargs) if self._dropout else without_dropout(name, func, args, kwargs)
        for place, found in wanted:
            if at in found.update.statistics:
                made = tree_leaves(out)[0].detach()
                found.statistics[at] = made - bases[place] if place in bases else made.clone()
        return out

    def _is_view(self, tensor: Any, view: StridedView) -> bool:
        """Whether an operation met the same elements as when it was tried: a row by a number of Python's may differ."""
        offset = tensor.storage_offset() - self._offsets.get(storage_id(tensor), 0)
        if (tuple(tensor.shape), offset) != (view.size, view.offset):
            return False
        return all(n < 2 or a == b for n, a, b in zip(view.size, view.stride, tensor.stride(), strict=True))

    def _is_made(self, tensor: Tensor, view: StridedView, update: BufferUpdate) -> bool:
        """Whether both are the whole of what a step has made."""
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        return (
            whole and view in update.made and tensor.dim() == len(view.size) and storage_id(tensor) not in self._offsets
        )

    def done(self, states: Mapping[str, Tensor]) -> Collected:
        """``states`` as they are after the call."""
        for found in self._open:
            alike = all(self._is_view(states[name], view) for name, view in found.update.results.items())
            if len(found.update.names) == self._at and alike:
                return found
        raise Differs


@torch.no_grad()
def replay(
    update: BufferUpdate,
    calls: Mapping[int, tuple[Any, list[Any], Any]],
    statistics: Mapping[int, Tensor],
    numbers: Mapping[tuple[int, int], float],
    states: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The new values of the buffers; ``states`` holds the old ones, and is changed."""
    memory = {value: states[name].untyped_storage() for name, value in update.states.items()}
    others: dict[StridedView, Tensor] = {}
    """What was made of another shape than when it was tried."""

    def argument(at: int, place: int, where: Argument, given: Any) -> Any:
        if isinstance(where, StridedView):
            return others[where] if where in others else where.on(memory[where.value])
        return numbers[at, place] if isinstance(where, Number) else given

    for at, step in sorted(update.steps.items()):
        statistic = update.statistics.get(at)
        if statistic is None:
            func, given, spec = calls[at]
            flat = [argument(at, i, a, given[i]) for i, a in enumerate(step.arguments)]
            args, kwargs = tree_unflatten(flat, spec)
            out = func(*args, **kwargs)
        elif statistic.base is None:
            out = statistics[at].clone()
        else:
            base = argument(at, statistic.base, step.arguments[statistic.base], None)
            out = base.add_(statistics[at]) if statistic.in_place else base + statistics[at]
        memory |= {new: memory[old] for old, new in step.written.items() if old in memory}
        for view, made in zip(step.outs, tree_leaves(out), strict=False):
            if view is not None and view in update.made and tuple(made.shape) != view.size:
                others[view] = made
            elif view is not None and view.value not in memory:
                memory[view.value] = _laid_out(made, view)
    return {name: view.on(memory[view.value]).clone() for name, view in update.results.items()}


def _laid_out(made: Tensor, view: StridedView) -> torch.UntypedStorage:
    """The memory of ``made``, laid out as in the call that was tried."""
    if tuple(made.shape) != view.size:
        raise Differs
    if (tuple(made.stride()), made.storage_offset()) != (view.stride, view.offset):
        made = torch.empty_strided(view.size, view.stride, dtype=made.dtype, device=made.device).copy_(made)
    return made.untyped_storage()
