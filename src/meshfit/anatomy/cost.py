"""What each event of a forward costs: arithmetic, traffic to memory, and bytes kept for backward.

``Meter`` watches one forward, on meta, fake or real tensors, and books what it sees to the event under way.

    flops     by aten operation, see ``flops``
    traffic   bytes of the tensors each operation takes and makes; views are free, a lookup reads the rows it returns
    kept      storages that autograd saves, each once, at the event that saves it first. Not parameters, buffers
              and the model's inputs: those are there anyway. Under autocast the low-precision copies of weights
              are kept like activations, because that is what they are in memory: made in forward, freed in backward

Only what the outputs depend on has a backward: ``Meter.reach`` walks the graph of autograd back from them, and finds
the operations again by the sequence numbers of its nodes.

Three things escape: tensors that an ``autograd.Function`` hangs on its ``ctx`` as plain attributes are kept unseen,
its backward is taken to be that of the operations in its forward, and kernels outside the dispatcher (Triton,
compiled code) are not counted at all.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from meshfit.anatomy import kernels
from meshfit.anatomy.flops import backward_flops, forward_flops, has_flops, known_as, tensors
from meshfit.anatomy.trace import EventCost, StorageUse
from meshfit.torch_private import (
    CHECKPOINT_INPUTS,
    COPY_NODE,
    IN_PLACE_NODE,
    VIEWS_NOT_SAID,
    OpOverload,
    TorchDispatchMode,
    checkpoint_now,
    is_composite,
    is_wrapper,
    next_sequence_number,
    packet_of,
    schema_of,
    sequence_number,
    storage_id,
    watched_functions,
    without_torch_function,
)

aten = torch.ops.aten

_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
_FREE = {*VIEWS_NOT_SAID, *_EMPTY}
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}

_BESIDE = -1
"""In place of a node: torch.utils.checkpoint holds the inputs of what it recomputes outside of the graph."""


class Meter:
    """Books the cost of one forward to its events.

    with Meter([*model.parameters(), *model.buffers(), *inputs]) as meter:
        meter.start(0)
        ...
        meter.stop()
        meter.reach(outputs)
    meter.costs[0]

    Inside a ``FakeTensorMode``, not around it. Meta tensors belong to no device: ``target`` says whose kernels
    they stand for (``kernels``). torch ignores autocast on meta tensors; fake ones follow it.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, target: str = "cuda"):
        self.costs: dict[int, EventCost] = {}
        """By event, in the order in which they started; filled when the meter is left."""
        self.outside = EventCost()
        """What ran between events."""
        self._target = target
        self._known = {_key(tensor): tensor for tensor in known if _has_storage(tensor)}
        self._event: int | None = None
        self._spent: dict[int | None, list[int]] = {None: [0, 0, 0]}  # flops, bytes read, bytes written
        self._backward: list[tuple[int, int | None, int]] = []  # node, event, flops
        self._saved: dict[int, list[tuple[int, int | None]]] = {}  # storage -> node and event of each save
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the key from being reused
        self._uses: dict[int | None, dict[int, StorageUse]] = {}  # event -> by storage
        self._dear: dict[int, StorageUse] = {}  # by storage
        self._reached: set[int] | None = None
        self._hidden: dict[int, int] = {}  # nodes made on behalf of another -> that one
        self._freed: set[int] = set()
        self._function: tuple[int, type] | None = None  # the autograd.Function under way: its node, its class
        self._touched: dict[int, StorageWeakRef] = {}  # within it, storages computed from what needs a gradient
        self._contexts = ExitStack()

    def __enter__(self) -> "Meter":
        self._contexts.enter_context(kernels.standing_for(self._target))
        self._contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        self._contexts.enter_context(watched_functions(self._apply))
        self._contexts.enter_context(_Operations(self._count))
        return self

    def __exit__(self, *problem: Any) -> None:
        self._contexts.close()
        self._freed = {key for key, (storage, _) in self._storages.items() if storage.expired()}
        costs = self._costs()
        self.outside = costs.pop(None)
        self.costs = {key: cost for key, cost in costs.items() if key is not None}

    def start(self, key: int) -> None:
        """What follows belongs to event ``key``. Events do not nest; one may go on after another."""
        if self._event is not None:
            raise RuntimeError(f"event {key} starts inside event {self._event}")
        self._event = key
        self._spent.setdefault(key, [0, 0, 0])

    def stop(self) -> None:
        self._event = None

    def know(self, tensors: Iterable[Tensor]) -> None:
        """More tensors that are no activations: parameters and buffers of a copy that stands in for a module."""
        self._known |= {_key(tensor): tensor for tensor in tensors if _has_storage(tensor)}

    def reach(self, outputs: Iterable[Tensor]) -> None:
        """Count for backward only what ``outputs`` depend on.

        Without it every operation on something that needs a gradient counts, and every saved tensor that is
        still alive when the meter is left.
        """
        waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
        reached, seen = set(), set(waiting)
        while waiting:
            node = waiting.pop()
            number = sequence_number(node)
            reached.add(number)
            if node.name().endswith(IN_PLACE_NODE):  # a write to a view: hides the node of the write, made before
                reached |= {number - 1, self._hidden.get(number - 1, number - 1)}
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        self._reached = reached

    @property
    def total(self) -> EventCost:
        return sum(self.costs.values(), self.outside)

    def _costs(self) -> dict[int | None, EventCost]:
        backward, kept = dict.fromkeys(self._spent, 0), dict.fromkeys(self._spent, 0)
        for node, event, flops in self._backward:
            if self._counts(node):
                backward[event] += flops
        for key, saves in self._saved.items():
            events = [event for node, event in saves if self._counts(node)]
            if events and (self._reached is not None or key not in self._freed):
                kept[events[0]] += self._storages[key][1]
        uses = self._used()
        return {
            event: EventCost(flops, backward[event], read, written, kept[event], uses.get(event, ()))
            for event, (flops, read, written) in self._spent.items()
        }

    def _used(self) -> dict[int | None, tuple[StorageUse, ...]]:
        """By event, memory that is saved, dear, or of use to others too."""
        events = Counter(key for used in self._uses.values() for key in used)
        saved = {(key, event) for key, saves in self._saved.items() for node, event in saves if self._counts(node)}
        numbers = {key: number for number, key in enumerate(events)}
        found: dict[int | None, tuple[StorageUse, ...]] = {}
        for event, used in self._uses.items():
            found[event] = tuple(u for k, u in used.items() if u.saved or u.dear or not u.made or events[k] > 1)
            for key, use in used.items():
                use.storage, use.bytes = numbers[key], 0 if key in self._known else self._storages[key][1]
                use.saved = use.saved and (key in self._known or (key, event) in saved)
        return found

    def _use(self, tensor: Tensor) -> StorageUse:
        """What is noted of ``tensor``'s memory in the event under way."""
        key = _key(tensor)
        if key not in self._storages:
            self._storages[key] = (_weak(tensor), tensor.untyped_storage().nbytes())
        return self._uses.setdefault(self._event, {}).setdefault(key, StorageUse())

    def _counts(self, node: int) -> bool:
        return self._reached is None or node == _BESIDE or self._hidden.get(node, node) in self._reached

    def _count(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Book one operation that has run."""
        with without_torch_function():  # a recorder of functions must not see what the meter looks at
            self._book(func, args, kwargs, out)

    def _book(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        op, view = known_as(packet_of(func)), _is_view(func)
        taken = tensors(args) + tensors(kwargs) if kwargs else tensors(args)
        if self._function is not None and any(self._needs(tensor) for tensor in taken):
            self._touched |= {_key(made): _weak(made) for made in tensors(out) if _has_storage(made)}
        if op in _EMPTY:  # memory without content: what fills it in place makes nothing
            self._note([], tensors(out), 0, False)
        if view:
            return
        spent = self._spent.setdefault(self._event, [0, 0, 0])
        written = sum(map(_bytes, tensors(out)))
        most = written if op in _LOOKUPS else None
        spent[1] += sum(_bytes(tensor) if most is None else min(_bytes(tensor), most) for tensor in taken)
        spent[2] += written
        flops = forward_flops(op, args, kwargs, out) if has_flops(op) else 0
        self._note(taken, tensors(out), flops, worth_keeping(func, args, kwargs))
        if not has_flops(op):
            return
        spent[0] += flops
        if self._function is not None or torch.is_grad_enabled():
            again = flops if self._recomputed() else 0
            backward = backward_flops(op, args, out, flops, self._needs) + again
            self._backward.append((self._node(), self._event, backward))

    def _note(self, taken: list[Tensor], made: list[Tensor], flops: int, dear: bool) -> None:
        """Which memory an operation has read, made or changed."""
        given = {_key(tensor) for tensor in taken if _has_storage(tensor)}
        for tensor in taken:
            if _has_storage(tensor) and _key(tensor) not in self._known:
                self._use(tensor)
        for tensor in made:
            if not _has_storage(tensor) or (key := _key(tensor)) in self._known:
                continue
            use = self._use(tensor)
            if key in given:  # changed in place: what made it has to run again with the rest
                self._dear.pop(key, use).dear = False
            else:
                use.made, use.dear, use.late, use.flops = True, dear, True, flops
                self._dear |= {key: use} if dear else {}
                flops = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves ``tensor``."""
        with without_torch_function():
            return self._save(tensor, saver=sys._getframe(1).f_code.co_filename)

    def _save(self, tensor: Tensor, saver: str) -> Tensor:
        if _has_storage(tensor):
            self._use(tensor).saved = True
            for use in self._uses[self._event].values():
                use.late = False
        if _has_storage(tensor) and (key := _key(tensor)) not in self._known:
            if key not in self._storages:
                self._storages[key] = (_weak(tensor), tensor.untyped_storage().nbytes())
            self._spent.setdefault(self._event, [0, 0, 0])
            node, source = _BESIDE if saver == checkpoint.__file__ else self._node(), tensor.grad_fn
            if source is not None and sequence_number(source) == node and source.name() == COPY_NODE:
                self._hidden[node] = node - 1  # an operation in place, saving a copy of what it will overwrite
            self._saved.setdefault(key, []).append((node, self._event))
        # A node that held its own output, with the way back to itself, would never be freed.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def _apply(self, function: type, apply: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an ``autograd.Function``. Its operations run without a graph: its own node stands for them all."""
        if self._function is not None:
            return apply(*args, **kwargs)
        beside = function.__name__ == CHECKPOINT_INPUTS
        self._function = _BESIDE if beside else next_sequence_number(), function
        try:
            return apply(*args, **kwargs)
        finally:
            self._function, self._touched = None, {}

    def _node(self) -> int:
        """The node that autograd has made for the operation under way: numbers are given in the order of making."""
        return self._function[0] if self._function is not None else next_sequence_number() - 1

    def _needs(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        if self._function is None or tensor.requires_grad:
            return tensor.requires_grad
        return _has_storage(tensor) and _key(tensor) in self._touched

    def _recomputed(self) -> bool:
        """Whether backward will run this operation again, under torch.utils.checkpoint.

        Counted for the whole region; torch stops short of what only made its output.
        """
        if self._function is not None:
            return issubclass(self._function[1], checkpoint.CheckpointFunction)
        return checkpoint_now() is not None


def worth_keeping(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether to keep what ``func`` made when the rest is computed again: products, convolutions, attention.

    Not what has drawn random numbers: left out when the rest runs again, it would shift those that follow.
    """
    if not _is_dear(func):
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return given == 0
    return False


@cache
def _is_dear(func: Any) -> bool:
    return isinstance(func, OpOverload) and not schema_of(func).is_mutable and has_flops(known_as(packet_of(func)))


class _Operations(TorchDispatchMode):
    """Calls ``count`` after every operation."""

    def __init__(self, count: Callable[[Any, tuple, dict[str, Any], Any], None]):
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(_wraps(kind) for kind in types):
            return NotImplemented  # a tensor made of others (DTensor): it comes back here with those
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        return out


@cache
def _is_view(func: Any) -> bool:
    """Whether ``func`` makes nothing: a view of what it was given, or memory without content."""
    returns = [result.alias_info for result in schema_of(func).returns]
    aliases = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return aliases or packet_of(func) in _FREE


_composite, _wraps = cache(is_composite), cache(is_wrapper)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not _wraps(type(tensor))


def _key(tensor: Tensor) -> int:
    return storage_id(tensor)


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor is no larger than the memory behind it."""
    if not _has_storage(tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
