"""What each event of a forward costs: arithmetic, traffic to memory, and bytes kept for backward.

``Meter`` watches one forward, on meta, fake or real tensors, and books what it sees to the event under way.

    flops     by aten operation, see ``flops``
    traffic   bytes of the tensors each operation takes and makes; views are free, a lookup reads the rows it returns
    kept      storages that autograd saves, each once, at the event that saves it first. Not parameters, buffers
              and the model's inputs: those are there anyway. Under autocast, on fake tensors, the low-precision
              copies of weights are kept like activations, because that is what they are in memory: made in forward,
              freed in backward
    rounded   those copies, where ``rounds`` tells sizes under autocast from a forward without (autocast.py)

Only what the outputs depend on has a backward: ``Meter.reach`` walks the graph of autograd back from them, and finds
the operations again by the sequence numbers of its nodes.

Three things escape: tensors that an ``autograd.Function`` hangs on its ``ctx`` as plain attributes are kept unseen,
its backward is taken to be that of the operations in its forward, and kernels outside the dispatcher (Triton,
compiled code) are not counted at all.
"""

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from meshfit.anatomy import kernels
from meshfit.anatomy.autocast import RoundedSizes
from meshfit.anatomy.flops import backward_flops, forward_flops, has_flops, known_as, tensors
from meshfit.anatomy.operations import LOOKUPS, Operation, Streaming, backward_of, merged, operation_of
from meshfit.anatomy.running import EMPTY, Operations, bytes_of, has_storage, is_view, weak_storage, worth_keeping
from meshfit.anatomy.trace import EventCost, StorageUse
from meshfit.torch_private.autograd import (
    CHECKPOINT_INPUTS,
    COPY_NODE,
    IN_PLACE_NODE,
    checkpoint_now,
    current_node,
    next_sequence_number,
    sequence_number,
    watched_functions,
)
from meshfit.torch_private.operators import packet_of, without_torch_function
from meshfit.torch_private.tensors import storage_id

aten = torch.ops.aten

_BESIDE = -1
"""In place of a node: torch.utils.checkpoint holds the inputs of what it recomputes outside of the graph."""


Saves = list[tuple[int, int | None]]
"""Node and event of each save of one storage."""


class Meter:
    """Books the cost of one forward to its events.

    with Meter([*model.parameters(), *model.buffers(), *inputs]) as meter:
        meter.start(0)
        ...
        meter.stop()
        meter.reach(outputs)
    meter.costs[0]

    Inside a ``FakeTensorMode``, not around it. Meta tensors belong to no device: ``target`` says whose kernels
    they stand for (``kernels``). torch ignores autocast on meta tensors; fake ones follow it. ``rounds``: what would
    be kept if the forward, in fp32, ran under autocast to a half precision: a copy for "each" product that takes a
    tensor, or one that is "shared". ``precision``: that of products of fp32 tensors; operations are then listed, event
    by event, for which ``reach`` runs a backward.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, target: str = "cuda", rounds: str = "", precision: str = ""):
        self.costs: dict[int, EventCost] = {}
        """By event, in the order in which they started; filled when the meter is left."""
        self.outside = EventCost()
        """What ran between events."""
        self._target, self._rounded = target, RoundedSizes(target, shared=rounds == "shared") if rounds else None
        self._known = {storage_id(tensor): tensor for tensor in known if has_storage(tensor)}
        self._event: int | None = None
        self._spent: dict[int | None, list[int]] = {None: [0, 0, 0]}  # flops, bytes read, bytes written
        self._backward: list[tuple[int, int | None, int]] = []  # node, event, flops
        self._saved: dict[int, Saves] = defaultdict(list)  # by storage
        self._saved_known: dict[int, Saves] = defaultdict(list)
        self._kept: dict[int, int] = {}  # bytes by storage, copies of it included
        self._passed: dict[int | None, int] = {}  # by event
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the key from being reused
        self._uses: dict[int | None, dict[int, StorageUse]] = defaultdict(dict)  # event -> by storage
        self._dear: dict[int, StorageUse] = {}  # by storage
        self._reached: set[int] | None = None
        self._hidden: dict[int, int] = {}  # nodes made on behalf of another -> that one
        self._freed: set[int] = set()
        self._function: tuple[int, type] | None = None  # the autograd.Function under way: its node, its class
        self._touched: dict[int, StorageWeakRef] = {}  # within it, storages computed from what needs a gradient
        self._precision, self._returning = precision, False
        self._ahead: dict[int | None, list[Operation]] = defaultdict(list)  # by event
        self._back: dict[int | None, list[Operation]] = defaultdict(list)
        self._begins: list[tuple[int, int | None]] = []  # the first node of each event, in the order of making
        self._contexts = ExitStack()

    def __enter__(self) -> "Meter":
        self._contexts.enter_context(kernels.standing_for(self._target, half=self._rounded is not None))
        self._contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        self._contexts.enter_context(watched_functions(self._apply))
        self._contexts.enter_context(Operations(self._count))
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
        self._begins.append((next_sequence_number(), key))
        self._spent.setdefault(key, [0, 0, 0])

    def stop(self) -> None:
        self._event = None
        self._begins.append((next_sequence_number(), None))

    def know(self, tensors: Iterable[Tensor]) -> None:
        """More tensors that are no activations: parameters and buffers of a copy that stands in for a module."""
        self._known |= {storage_id(tensor): tensor for tensor in tensors if has_storage(tensor)}

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
        if self._precision:
            self._go_back([output for output in outputs if output.grad_fn is not None])

    def _go_back(self, outputs: list[Tensor]) -> None:
        """Run the backward of ``outputs``, for its operations; where that fails (a kernel that refuses meta tensors),
        they are estimated from those of the forward."""
        wanted = [tensor for tensor in self._known.values() if tensor.requires_grad]
        losses = [output for output in outputs if not output.dim()] or outputs
        if not losses or not wanted:
            return
        self._returning = True
        try:
            ones = [torch.ones_like(loss) for loss in losses]
            torch.autograd.grad(losses, wanted, ones, allow_unused=True)
        except (RuntimeError, NotImplementedError):
            self._back.clear()
            self._back |= {event: [*map(backward_of, ahead)] for event, ahead in self._ahead.items()}
        finally:
            self._returning = False

    @property
    def total(self) -> EventCost:
        return sum(self.costs.values(), self.outside)

    def _costs(self) -> dict[int | None, EventCost]:
        backward, kept = dict.fromkeys(self._spent, 0), dict.fromkeys(self._spent, 0)
        for node, event, flops in self._backward:
            if self._counts(node):
                backward[event] += flops
        for key, saves in self._saved.items():
            counted = self._counted(saves)
            if counted and (self._reached is not None or key not in self._freed):
                for event, size in self._sizes(key, counted):
                    kept[event] += size
                    self._kept[key] = self._kept.get(key, 0) + size
        rounded = self._rounded_copies(kept)
        uses = self._used()
        same: dict[tuple[Operation, ...], tuple[Operation, ...]] = {}  # blocks that repeat share what they list
        listed = lambda some: same.setdefault(found := merged(some), found)
        return {
            event: EventCost(
                *(flops, backward[event], read, written, kept[event], rounded[event], self._passed.get(event, 0)),
                uses.get(event, ()),
                listed(self._ahead.get(event, ())),
                listed(self._back.get(event, ())),
            )
            for event, (flops, read, written) in self._spent.items()
        }

    def _sizes(self, key: int, saves: Saves) -> Iterable[tuple[int | None, int]]:
        """What is kept of one storage, by event."""
        size = self._storages[key][1]
        return [(saves[0][1], size)] if self._rounded is None else self._rounded.kept(key, size, saves)

    def _rounded_copies(self, kept: dict[int | None, int]) -> dict[int | None, int]:
        """Of parameters, by event; those of other tensors that were there before are added to ``kept``."""
        found = dict.fromkeys(self._spent, 0)
        if self._rounded is None:
            return found
        for key, saves in self._saved_known.items():
            tensor, events = self._known[key], self._rounded.rounds(key, self._counted(saves))
            size = tensor.untyped_storage().nbytes() // 2
            if events and tensor.requires_grad:
                found[events[0]] += size
            else:
                for event in events:
                    kept[event] += size
        return found

    def _used(self) -> dict[int | None, tuple[StorageUse, ...]]:
        """By event, memory that is saved, dear, or of use to others too."""
        events = Counter(key for used in self._uses.values() for key in used)
        saved = {(key, event) for key, saves in self._saved.items() for _, event in self._counted(saves)}
        numbers = {key: number for number, key in enumerate(events)}
        found: dict[int | None, tuple[StorageUse, ...]] = {}
        for event, used in self._uses.items():
            found[event] = tuple(u for k, u in used.items() if u.saved or u.dear or not u.made or events[k] > 1)
            for key, use in used.items():
                use.storage, use.bytes = numbers[key], 0 if key in self._known else self._size(key)
                use.saved = use.saved and (key in self._known or (key, event) in saved)
        return found

    def _size(self, key: int) -> int:
        size = self._storages[key][1]
        return self._kept.get(key) or (size if self._rounded is None else self._rounded.size(key, size))

    def _use(self, tensor: Tensor) -> StorageUse:
        """What is noted of ``tensor``'s memory in the event under way."""
        key = storage_id(tensor)
        if key not in self._storages:
            self._storages[key] = (weak_storage(tensor), tensor.untyped_storage().nbytes())
        return self._uses[self._event].setdefault(key, StorageUse())

    def _counted(self, saves: Saves) -> Saves:
        return [(node, event) for node, event in saves if self._counts(node)]

    def _counts(self, node: int) -> bool:
        return self._reached is None or node == _BESIDE or self._hidden.get(node, node) in self._reached

    def _count(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Book one operation that has run."""
        if self._returning:
            self._list_backward(func, args, kwargs, out)
            return
        op, view = known_as(packet_of(func)), is_view(func)
        taken = tensors(args) + tensors(kwargs) if kwargs else tensors(args)
        if self._function is not None and any(self._needs(tensor) for tensor in taken):
            self._touched |= {storage_id(made): weak_storage(made) for made in tensors(out) if has_storage(made)}
        if op in EMPTY:  # memory without content: what fills it in place makes nothing
            self._note([], tensors(out), 0, False)
        recorded = self._function is None and torch.is_grad_enabled() and any(map(self._needs, taken))
        if self._rounded is not None and (op in EMPTY or not view):
            strided = [[t for t in some if has_storage(t)] for some in (taken, tensors(out))]
            if self._precision:
                self._list_casts(self._rounded, op, strided[0])
            self._rounded.book(op, self._node() if recorded else None, *strided)
        listed = self._precision and (not view or op is aten.empty_like)
        if listed and (operation := operation_of(op, func, args, kwargs, out, self._precision, self._size_of)):
            self._ahead[self._event].append(operation)
        if view:
            return
        if recorded:
            self._pass(op, [*filter(self._needs, taken)], tensors(out))
        spent = self._spent[self._event]
        written = sum(map(bytes_of, tensors(out)))
        most = written if op in LOOKUPS else None
        spent[1] += sum(bytes_of(tensor) if most is None else min(bytes_of(tensor), most) for tensor in taken)
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

    def _list_casts(self, rounded: RoundedSizes, op: Any, taken: list[Tensor]) -> None:
        """What autocast copies for an operation; weights are cast once a forward, and counted apart."""
        for tensor in taken:
            if tensor.requires_grad and storage_id(tensor) in self._known:
                continue
            if moved := rounded.cast(op, tensor, bytes_of(tensor)):
                self._ahead[self._event].append(Streaming(moved))
                if self._needs(tensor) and torch.is_grad_enabled():
                    self._back[self._event].append(Streaming(moved))

    def _size_of(self, tensor: Tensor, node: int | None = None) -> int:
        """Bytes that an operation reads or writes of it; ``node``: in that one's backward."""
        size = bytes_of(tensor)
        if self._rounded is None or tensor.dtype != torch.float32:
            return size
        key = storage_id(tensor)
        if node is None or key in self._storages or key in self._known:
            return self._rounded.size(key, size)
        return self._rounded.gradient_of(node, size)

    def _list_backward(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """One operation of backward, with the event that made its node."""
        op, node = known_as(packet_of(func)), current_node()
        if node is None or (is_view(func) and op is not aten.empty_like):
            return
        number = sequence_number(node)
        size = lambda tensor: self._size_of(tensor, number)
        if operation := operation_of(op, func, args, kwargs, out, self._precision, size):
            at = bisect_right(self._begins, number, key=lambda begin: begin[0]) - 1
            self._back[self._begins[at][1] if at >= 0 else None].append(operation)

    def _pass(self, op: Any, taken: list[Tensor], made: list[Tensor]) -> None:
        """What backward adds to what is kept, at one operation: while it runs, the gradients of what it made and took,
        but for parameters; then, under autocast, those of what it took twice, as they are cast to the precision of
        their tensors, when the copies that it saved are gone."""
        running = cast = 0
        for tensor in (*taken, *made):
            key = storage_id(tensor) if tensor.is_floating_point() and has_storage(tensor) else None
            if key is None or key in self._known:
                continue
            size = bytes_of(tensor)
            own, copy = (size, 0) if self._rounded is None else self._rounded.gradient(op, tensor, size)
            running += own
            if any(tensor is one for one in taken):
                saved = any(node == self._node() for node, _ in self._saved.get(key, ()))
                cast += own + copy - (own if saved and copy else 0)
        self._passed[self._event] = max(self._passed.get(self._event, 0), running, cast)

    def _note(self, taken: list[Tensor], made: list[Tensor], flops: int, dear: bool) -> None:
        """Which memory an operation has read, made or changed."""
        given = {storage_id(tensor) for tensor in taken if has_storage(tensor)}
        for tensor in taken:
            if has_storage(tensor) and storage_id(tensor) not in self._known:
                self._use(tensor)
        for tensor in made:
            if not has_storage(tensor) or (key := storage_id(tensor)) in self._known:
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
        with without_torch_function():  # a recorder of functions must not see what the meter looks at
            return self._save(tensor, saver=sys._getframe(1).f_code.co_filename)

    def _save(self, tensor: Tensor, saver: str) -> Tensor:
        if has_storage(tensor):
            self._use(tensor).saved = True
            for use in self._uses[self._event].values():
                use.late = False
            if self._rounded is not None:
                self._rounded.save(tensor)
            if (key := storage_id(tensor)) in self._known:
                self._saved_known[key].append((self._node(), self._event))
            else:
                node, source = _BESIDE if saver == checkpoint.__file__ else self._node(), tensor.grad_fn
                if source is not None and sequence_number(source) == node and source.name() == COPY_NODE:
                    self._hidden[node] = node - 1  # an operation in place, saving a copy of what it will overwrite
                self._saved[key].append((node, self._event))
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
        return has_storage(tensor) and storage_id(tensor) in self._touched

    def _recomputed(self) -> bool:
        """Whether backward will run this operation again, under torch.utils.checkpoint.

        Counted for the whole region; torch stops short of what only made its output.
        """
        if self._function is not None:
            return issubclass(self._function[1], checkpoint.CheckpointFunction)
        return checkpoint_now() is not None
