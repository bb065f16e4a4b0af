"""One small forward, operation by operation: which values depend on parameters, on inputs, on random numbers."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshfit.anatomy.aten import SHAPED, OpTrace, Storage, StridedView, real
from meshfit.anatomy.copies import converted, study, to_precision
from meshfit.anatomy.record_program import tensors
from meshfit.torch_private.modules import Dropout
from meshfit.torch_private.trees import tree_leaves, tree_map

DOUBLE = 2**24
"""Parameters of the largest model that is recorded in double precision: 128 MiB of weights."""

MOVES = ("_to_copy", "clone")
"""Operations that copy a tensor into another type or order of memory."""


@dataclass(frozen=True, eq=False, slots=True)
class Arguments:
    """Arguments of a call, some of them by name."""

    args: tuple
    kwargs: dict[str, Any]


class AtenTrace(OpTrace):
    """One forward of ``model``: a copy on the CPU, with dropout, caches and in-place activations off."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        super().__init__()
        self.model = model
        self.names: dict[int, str] = {}
        """Values of parameters and buffers before the forward. A tied parameter has the name it is first known by."""
        self.value_of: dict[str, int] = {}
        self._parts: list[tuple[int, ...]] = []  # sizes of tensors split
        self._slices: dict[tuple, set[tuple[int, int]]] = {}  # (view, dim, size of the dim) -> start, stop
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            value = self.view(tensor).value
            self.names[value], self.value_of[name] = name, value
        self.inputs = tuple(self.view(x).value for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        attention = sdpa_kernel(SDPBackend.MATH)  # as products and a softmax, each with its derivative
        with torch.random.fork_rng(devices=[]), torch.no_grad(), attention, self:
            torch.manual_seed(0)
            out = model(*args, **kwargs)
        self.outputs = tuple(dict.fromkeys(self.view(x).value for x in tensors(out)))
        self._index()

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> "AtenTrace":
        """Record ``model`` on ``inputs``: a tensor, a tuple of arguments, a dict of them or both (``Arguments``).
        ``model`` is left as it is.

        In double precision, where a difference is no matter of rounding; in single if the model refuses that or is
        too large; as it is where it mixes precisions, and casts from one to another.
        """
        if isinstance(inputs, Arguments):
            args, kwargs = inputs.args, inputs.kwargs
        elif isinstance(inputs, dict):
            args, kwargs = (), inputs
        else:
            args, kwargs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}

        def recorded(convert: Callable[[nn.Module], nn.Module], cast: Callable[[Tensor], Tensor]) -> AtenTrace:
            own = lambda x: cast(x.detach().cpu()).clone() if isinstance(x, Tensor) else x
            return cls(_without_dropout(convert(study(model))), *tree_map(own, (args, kwargs)))

        small = sum(parameter.numel() for parameter in model.parameters()) <= DOUBLE
        for dtype in [torch.float64] * small + [torch.float32]:
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                return recorded(partial(converted, dtype=dtype), partial(to_precision, dtype=dtype))
        return recorded(lambda module: module, lambda x: x)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.split_with_sizes.default:
            self._parts.append(tuple(args[1]))
        elif func is torch.ops.aten.slice.Tensor and len(args) == 4:
            size, start, stop = args[0].shape[args[1]], args[2], min(args[3], args[0].shape[args[1]])
            self._slices.setdefault((self.view(args[0]), args[1], size), set()).add((start, stop))
        return result

    @cached_property
    def splits(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the parts into which tensors were split, or sliced one after another through a whole dim."""
        parts = list(self._parts)
        for (*_, size), slices in self._slices.items():
            ends = [0, *(stop for _, stop in sorted(slices))]
            if [start for start, _ in sorted(slices)] == ends[:-1] and ends[-1] == size:
                parts.append(tuple(stop - start for start, stop in sorted(slices)))
        return tuple(dict.fromkeys(sizes for sizes in parts if len(sizes) > 1))

    def _index(self) -> None:
        known = set(self.names) | set(self.inputs)
        self.users: dict[int, list[int]] = {}
        """Operations that read a value, in order."""
        self.source = dict(self.names)
        """The parameter or buffer that a value holds, as it is or moved in memory."""
        parameters = {name for name, _ in self.model.named_parameters()}
        self.trained = {value for value, name in self.names.items() if name in parameters}
        """Values that depend on a parameter."""
        self.constant = {value for value in self.contents if value not in self.maker and value not in known}
        """Values that depend on neither inputs, parameters nor buffers."""
        self.drawn: set[int] = set()
        """Constants among these that come from random numbers."""
        self.fed = set(self.inputs)
        """Values that depend on an input."""
        for op in self.ops:
            reads = [view.value for view in op.reads]
            for value in dict.fromkeys(reads):
                self.users.setdefault(value, []).append(op.index)
            if op.name in SHAPED:
                reads = []
            for value in op.made:
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

    def through(self, view: StridedView, mask: Tensor) -> Tensor:
        """A flat mask on the elements of a value, as a view of that value shows it."""
        own, seen = self.whole[view.value].dtype.itemsize, view.dtype.itemsize
        if seen > own:
            mask = mask.view(-1, seen // own).any(1)
        elif seen < own:
            mask = mask.repeat_interleave(own // seen)
        return mask.as_strided(view.size, view.stride, view.offset)


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model
