"""The aten operations of one small forward, with their values, to be replayed in part.

A *value* is the content of one storage between two writes to it. An operation reads values through *windows* (dtype,
size, strides), so a view is no operation of its own, and a change in place makes a new value that every view of the
storage sees. ``replay`` runs one operation again on other contents and changes nothing that was recorded; what was
drawn at random is drawn again from the same state of the generator.

    memory   every activation of the forward, once; every storage that is written in place, once more for each write
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshfit.torch_private import (
    Dropout,
    TorchDispatchMode,
    TreeSpec,
    negated_view,
    schema_of,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Storage = torch.UntypedStorage

DOUBLE = 2**24
"""Parameters of the largest model that is recorded in double precision: 128 MiB of weights."""

MOVES = ("_to_copy", "clone")
"""Operations that copy a tensor into another type or order of memory."""

UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose result holds whatever was there before."""

SHAPED = (*UNSET, *(f"{made}_like" for made in ("zeros", "ones", "full", "rand", "randn", "randint")))
SHAPED += ("new_zeros", "new_ones", "new_full")
"""Operations that take no more than the shape of a tensor."""

WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}
"""Arguments written to by operations whose schema does not say so."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """A tensor as an operation met it: a view of a value."""

    value: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False

    @property
    def geometry(self) -> tuple:
        return self.dtype, self.size, self.stride, self.offset, self.conj, self.neg

    def on(self, storage: Storage) -> Tensor:
        """The tensor that this window shows of ``storage``."""
        return self._turned(torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride))

    def over(self, elements: Tensor) -> Tensor:
        """The tensor that this window shows of ``elements``, a flat tensor, as a differentiable function of it."""
        if self.dtype.is_complex and not elements.is_complex():
            elements = torch.view_as_complex(elements.view(-1, 2))
        elif elements.is_complex() and not self.dtype.is_complex:
            elements = torch.view_as_real(elements).flatten()
        return self._turned(elements.as_strided(self.size, self.stride, self.offset))

    def _turned(self, tensor: Tensor) -> Tensor:
        tensor = torch.conj(tensor) if self.conj else tensor
        return negated_view(tensor) if self.neg else tensor


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation. ``leaves`` are its arguments, flattened, with a ``StridedView`` for each tensor."""

    index: int
    func: Any
    name: str
    """ "mm", "convolution", "add", ... without namespace and overload."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    outs: tuple[Any, ...]
    """A ``StridedView`` for each tensor that it returns, else what it returned."""

    written: dict[int, int]
    """Values it changes in place, each with the value that the change makes."""

    draws: tuple[tuple[Any, Tensor], ...] = ()
    """Generators it draws from (None: the global one), each with its state before."""

    @property
    def reads(self) -> Iterator[StridedView]:
        return (leaf for leaf in self.leaves if isinstance(leaf, StridedView))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments, with windows for tensors."""
        return tree_unflatten(self.leaves, self.spec)[0]


@dataclass(frozen=True, eq=False, slots=True)
class Arguments:
    """Arguments of a call, some of them by name."""

    args: tuple
    kwargs: dict[str, Any]


@dataclass(eq=False)
class AtenTrace:
    """One forward. Build it with ``AtenTrace.of``."""

    model: nn.Module
    """The copy that was run: on the CPU, with dropout, caches and in-place activations off."""

    ops: list[Op] = field(default_factory=list)
    contents: dict[int, Storage] = field(default_factory=dict)
    """What each value held."""

    whole: dict[int, StridedView] = field(default_factory=dict)
    """A value as it was first seen, as one tensor."""

    made: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Values that each operation makes, by its index."""

    maker: dict[int, int] = field(default_factory=dict)
    """The operation that made a value."""

    users: dict[int, list[int]] = field(default_factory=dict)
    """Operations that read a value, in order."""

    names: dict[int, str] = field(default_factory=dict)
    """Values of parameters and buffers before the forward. A tied parameter has the name it is first known by."""

    value_of: dict[str, int] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    source: dict[int, str] = field(default_factory=dict)
    """The parameter or buffer that a value holds, as it is or moved in memory."""

    trained: set[int] = field(default_factory=set)
    """Values that depend on a parameter."""

    constant: set[int] = field(default_factory=set)
    """Values that depend on neither inputs, parameters nor buffers."""

    drawn: set[int] = field(default_factory=set)
    """Constants among these that come from random numbers."""

    fed: set[int] = field(default_factory=set)
    """Values that depend on an input."""

    splits: tuple[tuple[int, ...], ...] = ()
    """Sizes of the parts into which tensors were split or sliced, each once."""

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> "AtenTrace":
        """Record ``model`` on ``inputs``: a tensor, a tuple of arguments, a dict of them or both. ``model`` is left
        as it is.

        In double precision, where a difference is no matter of rounding; in single if the model refuses that or is
        too large.
        """
        if sum(parameter.numel() for parameter in model.parameters()) <= DOUBLE:
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                return cls._of(model, inputs, torch.float64)
        return cls._of(model, inputs, torch.float32)

    @classmethod
    def _of(cls, model: nn.Module, inputs: Any, dtype: torch.dtype) -> "AtenTrace":
        twin = _twin(model, dtype)
        given = inputs if isinstance(inputs, Arguments) else _given(inputs)
        args, kwargs = tree_map(
            lambda x: _converted(x, dtype) if isinstance(x, Tensor) else x, (given.args, given.kwargs)
        )
        trace = cls(twin)
        recorder = _Recorder(trace)
        named = (*twin.named_parameters(), *twin.named_buffers())
        for name, tensor in named:
            value = recorder.window(tensor).value
            trace.names[value], trace.value_of[name] = name, value
        trace.inputs = tuple(recorder.window(x).value for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        attention = sdpa_kernel(SDPBackend.MATH)  # as products and a softmax, each with its derivative
        with torch.random.fork_rng(devices=[]), torch.no_grad(), attention, recorder:
            torch.manual_seed(0)
            out = twin(*args, **kwargs)
        trace.outputs = tuple(dict.fromkeys(recorder.window(x).value for x in _tensors(out)))
        trace.splits = recorder.splits()
        trace._index({name for name, _ in twin.named_parameters()})
        return trace

    def _index(self, parameters: set[str]) -> None:
        known = set(self.names) | set(self.inputs)
        self.constant = {value for value in self.contents if value not in self.maker and value not in known}
        self.trained = {value for value, name in self.names.items() if name in parameters}
        self.fed = set(self.inputs)
        self.source = dict(self.names)
        for op in self.ops:
            reads = [window.value for window in op.reads]
            for value in reads:
                users = self.users.setdefault(value, [])
                if not users or users[-1] != op.index:
                    users.append(op.index)
            if op.name in SHAPED:
                reads = []
            for value in self.made[op.index]:
                if all(read in self.constant for read in reads):
                    self.constant.add(value)
                    if op.draws or any(read in self.drawn for read in reads):
                        self.drawn.add(value)
                if any(read in self.fed for read in reads):
                    self.fed.add(value)
                if any(read in self.trained for read in reads) and self.whole[value].dtype.is_floating_point:
                    self.trained.add(value)
                if op.name in MOVES and reads[0] in self.source:
                    self.source[value] = self.source[reads[0]]

    def replay(self, op: Op, changed: Mapping[int, Storage]) -> dict[int, Storage] | None:
        """What ``op`` makes when some of what it reads is ``changed``; None if it then returns another shape."""
        if op.name in UNSET:
            return {value: self.contents[value] for value in self.made[op.index]}
        fresh: dict[int, Storage] = {}

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, StridedView):
                return leaf
            held = changed.get(leaf.value, self.contents[leaf.value])
            if leaf.value in op.written:
                held = fresh[leaf.value] = fresh.get(leaf.value) or held.clone()
            return leaf.on(held)

        args, kwargs = tree_unflatten([tensor(leaf) for leaf in op.leaves], op.spec)
        with torch.random.fork_rng(devices=[], enabled=bool(op.draws)), torch.no_grad():
            for generator, state in op.draws:
                torch.set_rng_state(state) if generator is None else generator.set_state(state)
            results = tree_leaves(op.func(*args, **kwargs))
        made = {op.written[old]: storage for old, storage in fresh.items()}
        for was, now in zip(op.outs, results, strict=True):
            if not isinstance(was, StridedView):
                if not (was is now or was == now):
                    return None
                continue
            if tuple(now.shape) != was.size:
                return None
            if was.value in self.made[op.index] and was.value not in made:
                made[was.value] = self._like(was, now)
        return made

    def _like(self, was: StridedView, now: Tensor) -> Storage:
        recorded = self.contents[was.value]
        held = now.untyped_storage()
        if (tuple(now.stride()), now.storage_offset(), held.nbytes()) == (was.stride, was.offset, recorded.nbytes()):
            return held
        held = recorded.clone()
        was.on(held).copy_(now)
        return held

    def elements(self, value: int, storage: Storage | None = None) -> Tensor:
        """All that a value holds, as one flat tensor, or what ``storage`` holds in its place."""
        dtype = self.whole[value].dtype
        held = self.contents[value] if storage is None else storage
        return torch.empty(0, dtype=dtype).set_(held, 0, (held.nbytes() // dtype.itemsize,), (1,))

    def differs(self, value: int, storage: Storage) -> Tensor:
        """Which elements of ``value`` are others in ``storage``, beyond rounding; flat."""
        was, now = self.elements(value), self.elements(value, storage)
        if not real(was.dtype):
            return was != now
        eps = torch.finfo(was.dtype).eps
        return ~torch.isclose(now, was, rtol=64 * eps, atol=eps, equal_nan=True)

    def through(self, window: StridedView, mask: Tensor) -> Tensor:
        """A flat mask on the elements of a value, as a window on that value shows it."""
        own, seen = self.whole[window.value].dtype.itemsize, window.dtype.itemsize
        if seen > own:
            mask = mask.view(-1, seen // own).any(1)
        elif seen < own:
            mask = mask.repeat_interleave(own // seen)
        return mask.as_strided(window.size, window.stride, window.offset)


def _given(inputs: Any) -> Arguments:
    if isinstance(inputs, dict):
        return Arguments((), inputs)
    return Arguments(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def real(dtype: torch.dtype) -> bool:
    """Whether a small change can be seen: real or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


class _Recorder(TorchDispatchMode):
    def __init__(self, trace: AtenTrace):
        super().__init__()
        self.trace = trace
        self.current: dict[int, int] = {}  # address of a storage -> the value it now holds
        self.kept: list[Any] = []  # an address must not be used again
        self.parts: list[tuple[int, ...]] = []  # sizes of tensors split
        self.slices: dict[tuple, set[tuple[int, int]]] = {}  # (window, dim, size of the dim) -> start, stop

    def window(self, tensor: Tensor) -> StridedView:
        storage = tensor.untyped_storage()
        value = self.current.get(storage_id(storage))
        window = StridedView(
            -1 if value is None else value,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return window if value is not None else self.new(storage, window)

    def new(self, storage: Storage, window: StridedView) -> StridedView:
        value = len(self.trace.contents)
        window = StridedView(value, *window.geometry)
        self.kept.append(storage)
        self.current[storage_id(storage)] = value
        self.trace.contents[value], self.trace.whole[value] = storage, window
        return window

    def splits(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of tensors split, and of slices that follow each other through a whole dim."""
        parts = list(self.parts)
        for (*_, size), slices in self.slices.items():
            ends = [0, *(stop for _, stop in sorted(slices))]
            if [start for start, _ in sorted(slices)] == ends[:-1] and ends[-1] == size:
                parts.append(tuple(stop - start for start, stop in sorted(slices)))
        return tuple(dict.fromkeys(sizes for sizes in parts if len(sizes) > 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, trace = kwargs or {}, self.trace
        leaves, spec = tree_flatten((args, kwargs))
        read = tuple(self.window(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        written = {storage_id(t): t for t in _written(func, args, kwargs) if isinstance(t, Tensor)}
        before = {address: self.current[address] for address in written}
        for address, tensor in written.items():
            trace.contents[before[address]] = tensor.untyped_storage().clone()
        draws = _generators(func, leaves)
        first = len(trace.contents)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.split_with_sizes.default:
            self.parts.append(tuple(args[1]))
        elif func is torch.ops.aten.slice.Tensor and isinstance(result, Tensor) and len(args) == 4:
            size, start, stop = args[0].shape[args[1]], args[2], min(args[3], args[0].shape[args[1]])
            self.slices.setdefault((*read[0].geometry, read[0].value, args[1], size), set()).add((start, stop))
        changed = {}
        for address, tensor in written.items():
            changed[before[address]] = self.new(tensor.untyped_storage(), trace.whole[before[address]]).value
        outs = tuple(self.window(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(result))
        made = tuple(range(first, len(trace.contents)))
        if made or not all(isinstance(out, StridedView) for out in outs):  # else it is a view
            name = schema_of(func).name.split("::")[1]
            op = Op(len(trace.ops), func, name.removesuffix("_") if written else name, read, spec, outs, changed, draws)
            trace.ops.append(op)
            trace.made[op.index] = made
            trace.maker |= dict.fromkeys(made, op.index)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that ``func`` changes in place."""
    schema = schema_of(func)
    also = WRITES.get(schema.name.split("::")[1], ())
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.name in also or (argument.alias_info is not None and argument.alias_info.is_write):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return found


def _generators(func: Any, leaves: list[Any]) -> tuple[tuple[Any, Tensor], ...]:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ()
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    return tuple((generator, generator.get_state()) for generator in own) or ((None, torch.get_rng_state()),)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU, in ``dtype`` if it holds real numbers."""
    if tensor.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    elif not tensor.is_floating_point():
        dtype = tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def _twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy to look into. Weights that are all alike (zeros, ones) get some noise: zeros would hide what follows."""
    random = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        weight = _converted(parameter, dtype)
        if weight.is_floating_point() and weight.numel() and bool((weight == weight.flatten()[0]).all()):
            weight += 0.1 * torch.randn(weight.shape, generator=random, dtype=dtype)
        memo[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    loose = [x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)]
    memo |= {id(tensor): _converted(tensor, dtype) for tensor in (*model.buffers(), *loose)}
    twin = copy.deepcopy(model, memo).train()
    for module in twin.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # pyright: ignore
        if isinstance(module, Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # pyright: ignore
    return twin


def _tensors(out: Any) -> list[Tensor]:
    """Tensors of what a model returned: in tuples, dicts, and objects that hold them."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        return [tensor for item in out.values() for tensor in _tensors(item)]
    if isinstance(out, (tuple, list)):
        return [tensor for item in out for tensor in _tensors(item)]
    return [t for item in vars(out).values() for t in _tensors(item)] if hasattr(out, "__dict__") else []
