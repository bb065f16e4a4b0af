"""The border of a region, while it runs: what tensors go through on their way in and out.

    enter     the gradient of what enters is summed over the ranks, once for all that read it in one call
    leave     a rank's part of a sum becomes the sum, or this rank's rows of it (sequence=split)
    gather    a rank's channels become those of all ranks
    slice     a rank's channels stay where they are: see sliced.py

In compiled blocks a region is entered and left with plain tensors, and by collectives that a compiler can trace
(``PlainBorder``). A rank's rows are plain tensors there too: a region gathers its input where it is called, so that its
code reads the shapes of the whole, and returns the rank's rows of the sum. What else a block does to rows must be the
same for each row: axes/compile/parts.py tries that before anything is compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.axes.head_loss.logits import PendingLogits
from meshfit.axes.spec import SplitTensor, whole_output
from meshfit.axes.tensor.functions import Entrance, check_range, in_autocast, product_weights
from meshfit.axes.tensor.region import SEQUENCE, Leave
from meshfit.axes.tensor.sliced import SlicedTensor, local_of
from meshfit.comm import collectives, traced
from meshfit.comm.collectives import even
from meshfit.comm.draws import Stream, own_draws
from meshfit.comm.group import Group
from meshfit.torch_private.autograd import ThreadValue
from meshfit.torch_private.modules import own_parameters
from meshfit.torch_private.tensors import version
from meshfit.torch_private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten

Forward = Callable[..., Any]

trying: ThreadValue[str] = ThreadValue("tensor.plain", "")
"""In an eager trial of a block that is to be compiled: "plain", or "noting" which inputs of regions are rows."""


def is_plain() -> bool:
    return torch.compiler.is_compiling() or trying.get() == "plain"


class Border:
    """Of one region. Most methods run in place of the forward of a module at the border, which they are given first.
    ``columns``: products that are entered; ``alone``: nothing else is. ``stream``: where random numbers are drawn
    inside."""

    def __init__(self, group: Group, stream: Stream | None, columns: Sequence[nn.Module], *, alone: bool):
        self.group, self.stream, self.columns, self.alone = group, stream, columns, alone
        self.plain = PlainBorder(group, alone=alone)
        self._entered: dict[int, tuple[Tensor, int, Entrance]] | None = None  # during a call of the region's module

    # In place of forwards

    def run_region(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Tensors that enter several times in one call do so once: their gradients are summed in one go."""
        if is_plain():
            return self.plain.run_region(forward, args, kwargs)
        self.plain.note(args, kwargs)
        before, self._entered = self._entered, {}
        try:
            return forward(*args, **kwargs)
        finally:
            self._entered = before
            self._left()

    def run_entered(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(self.enter, (args, kwargs))
        return forward(*args, **kwargs)

    def run_column(self, forward: Forward, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Likewise, of a layer that is a product with its weight."""
        (x,) = (*args, *kwargs.values())
        if is_plain():
            return _product(layer, self.plain.enter(x))
        if _split_outside(x):
            return _on_local(partial(self.run_column, forward, layer), x, -1)
        self.plain.note_column(x)
        x = x.whole() if isinstance(x, SlicedTensor) and not x.length else x
        if self.stream is not None:
            self.stream.own(self, x.device)
        entrance = self._entrance(x)
        return forward(self._entered_once(x)) if entrance is None else entrance.product(layer)

    def run_source(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Of a module inside that returns a whole."""
        return tree_map(self._entered_once, forward(*args, **kwargs))

    def run_gathered(self, forward: Forward, dim: int, *args: Any, **kwargs: Any) -> Any:
        def gathered(share: Tensor) -> Tensor:
            if isinstance(share, PendingLogits):  # of which the loss needs no more than each rank's classes
                return share.over(self.group)
            return collectives.gather(share, dim, [share.shape[dim]] * self.group.size, self.group)

        share = forward(*args, **kwargs)
        self._left()
        return _on_local(gathered, share, dim)

    def run_lookup(self, forward: Forward, size: int, input: Tensor) -> Tensor:
        """Each entry is on one rank, ``size`` on each: the others add zeros to what that one returns."""
        start, total = self.group.rank * size, size * self.group.size
        check_range(input, total, f"index out of range: an embedding of {total} entries has none at {{}}")
        here = (input >= start) & (input < start + size)
        found = forward(torch.where(here, input - start, 0))
        return collectives.reduce(found.masked_fill(~here.unsqueeze(-1), 0.0), self.group, alone=True)

    def run_sliced(self, forward: Forward, *args: Any, **kwargs: Any) -> Tensor:
        def sliced(share: Tensor) -> Tensor:
            return share.over(self.group) if isinstance(share, PendingLogits) else SlicedTensor.of(share, self.group)

        return _on_local(sliced, forward(*args, **kwargs), -1)

    def run_raw(
        self, forward: Forward, columns: Sequence[Tensor], rows: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Of a module whose code multiplies with weights of its own."""
        with Products(columns, rows, self):
            return forward(*args, **kwargs)

    def run_leaving(
        self,
        forward: Forward,
        layer: nn.Module,
        leave: Leave,
        holder: nn.Module | None,
        alone: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``holder``: of the bias that is added after the sum. ``alone``: nothing else reads the memory that the layer
        returns."""
        if is_plain():
            (x,) = (*args, *kwargs.values())
            return self.plain.leave(layer, x, rows=leave.rows)
        with _without(holder, leave.bias.rpartition(".")[2]) as bias:
            share = forward(*args, **kwargs)
        if isinstance(share, PendingLogits):  # of all classes, and a part of each sum
            share = share.at_once("the sum over ranks")
        leaves, spec = tree_flatten(share)
        first = next(i for i, leaf in enumerate(leaves) if _real(leaf))
        added = lambda x: x if bias is None else x + bias.view(-1, *(1,) * (-1 - leave.dim)).to(x.dtype)
        if leave.rows and leaves[first].dim() > 1:
            self._left()
            leaves[first] = _on_local(partial(self._scattered, added), leaves[first], -1)
        else:
            leaves[first] = added(self.leave(leaves[first], alone=alone))
        return tree_unflatten(leaves, spec)

    def _scattered(self, added: Forward, share: Tensor) -> Tensor:
        length = share.shape[SEQUENCE]
        own = collectives.reduce_scatter(share, SEQUENCE, even(length, self.group.size), self.group)
        return SlicedTensor.rows(added(own), length, self.group)

    def run_rows(self, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Given the rank's rows, or what every rank has whole, compute the rank's rows."""
        if is_plain():
            return forward(x, *args, **kwargs)
        if _split_outside(x) and x.split_dim == x.dim() + SEQUENCE:
            with nullcontext() if self.stream is None else own_draws(x.group, x.device):
                return x.on_local(lambda local: self.run_rows(forward, local, *args, **kwargs))
        if self.stream is not None:
            self.stream.own(self, x.device)
        length = x.shape[SEQUENCE]
        made = forward(_on_local(self._own_rows, x), *args, **kwargs)
        self._left()
        return _on_local(lambda own: SlicedTensor.rows(own, length, self.group), made)

    def _own_rows(self, x: Tensor) -> Tensor:
        if isinstance(x, SlicedTensor) and not x.changed:
            return local_of(x)
        length = x.shape[SEQUENCE]
        return collectives.split(whole_output(x), SEQUENCE, even(length, self.group.size), self.group)

    # Tensors

    def enter(self, x: Any) -> Any:
        """``x`` on its way into the region."""
        if self.stream is not None and isinstance(x, Tensor):
            self.stream.own(self, x.device)
        return self._entered_once(x)

    def leave(self, x: Tensor, *, alone: bool = True) -> Tensor:
        """The sum of all ranks' ``x``, on its way out."""
        self._left()
        if _split_outside(x):
            return x.on_local(partial(self.leave, alone=alone))
        return collectives.reduce(x, self.group, alone=alone)

    def _left(self) -> None:
        if self.stream is not None:
            self.stream.common(self)

    def _entered_once(self, x: Any) -> Any:
        if _split_outside(x):
            return x.on_local(self._entered_once)
        entrance = self._entrance(x)
        if entrance is not None:
            return entrance.x
        return x.entered() if isinstance(x, SlicedTensor) and x.length else x

    def _entrance(self, x: Any) -> Entrance | None:
        """Where ``x`` enters, if it gets a gradient; the same one for all that it enters in one call."""
        if not _real(x) or not x.requires_grad or not torch.is_grad_enabled():
            return None
        if isinstance(x, SlicedTensor) and x.length:
            return x.entrance(self.columns, alone=self.alone)
        known = None if self._entered is None else self._entered.get(id(x))
        if known is not None and known[1] == version(x):
            return known[2]
        made = Entrance(x, self.columns, self.group, alone=self.alone)
        if self._entered is not None:
            self._entered[id(x)] = x, version(x), made  # x is kept: its id must not be used again
            self._entered[id(made.x)] = made.x, version(made.x), made
        return made


def _split_outside(x: Any) -> TypeGuard[SplitTensor]:
    """Whether an axis around this one, context, has split it."""
    return isinstance(x, SplitTensor) and not isinstance(x, SlicedTensor)


def _on_local(function: Callable[[Tensor], Tensor], x: Tensor, dim: int | None = None) -> Tensor:
    """``function(x)``, of this rank's part of what is split outside; ``dim``: ``function`` needs all of that dim."""
    if not _split_outside(x):
        return function(x)
    together = dim is not None and x.split_dim == dim % x.dim()
    return function(x.whole()) if together else x.on_local(function)


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


@contextmanager
def _without(holder: nn.Module | None, name: str) -> Iterator[Tensor | None]:
    """``holder`` with no bias in the meantime; yields the bias."""
    if holder is None:
        yield None
        return
    bias = own_parameters(holder)[name]
    assert bias is not None
    own_parameters(holder)[name] = torch.zeros_like(bias) if type(holder).__name__ == "Conv1D" else None  # type: ignore
    try:
        yield bias
    finally:
        own_parameters(holder)[name] = bias


class PlainBorder:
    """The border as a compiler sees it."""

    def __init__(self, group: Group, *, alone: bool):
        self._group, self._size, self._alone = traced.number_of(group), group.size, alone
        self._rows: tuple[bool, ...] = ()
        """Which leaves of what the region is given are rows."""
        self._column_rows = False
        """Whether what enters its layers are rows: where the region itself is not called by what is compiled."""
        self._entered: list[tuple[Tensor, Tensor]] = []

    def note(self, args: Any, kwargs: Any) -> None:
        if trying.get() == "noting":
            self._rows = tuple(isinstance(leaf, SplitTensor) for leaf in tree_leaves((args, kwargs)))

    def note_column(self, x: Any) -> None:
        if trying.get() == "noting":
            self._column_rows = isinstance(x, SplitTensor)

    def run_region(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        self._entered = []
        if True in self._rows:
            leaves, spec = tree_flatten((args, kwargs))
            for i, is_rows in enumerate(self._rows):
                if is_rows:
                    leaves[i] = self._gathered(leaves[i])
                    self._entered.append((leaves[i], leaves[i]))
            args, kwargs = tree_unflatten(leaves, spec)
        made = forward(*args, **kwargs)
        self._entered = []
        return made

    def enter(self, x: Tensor) -> Tensor:
        for known, own in self._entered:
            if known is x:
                return own
        if self._column_rows:
            own = self._gathered(x)
        else:
            own = traced.copy(in_autocast(x) if self._alone else x, self._group, self._size)
        self._entered.append((x, own))
        return own

    def leave(self, layer: nn.Module, x: Tensor, *, rows: bool) -> Tensor:
        share = _product(layer, x, bias=False)
        name = "reduce_scatter" if rows and share.dim() > 1 else "reduce"
        total = traced.collective(share, name, self._group, self._size, SEQUENCE)
        return total if layer.bias is None else total + layer.bias.to(total.dtype)  # type: ignore[union-attr]

    def _gathered(self, x: Tensor) -> Tensor:
        x = in_autocast(x) if self._alone else x
        return traced.collective(x, "all_gather", self._group, self._size, SEQUENCE)


def _product(layer: nn.Module, x: Tensor, *, bias: bool = True) -> Tensor:
    """Of ``x`` with the weight of a layer for which ``is_product`` holds."""
    return F.linear(x, product_weights(layer), layer.bias if bias else None)  # type: ignore[arg-type]


# Weights that no layer holds

VIEWS = {"__getitem__", "__get__", "t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "expand"}
VIEWS |= {"unbind", "chunk", "split", "movedim", "contiguous", "to", "flatten", "unflatten", "narrow", "select"}
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "linear", "einsum", "_grouped_mm", "grouped_mm"}
PRODUCTS |= {"addmm", "baddbmm", "addmv"}

BIAS = {"linear": 2, "addmm": 0, "baddbmm": 0, "addmv": 0}
"""Where products take something to add."""

WITHOUT_BIAS: dict[str, Callable[..., Tensor]] = {"addmm": torch.mm, "baddbmm": torch.bmm, "addmv": torch.mv}
"""The same without."""


class Products(TorchFunctionMode):
    """Enters and leaves a region at the very products that read ``columns`` and ``rows``, weights that no layer holds,
    in one call of the module that holds them: what a product with a column weight takes enters, what one with a row
    weight makes leaves, and its bias is added after that. Slower than to wrap a layer, and with a collective for each
    product: used where the border of the module will not do."""

    def __init__(self, columns: Sequence[Tensor], rows: Sequence[Tensor], border: Border):
        super().__init__()
        self.border = border
        self.known = {id(x): (x, "column") for x in columns} | {id(x): (x, "row") for x in rows}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [self.known[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self.known]
        name = getattr(func, "__name__", "")
        if not found or (name not in VIEWS and name not in PRODUCTS):
            return func(*args, **kwargs)
        role = found[0][1]
        if name in VIEWS:
            out = func(*args, **kwargs)
            self.known |= {id(x): (x, role) for x in tree_leaves(out) if isinstance(x, Tensor)}
            return out
        if role == "column":
            args, kwargs = tree_map(lambda x: x if id(x) in self.known else self.border.enter(x), (args, kwargs))
            return func(*args, **kwargs)
        bias, args, kwargs = _bias_apart(name, args, kwargs)
        out = self.border.leave(WITHOUT_BIAS.get(name, func)(*args, **kwargs))
        return out if bias is None else out + bias


def _bias_apart(name: str, args: tuple, kwargs: dict) -> tuple[Tensor | None, tuple, dict]:
    at = BIAS.get(name)
    if at is None:
        return None, args, kwargs
    if len(args) > at:
        return args[at], (*args[:at], *args[at + 1 :]), kwargs
    word = "bias" if name == "linear" else "input"
    return kwargs.get(word), args, {key: value for key, value in kwargs.items() if key != word}
