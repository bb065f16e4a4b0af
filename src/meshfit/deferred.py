"""A model that a function builds, on the meta device: what its tensors hold is made later, one tensor at a time.

While the function runs, every operation that makes or changes a tensor is written down and run on meta: it takes no
memory, and no random number is drawn. ``values`` then runs what was written down, in its order and from the same
generators, so that the bits are those of the function run plainly. A tensor is there from the first operation whose
result is kept until the last that touches it. Random numbers that were overwritten later are drawn and dropped.

What a function reads is computed on the spot, if it does not depend on random numbers. What cannot be followed is
``Unfollowable``: the function must be run plainly.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.errors import in_short
from meshfit.torch_private import (
    TorchDispatchMode,
    aten,
    in_place_of_rejection_sampling,
    is_overload,
    own_buffers,
    packet_of,
    schema_of,
    storage_id,
    tree_leaves,
    tree_map,
    version,
    without_torch_function,
)

CPU, META = torch.device("cpu"), torch.device("meta")

SMALL = 2**20
"""Bytes up to which a tensor that comes from elsewhere is copied, since it might be changed later."""

EMPTY = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty_permuted}
"""Their results hold nothing: memory for them is taken when something is written there."""

OVERWRITE = {aten.uniform_, aten.normal_, aten.fill_, aten.zero_, aten.copy_, aten.random_, aten.exponential_}
OVERWRITE |= {aten.bernoulli_, aten.cauchy_, aten.log_normal_, aten.geometric_}
"""Write every element of a tensor, and read none."""

OTHER_MEMORY = {aten.set_, aten.resize_, aten.resize_as_}


class Unfollowable(Exception):
    """The function does something that cannot be done later: what it is."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor, as a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor, storage: int) -> "_View":
        if t.layout != torch.strided or t.is_conj() or t.is_neg():
            raise Unfollowable(f"a tensor of layout {t.layout}")
        return cls(storage, t.dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset())

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
class _Op:
    func: Any
    args: Any
    kwargs: dict[str, Any]
    outs: tuple[_View, ...]
    reads: frozenset[int]
    """Storages whose values it needs."""
    changes: frozenset[int]
    created: frozenset[int]
    overwritten: frozenset[int]
    """Of those it changes, whole."""
    generator: int | None = None
    """Which generator it draws from."""
    before: "_Seed | _Back | None" = None
    """What was done to that generator just before."""
    drawn: int = 0
    """How many draws of that generator there were, with this one."""

    @property
    def empty(self) -> bool:
        return is_overload(self.func) and packet_of(self.func) in EMPTY


@dataclass(frozen=True, slots=True)
class _Seed:
    """A generator was put into a state of its own."""

    state: Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Back:
    """A generator was put back to where it was after so many draws."""

    drawn: int


class _Draws:
    """One generator while a function is recorded. It draws nothing that is used; it is moved on by one number for each
    operation that would, so that its state says after which operation it was read or to which it was put back."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.count = generator, 0
        self.known: dict[bytes, int] = {}
        self.last = b""

    def draw(self) -> tuple[_Seed | _Back | None, int]:
        state = self.generator.get_state()
        now, before = state.numpy().tobytes(), None
        if now != self.last:
            before = _Back(self.known[now]) if now in self.known else _Seed(state)
        self.count += 1
        torch.empty(1).uniform_(generator=self.generator)
        self.last = self.generator.get_state().numpy().tobytes()
        self.known[self.last] = self.count
        return before, self.count


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self.sizes: dict[int, int] = {}
        """Bytes of each storage that was made here."""
        self.number: dict[int, int] = {}
        """Of storages, by the id that torch has for them."""
        self.kept: list[torch.UntypedStorage] = []  # so that no id is given twice
        self.constants: list[tuple[Tensor, int]] = []
        self.draws: dict[int, _Draws] = {}
        self.written: dict[int, int] = {}
        """By storage, the last operation that changed it."""
        self._read: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._is_aside = False

    def knows(self, t: Tensor) -> bool:
        return t.device.type == "meta" and storage_id(t) in self.number

    def view(self, t: Tensor) -> _View:
        return _View.of(t, self.number[storage_id(t)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_aside:
            return func(*args, **(kwargs or {}))
        with self._aside():
            return self._run(func, args, kwargs or {})

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Within it nothing is recorded."""
        before, self._is_aside = self._is_aside, True
        try:
            with without_torch_function():
                yield
        finally:
            self._is_aside = before

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        mine = [t for t in given if self.knows(t)]
        device = kwargs.get("device")
        random = torch.Tag.nondeterministic_seeded in func.tags
        if given and not mine:  # made elsewhere, or read: it has its values
            if random:
                raise Unfollowable(f"{func} on a tensor that was not made empty")
            return func(*args, **kwargs)
        if device is not None and device.type not in ("cpu", "meta"):
            raise Unfollowable(f"tensors are made on {device}")
        if not given and device is not None and device.type == "meta":
            return func(*args, **kwargs)
        if packet_of(func) in OTHER_MEMORY:
            raise Unfollowable(f"{func}")
        others = [t for t in given if not self.knows(t) and t.device.type == "cpu"]
        stands = {id(t): torch.empty_like(t, device=META) for t in others}
        on_meta = lambda x: stands.get(id(x), x) if isinstance(x, Tensor) else x
        there = tree_map(on_meta, args), tree_map(on_meta, kwargs)
        if "device" in kwargs or (not given and "device" in {a.name for a in schema_of(func).arguments}):
            there[1]["device"] = META
        there[1].pop("pin_memory", None)
        mutable = [a.alias_info is not None and a.alias_info.is_write for a in schema_of(func).arguments]
        names = [a.name for a in schema_of(func).arguments]
        changed = [x for i, x in enumerate(args) if mutable[i]]
        changed += [x for name, x in kwargs.items() if mutable[names.index(name)]]
        changed = [t for t in tree_leaves(changed) if isinstance(t, Tensor)]
        if any(not self.knows(t) for t in changed):
            raise Unfollowable(f"{func} changes a tensor that was not made empty")
        try:
            made = func(*there[0], **there[1])
        except (NotImplementedError, RuntimeError) as error:
            if changed:
                raise Unfollowable(f"{func}: {in_short(error)}") from error
            return self._now(func, args, kwargs)
        outs = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        if not outs and not changed:
            return self._now(func, args, kwargs)
        if any(t.device.type != "meta" for t in outs) or {*map(storage_id, outs)} & {*map(storage_id, stands.values())}:
            raise Unfollowable(f"{func} returns what it was given")
        new = [t for t in outs if storage_id(t) not in self.number]
        if not new and not changed:
            return made  # a view
        self._write_down(func, args, kwargs, outs, changed, random=random)
        return made

    def _write_down(
        self, func: Any, args: Any, kwargs: dict[str, Any], outs: list[Tensor], changed: list[Tensor], *, random: bool
    ) -> None:
        created = set()
        for t in outs:
            if storage_id(t) not in self.number:
                self.kept.append(t.untyped_storage())
                number = self.number[storage_id(t)] = len(self.kept)
                self.sizes[number] = t.untyped_storage().nbytes()
                created.add(number)
        changes = {self.view(t).storage for t in changed}
        whole = {v.storage for v in map(self.view, changed) if v.covers(self.sizes[v.storage])}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and self.knows(t)]
        read = [self.view(t).storage for t in given]
        overwritten = set()
        if not is_overload(func) or packet_of(func) in OVERWRITE:
            overwritten = {s for s in whole if read.count(s) == 1}
        op = _Op(
            func,
            tree_map(self._argument, args),
            {key: tree_map(self._argument, value) for key, value in kwargs.items()},
            tuple(self.view(t) for t in outs),
            frozenset(read) - overwritten,
            frozenset(changes),
            frozenset(created),
            frozenset(overwritten),
        )
        if random:
            generator = kwargs.get("generator") or torch.default_generator
            if generator.device.type != "cpu":
                raise Unfollowable(f"a generator of {generator.device}")
            draws = self.draws.setdefault(id(generator), _Draws(generator))
            op.generator = id(generator)
            op.before, op.drawn = draws.draw()
        for number in created | changes:
            self.written[number] = len(self.ops)
        self.ops.append(op)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, torch.Generator):
            return self.draws.setdefault(id(x), _Draws(x))
        if not isinstance(x, Tensor):
            return x
        if self.knows(x):
            return self.view(x)
        if x.nbytes > SMALL:
            self.constants.append((x, version(x)))
            return x
        return x.detach().clone()

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        real = lambda x: self.read(x) if isinstance(x, Tensor) and self.knows(x) else x
        return func(*tree_map(real, args), **tree_map(real, kwargs))

    def read(self, t: Tensor) -> Tensor:
        """The values of a tensor at this moment."""
        view = self.view(t)
        at, memory = self._read.get(view.storage, (-1, None))
        if at != self.written[view.storage]:
            program = _Program(self.ops, self.sizes, [view.storage])
            if program.draws:
                raise Unfollowable("it reads random numbers that it has drawn")
            ((_, memory),) = program.run()
            self._read[view.storage] = self.written[view.storage], memory
        assert memory is not None
        return view.on(memory).clone()

    def whole(self, before: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """For a function that fills a tensor with random numbers, and looks at them: it is run as a whole."""

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with self._aside():
                known = self.knows(tensor)
                if known:
                    self._write_down(before, (tensor, *args), kwargs, [], [tensor], random=True)
            return tensor if known else before(tensor, *args, **kwargs)

        return call

    def check(self) -> None:
        for tensor, count in self.constants:
            if version(tensor) != count:
                raise Unfollowable("it changes a tensor after it has copied from it")


READS = {"tolist", "numpy", "__array__", "item", "__bool__", "__float__", "__int__", "__index__", "__complex__"}


class _OnCPU(TorchFunctionMode):
    """What the function sees of tensors on meta: that they are on the CPU."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder
        attribute = lambda name: getattr(torch.Tensor, name).__get__
        self.said = {attribute("device"): CPU, attribute("is_meta"): False, attribute("is_cpu"): True}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.said and self.recorder.knows(args[0]):
            return self.said[func]
        if getattr(func, "__name__", "") in READS and args and isinstance(args[0], Tensor):
            with self.recorder._aside():
                if self.recorder.knows(args[0]):
                    args = (self.recorder.read(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class _Program:
    """What of ``ops`` is to be run for the values that the storages ``wanted`` have after them."""

    def __init__(self, ops: list[_Op], sizes: Mapping[int, int], wanted: Iterable[int], *, exact: bool = True):
        """``exact``: every number is drawn that was drawn before, also if nothing comes of it."""
        self.sizes, self.wanted = sizes, list(dict.fromkeys(wanted))
        needed = set(self.wanted)
        self.ops: list[tuple[_Op, bool]] = []
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
        if not any(live and op.generator is not None for op, live in self.ops):
            self.ops = [(op, live) for op, live in self.ops if live]

    @property
    def draws(self) -> bool:
        return any(op.generator is not None for op, _ in self.ops)

    def run(self, told: Callable[[], None] = lambda: None) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Each wanted storage, as soon as nothing touches it any more. ``told`` is called between operations."""
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
            told()
            with torch.no_grad(), generators.around(op):
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

    def _do(self, op: _Op, memory: dict[int, torch.UntypedStorage], generators: "_Replayed") -> None:
        if op.empty:
            return

        def real(x: Any) -> Any:
            if isinstance(x, _View):
                return x.on(self._memory(memory, x.storage))
            return generators.of(x) if isinstance(x, _Draws) else x

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


class _Replayed:
    """The generators of a program while it runs: torch's own stands where it did afterwards."""

    def __init__(self, ops: list[tuple[_Op, bool]]):
        self.own: dict[int, torch.Generator] = {}
        self.back = {(op.generator, op.before.drawn) for op, _ in ops if isinstance(op.before, _Back)}
        self.states: dict[tuple[int | None, int], Tensor] = {}

    def of(self, draws: _Draws) -> torch.Generator:
        return self.own[id(draws.generator)]

    @contextmanager
    def around(self, op: _Op) -> Iterator[None]:
        if op.generator is None:
            yield
            return
        mine, default = self.own.setdefault(op.generator, torch.Generator()), torch.default_generator
        if isinstance(op.before, _Seed):
            mine.set_state(op.before.state)
        elif isinstance(op.before, _Back) and (op.generator, op.before.drawn) in self.states:
            mine.set_state(self.states[op.generator, op.before.drawn])
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


class Deferred:
    """``model``, as ``build`` makes it, with its parameters on meta; its buffers, and tensors that are neither, have
    their values. Raises ``Unfollowable`` if ``build`` must be run plainly."""

    def __init__(self, build: Callable[[], Any]):
        recorder = _Recorder()
        try:
            with recorder, _OnCPU(recorder), in_place_of_rejection_sampling(recorder.whole):
                self.model = build()
            recorder.check()
        except Unfollowable:
            raise
        except Exception as error:
            raise Unfollowable(in_short(error)) from error
        if not isinstance(self.model, nn.Module):
            return  # its caller says so
        self._recorder = recorder
        self._give_values_to_all_but_parameters()
        self._views: dict[int, list[tuple[Tensor, _View]]] = defaultdict(list)
        """The parameters on each storage."""
        for p in self.model.parameters():
            if recorder.knows(p):
                view = recorder.view(p)
                self._views[view.storage].append((p, view))

    def _give_values_to_all_but_parameters(self) -> None:
        recorder, homes = self._recorder, []
        for module in self.model.modules():
            homes += [(own_buffers(module), name, t) for name, t in own_buffers(module).items() if t is not None]
            homes += [(vars(module), name, t) for name, t in vars(module).items() if isinstance(t, Tensor)]
        homes = [(home, name, t) for home, name, t in homes if recorder.knows(t) and not isinstance(t, nn.Parameter)]
        program = self._program((recorder.view(t).storage for _, _, t in homes))
        memory, made = dict(program.run()), {}
        for home, name, t in homes:
            view = recorder.view(t)
            if id(t) not in made:
                made[id(t)] = view.on(memory[view.storage]).requires_grad_(t.requires_grad)
            home[name] = made[id(t)]

    def _program(self, wanted: Iterable[int], *, exact: bool = True) -> _Program:
        return _Program(self._recorder.ops, self._recorder.sizes, wanted, exact=exact)

    def values(self, told: Callable[[], None] = lambda: None) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter that is on meta, and what it holds, on the CPU: one storage at a time, in the order in which
        they are complete. ``told`` is called now and then."""
        for storage, memory in self._program(self._views).run(told):
            for p, view in self._views[storage]:
                yield p, view.on(memory)

    def samples(self, some: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Values for ``some`` of the parameters, from other random numbers: as it might have been built."""
        views = {p: view for each in self._views.values() for p, view in each}
        wanted = {p: views[p] for p in some if p in views}
        memory = dict(self._program((view.storage for view in wanted.values()), exact=False).run())
        return {p: view.on(memory[view.storage]) for p, view in wanted.items()}
