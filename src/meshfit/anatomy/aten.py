"""The aten operations that run within a block of code, with their values, to be run again in part.

A *value* is the content of one storage between two writes to it. An operation reads values through *views* (dtype,
size, strides), so a view is no operation of its own, and a change in place makes a new value that every view of the
storage sees. ``replay`` runs one operation again on other contents and changes nothing that was recorded; what was
drawn at random is drawn again from the same state of the generator.

    memory   every tensor that is made, once; every storage that is written in place, once more for each write
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfit.torch_private.kernels import negated_view
from meshfit.torch_private.operators import TorchDispatchMode, schema_of, written
from meshfit.torch_private.tensors import storage_id
from meshfit.torch_private.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

Storage = torch.UntypedStorage

UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose result holds whatever was there before."""

SHAPED = (*UNSET, *(f"{made}_like" for made in ("zeros", "ones", "full", "rand", "randn", "randint")))
SHAPED += ("new_zeros", "new_ones", "new_full")
"""Operations that take no more than the shape of a tensor."""


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
        """The tensor that this view shows of ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return self._turned(empty.set_(storage, self.offset, self.size, self.stride))

    def over(self, elements: Tensor) -> Tensor:
        """The tensor that this view shows of ``elements``, a flat tensor, as a differentiable function of it."""
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

    made: tuple[int, ...]
    """Values that it makes, by a change in place or anew."""

    written: dict[int, int]
    """Values it changes in place, each with the value that the change makes."""

    draws: tuple[tuple[Any, Tensor], ...] = ()
    """Generators it draws from (None: the global one), each with its state before."""

    @property
    def reads(self) -> Iterator[StridedView]:
        return (leaf for leaf in self.leaves if isinstance(leaf, StridedView))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments, with views for tensors."""
        return tree_unflatten(self.leaves, self.spec)[0]


class OpTrace(TorchDispatchMode):
    """Records the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.contents: dict[int, Storage] = {}
        """What each value held."""
        self.whole: dict[int, StridedView] = {}
        """A value as it was first seen, as one tensor."""
        self.maker: dict[int, int] = {}
        """The operation that made a value; none for those that were there before."""
        self._current: dict[int, int] = {}  # storage -> the value it now holds
        self._storages: list[Storage] = []  # held: an address must not be used again

    def view(self, tensor: Tensor) -> StridedView:
        """``tensor`` as a view of the value that its storage now holds."""
        storage = tensor.untyped_storage()
        value = self._current.get(storage_id(storage))
        geometry = (
            *(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        return StridedView(value, *geometry) if value is not None else self.new_value(storage, geometry)

    def new_value(self, storage: Storage, geometry: tuple) -> StridedView:
        """What ``storage`` holds from now on."""
        view = StridedView(len(self.contents), *geometry)
        self._storages.append(storage)
        self._current[storage_id(storage)] = view.value
        self.contents[view.value], self.whole[view.value] = storage, view
        return view

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        leaves = tuple(self.view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat)
        changed = {storage_id(tensor): tensor for tensor in written(func, args, kwargs)}
        before = {address: self._current[address] for address in changed}
        for address, tensor in changed.items():
            self.contents[before[address]] = tensor.untyped_storage().clone()
        draws = _generators(func, flat)
        first = len(self.contents)
        result = self.run(func, args, kwargs)
        writes = {}
        for address, tensor in changed.items():
            old = before[address]
            writes[old] = self.new_value(tensor.untyped_storage(), self.whole[old].geometry).value
        outs = tuple(self.view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(result))
        made = tuple(range(first, len(self.contents)))
        if made or not all(isinstance(out, StridedView) for out in outs):  # else it is a view
            name = schema_of(func).name.split("::")[1]
            name = name.removesuffix("_") if writes else name
            self.maker |= dict.fromkeys(made, len(self.ops))
            self.ops.append(Op(len(self.ops), func, name, leaves, spec, outs, made, writes, draws))
        return result

    def replay(self, op: Op, changed: Mapping[int, Storage]) -> dict[int, Storage] | None:
        """What ``op`` makes when some of what it reads is ``changed``; None if it then returns another shape."""
        if op.name in UNSET:
            return {value: self.contents[value] for value in op.made}
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
            if was.value in op.made and was.value not in made:
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


def real(dtype: torch.dtype) -> bool:
    """Whether a small change can be seen: real or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def _generators(func: Any, leaves: list[Any]) -> tuple[tuple[Any, Tensor], ...]:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ()
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    return tuple((generator, generator.get_state()) for generator in own) or ((None, torch.get_rng_state()),)
