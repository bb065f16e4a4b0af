"""Operations that were written down, and how they are run later."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfit.torch_private.kernels import aten
from meshfit.torch_private.operators import OpOverload, packet_of
from meshfit.torch_private.trees import tree_leaves, tree_map

CPU, META = torch.device("cpu"), torch.device("meta")

EMPTY = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty_permuted}
"""Their results hold nothing: memory for them is taken when something is written there."""


class Unfollowable(Exception):
    """The function does something that cannot be done later: what it is."""


class TensorSource(ABC):
    """Fills a tensor from elsewhere, from a file say: all of it, or what a rank needs of it."""

    @abstractmethod
    def part(self, box: tuple[tuple[int, int], ...], room: Tensor) -> None:
        """Put the index ranges ``box`` of the tensor into ``room``, which has their shape."""

    def __call__(self, tensor: Tensor) -> None:
        self.part(tuple((0, n) for n in tensor.shape), tensor)


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor, as a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor, storage: int) -> "StorageView":
        if t.layout != torch.strided or t.is_conj() or t.is_neg():
            raise Unfollowable(f"a tensor of layout {t.layout}")
        return cls(storage, t.dtype, tuple(t.shape), tuple(t.stride()), int(t.storage_offset()))

    def on(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)

    @property
    def ends(self) -> int:
        """Bytes from the beginning of the storage to its last element."""
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) if 0 not in self.size else -1
        return (self.offset + last + 1) * self.dtype.itemsize

    def covers(self, nbytes: int) -> bool:
        """Whether it is every byte of its storage, once."""
        count = torch.Size(self.size).numel() * self.dtype.itemsize
        return self.offset == 0 and count == nbytes == self.ends


@dataclass(eq=False, slots=True)
class RecordedOp:
    func: Any
    args: Any
    kwargs: dict[str, Any]
    outs: tuple[StorageView, ...]
    reads: frozenset[int]
    """Storages whose values it needs."""
    changes: frozenset[int]
    created: frozenset[int]
    overwritten: frozenset[int]
    """Of those it changes, whole."""
    generator: int | None = None
    """Which generator it draws from."""
    before: Tensor | int | None = None
    """What was done to that generator just before: it was put into this state of its own, or back to where it was
    after so many draws."""
    drawn: int = 0
    """How many draws of that generator there were, with this one."""
    default: torch.dtype = field(default_factory=torch.get_default_dtype)
    """Of tensors made without a dtype, when it was written down."""

    @property
    def empty(self) -> bool:
        return isinstance(self.func, OpOverload) and packet_of(self.func) in EMPTY


class Draws:
    """One generator while a function is recorded. It draws nothing that is used; it is moved on by one number for each
    operation that would, so that its state says after which operation it was read or to which it was put back."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.count = generator, 0
        self.known: dict[bytes, int] = {}
        self.last = b""

    def draw(self) -> tuple[Tensor | int | None, int]:
        """``before`` and ``drawn`` of an operation."""
        state = self.generator.get_state()
        now = state.numpy().tobytes()
        before = None if now == self.last else self.known.get(now, state)
        self.count += 1
        torch.empty(1).uniform_(generator=self.generator)
        self.last = self.generator.get_state().numpy().tobytes()
        self.known[self.last] = self.count
        return before, self.count


class BuildProgram:
    """What of ``ops`` is to be run for the values that the storages ``wanted`` have after them."""

    def __init__(self, ops: list[RecordedOp], sizes: Mapping[int, int], wanted: Iterable[int], *, exact: bool = True):
        """``exact``: every number is drawn that was drawn before, also if nothing comes of it."""
        self.sizes, self.wanted = sizes, list(dict.fromkeys(wanted))
        needed = set(self.wanted)
        self.ops: list[tuple[RecordedOp, bool]] = []
        """In their order, and whether the result counts: else nothing but random numbers is drawn."""
        for op in reversed(ops):
            live = not needed.isdisjoint(op.changes | op.created)
            if not live and op.generator is not None and exact:
                by_values = op.reads - op.changes  # how many numbers are drawn may depend on those
                needed |= by_values
                self.ops.append((op, bool(by_values)))
            if live:
                needed -= op.created | op.overwritten
                needed |= op.reads
                self.ops.append((op, True))
        self.ops.reverse()
        last = max((i for i, (op, live) in enumerate(self.ops) if live and op.generator is not None), default=-1)
        self.ops = [(op, live) for i, (op, live) in enumerate(self.ops) if live or i < last]

    @property
    def draws(self) -> bool:
        return any(op.generator is not None for op, _ in self.ops)

    def run(self, progress: Callable[[], None] = lambda: None) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each wanted storage, as soon as nothing touches it any more. ``progress`` is called between operations."""
        last: dict[int, int] = {}
        for i, (op, live) in enumerate(self.ops):
            if live:
                last |= dict.fromkeys(op.reads | op.changes | op.created, i)
        ends: dict[int, list[int]] = defaultdict(list)
        for storage, i in last.items():
            ends[i].append(storage)
        memory: dict[int, torch.UntypedStorage] = {}
        generators = _Replayed(self.ops)
        untouched = [storage for storage in self.wanted if storage not in last]
        for i, (op, live) in enumerate(self.ops):
            progress()
            with torch.no_grad(), generators.around(op), _default_dtype(op.default):
                self._do(op, memory if live else {}, generators)
            for storage in ends[i]:
                if storage in self.wanted:
                    yield storage, self._memory(memory, storage)
                memory.pop(storage, None)
        for storage in untouched:
            yield storage, torch.UntypedStorage(self.sizes[storage])

    def _memory(self, memory: dict[int, torch.UntypedStorage], storage: int) -> torch.UntypedStorage:
        if storage not in memory:
            memory[storage] = torch.UntypedStorage(self.sizes[storage])
        return memory[storage]

    def _do(self, op: RecordedOp, memory: dict[int, torch.UntypedStorage], generators: "_Replayed") -> None:
        if op.empty:
            return

        def real(x: Any) -> Any:
            if isinstance(x, StorageView):
                return x.on(self._memory(memory, x.storage))
            return generators.of(x) if isinstance(x, Draws) else x

        kwargs = {key: tree_map(real, value) for key, value in op.kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        made = op.func(*tree_map(real, op.args), **kwargs)
        if not op.created:
            return
        for view, out in zip(op.outs, [t for t in tree_leaves(made) if isinstance(t, Tensor)], strict=True):
            if view.storage not in op.created or view.storage in memory:
                continue
            held = out.untyped_storage()
            if (view.size, view.stride, view.offset) == (
                tuple(out.shape),
                tuple(out.stride()),
                out.storage_offset(),
            ) and held.nbytes() >= self.sizes[view.storage]:
                memory[view.storage] = held
            else:
                view.on(self._memory(memory, view.storage)).copy_(out)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Replayed:
    """The generators of a program while it runs: torch's own stands where it did afterwards."""

    def __init__(self, ops: list[tuple[RecordedOp, bool]]):
        self.own: dict[int, torch.Generator] = {}
        self.back = {(op.generator, op.before) for op, _ in ops if isinstance(op.before, int)}
        self.states: dict[tuple[int | None, int], Tensor] = {}

    def of(self, draws: Draws) -> torch.Generator:
        return self.own[id(draws.generator)]

    @contextmanager
    def around(self, op: RecordedOp) -> Iterator[None]:
        if op.generator is None:
            yield
            return
        mine, default = self.own.setdefault(op.generator, torch.Generator()), torch.default_generator
        if isinstance(op.before, Tensor):
            mine.set_state(op.before)
        elif isinstance(op.before, int) and (op.generator, op.before) in self.states:
            mine.set_state(self.states[op.generator, op.before])
        if op.generator == id(default):
            found = default.get_state()
            default.set_state(mine.get_state())
            try:
                yield
            finally:
                mine.set_state(default.get_state())
                default.set_state(found)
        else:
            yield
        if (op.generator, op.drawn) in self.back:
            self.states[op.generator, op.drawn] = mine.get_state()
