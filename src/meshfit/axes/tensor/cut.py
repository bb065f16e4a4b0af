"""Cut a region of a model, in place: parameters keep their objects and names, forwards are wrapped.

The check does this to copies of one module, with threads for ranks; ``split_model`` does the same to the model.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.forward import wrap
from meshfit.axes.head_loss.logits import PendingLogits
from meshfit.axes.spec import SplitTensor, whole_output
from meshfit.axes.tensor.column import Entrance, is_product
from meshfit.axes.tensor.plain import PlainCrossing, is_plain, product
from meshfit.axes.tensor.raw import Products
from meshfit.axes.tensor.region import SEQUENCE, Leave, Raw, Region
from meshfit.axes.tensor.vocabulary import SlicedTensor, local_of
from meshfit.comm import collectives
from meshfit.comm.collectives import even
from meshfit.comm.draws import Stream, own_draws
from meshfit.comm.group import Group
from meshfit.torch_private.kernels import assert_on_device
from meshfit.torch_private.modules import own_parameters
from meshfit.torch_private.tensors import version
from meshfit.torch_private.trees import tree_flatten, tree_map, tree_unflatten

Forward = Callable[..., Any]
Undo = Callable[[], None]


def cut(model: nn.Module, region: Region, group: Group, stream: Stream) -> list[Undo]:
    """Cut ``region`` of ``model``; returns what gives its attributes back their values."""
    home = model.get_submodule(region.module)
    for each in region.cuts:
        held = _tensor(home, each.name)
        held.data = each.of(held.data, group.rank)
    undo: list[Undo] = []
    for patch in region.patches:
        where, (name, *inner) = home.get_submodule(patch.module), patch.attribute.split(".")
        found = value = getattr(where, name)
        if inner:  # settings that other modules read too: this one gets its own
            value = copy.copy(found)
            setattr(value, inner[0], patch.value)
        undo.append(partial(setattr, where, name, found))
        setattr(where, name, value if inner else patch.value)
    entered = [home.get_submodule(path) for path in region.enters]
    columns = [layer for layer in entered if is_product(layer)]
    alone = len(columns) == len(entered) and not region.raw and not region.sources
    crossing = Crossing(group, stream if region.draws else None, columns, alone=alone)
    for path in region.heads:
        wrap(home.get_submodule(path), _local_heads(home.get_submodule(path)))  # type: ignore[arg-type]
    for path in region.lookups:
        module = home.get_submodule(path)
        undo.append(partial(setattr, module, "padding_idx", module.padding_idx))
        wrap(module, crossing.looking_up(module))  # type: ignore[arg-type]
    for layer in entered:
        wrap(layer, crossing.column(layer) if layer in columns else crossing.entering)
    for path, dim in region.gathers:
        wrap(home.get_submodule(path), crossing.gathering(dim))
    for path in region.slices:
        wrap(home.get_submodule(path), crossing.slicing)
    for each in region.leaves:
        layer = home.get_submodule(each.module)
        wrap(layer, crossing.leaving(home, each, alone=is_product(layer)))
    for each in region.raw:
        wrap(home.get_submodule(each.module), crossing.multiplying(home, each))
    for path in region.sources:
        wrap(home.get_submodule(path), crossing.sourcing)
    for path in region.rows:
        wrap(home.get_submodule(path), crossing.by_rows)
    if not (region.gathers or region.lookups or region.slices or region.rows):
        wrap(home, crossing.around)
    return undo


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    return getattr(module.get_submodule(path), own)


class Crossing:
    """The border of one region, while it runs. ``columns``: products that are entered; ``alone``: nothing else is."""

    def __init__(self, group: Group, stream: Stream | None, columns: Sequence[nn.Module], *, alone: bool):
        self.group, self.stream, self.columns, self.alone = group, stream, columns, alone
        self.plain = PlainCrossing(group, alone=alone)
        """How a compiler sees it."""
        self._entered: dict[int, tuple[Tensor, int, Entrance]] | None = None  # during a call of the region's module

    def around(self, forward: Forward) -> Forward:
        """Tensors that enter several times in one call do so once: their gradients are summed in one go."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_plain():
                return self.plain.around(forward, args, kwargs)
            self.plain.note(args, kwargs)
            before, self._entered = self._entered, {}
            try:
                return forward(*args, **kwargs)
            finally:
                self._entered = before
                self._left()

        return run

    def entering(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(self.enter, (args, kwargs))
            return forward(*args, **kwargs)

        return run

    def column(self, layer: nn.Module) -> Callable[[Forward], Forward]:
        """Likewise, of a layer that is a product with its weight."""

        def around(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Tensor:
                (x,) = (*args, *kwargs.values())
                if is_plain():
                    return product(layer, self.plain.enter(x))
                if _split_outside(x):
                    return _on_local(run, x, -1)
                self.plain.note_column(x)
                x = x.whole() if isinstance(x, SlicedTensor) and not x.length else x
                if self.stream is not None:
                    self.stream.own(self, x.device)
                entrance = self._entrance(x)
                return forward(self._entered_once(x)) if entrance is None else entrance.product(layer)

            return run

        return around

    def sourcing(self, forward: Forward) -> Forward:
        return lambda *args, **kwargs: tree_map(self._entered_once, forward(*args, **kwargs))

    def gathering(self, dim: int) -> Callable[[Forward], Forward]:
        def around(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                share = forward(*args, **kwargs)
                self._left()
                return _on_local(gathered, share, dim)

            return run

        def gathered(share: Tensor) -> Tensor:
            if isinstance(share, PendingLogits):  # of which the loss needs no more than each rank's classes
                return share.over(self.group)
            return collectives.gather(share, dim, [share.shape[dim]] * self.group.size, self.group)

        return around

    def looking_up(self, module: nn.Embedding) -> Callable[[Forward], Forward]:
        """Each entry is on one rank: the others add zeros to what that one returns."""
        size = module.weight.shape[0]
        start = self.group.rank * size
        if module.padding_idx is not None:
            own = module.padding_idx - start
            module.padding_idx = own if 0 <= own < size else None  # type: ignore[assignment]

        total = size * self.group.size

        def around(forward: Forward) -> Forward:
            def run(input: Tensor) -> Tensor:
                _in_range(input, total)
                here = (input >= start) & (input < start + size)
                found = forward(torch.where(here, input - start, 0))
                return collectives.reduce(found.masked_fill(~here.unsqueeze(-1), 0.0), self.group, alone=True)

            return run

        return around

    def slicing(self, forward: Forward) -> Forward:
        def sliced(share: Tensor) -> Tensor:
            return share.over(self.group) if isinstance(share, PendingLogits) else SlicedTensor.of(share, self.group)

        return lambda *args, **kwargs: _on_local(sliced, forward(*args, **kwargs), -1)

    def multiplying(self, home: nn.Module, raw: Raw) -> Callable[[Forward], Forward]:
        columns = [_tensor(home, name) for name in raw.columns]
        rows = [_tensor(home, name) for name in raw.rows]

        def around(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                with Products(columns, rows, self):
                    return forward(*args, **kwargs)

            return run

        return around

    def leaving(self, home: nn.Module, border: Leave, *, alone: bool = False) -> Callable[[Forward], Forward]:
        """``alone``: nothing else reads the memory that the module returns."""
        path, _, name = border.bias.rpartition(".")
        holder = home.get_submodule(path) if border.bias else None
        layer = home.get_submodule(border.module)

        def around(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                if is_plain():
                    (x,) = (*args, *kwargs.values())
                    return self.plain.leave(layer, x, rows=border.rows)
                with _without(holder, name) as bias:
                    share = forward(*args, **kwargs)
                if isinstance(share, PendingLogits):  # of all classes, and a part of each sum
                    share = share.at_once("the sum over ranks")
                leaves, spec = tree_flatten(share)
                first = next(i for i, leaf in enumerate(leaves) if _real(leaf))
                added = lambda x: x if bias is None else x + bias.view(-1, *(1,) * (-1 - border.dim)).to(x.dtype)
                if border.rows and leaves[first].dim() > 1:
                    self._left()
                    leaves[first] = _on_local(partial(scattered, added), leaves[first], -1)
                else:
                    leaves[first] = added(self.leave(leaves[first], alone=alone))
                return tree_unflatten(leaves, spec)

            return run

        def scattered(added: Forward, share: Tensor) -> Tensor:
            length = share.shape[SEQUENCE]
            own = collectives.reduce_scatter(share, SEQUENCE, even(length, self.group.size), self.group)
            return SlicedTensor.rows(added(own), length, self.group)

        return around

    def by_rows(self, forward: Forward) -> Forward:
        """Given the rank's rows, or what every rank has whole, compute the rank's rows."""

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_plain():
                return forward(x, *args, **kwargs)
            if _split_outside(x) and x.split_dim == x.dim() + SEQUENCE:
                with nullcontext() if self.stream is None else own_draws(x.group, x.device):
                    return x.on_local(lambda local: run(local, *args, **kwargs))
            if self.stream is not None:
                self.stream.own(self, x.device)
            length = x.shape[SEQUENCE]
            made = forward(_on_local(self._own_rows, x), *args, **kwargs)
            self._left()
            return _on_local(lambda own: SlicedTensor.rows(own, length, self.group), made)

        return run

    def _own_rows(self, x: Tensor) -> Tensor:
        if isinstance(x, SlicedTensor) and not x.changed:
            return local_of(x)
        length = x.shape[SEQUENCE]
        return collectives.split(whole_output(x), SEQUENCE, even(length, self.group.size), self.group)

    def _left(self) -> None:
        if self.stream is not None:
            self.stream.common(self)

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


def _in_range(index: Tensor, size: int) -> None:
    wrong = ((index < 0) | (index >= size)).any()
    if index.is_cuda:
        assert_on_device(~wrong)
    elif bool(wrong):
        raise IndexError(f"index out of range: an embedding of {size} entries has none at {int(index.max())}")


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


def _local_heads(module: nn.MultiheadAttention) -> Callable[[Forward], Forward]:
    """The forward of ``nn.MultiheadAttention`` with as many heads as the weights have."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        batched = query.dim() == 3
        inputs = [x if batched else x.unsqueeze(0 if module.batch_first else 1) for x in (query, key, value)]
        inputs = [x if module.batch_first else x.transpose(0, 1) for x in inputs]
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        if module.in_proj_weight is not None:
            weights = list(module.in_proj_weight.chunk(3))
        biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
        projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in projected)
        mask = _mask(attn_mask, key_padding_mask, q)
        dropout = module.dropout if module.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = F.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
        out = out if module.batch_first else out.transpose(0, 1)
        return out if batched else out.squeeze(0 if module.batch_first else 1), None

    return lambda whole: forward


def _mask(attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one to be added; each says True, or minus infinity, where nothing is to be seen."""
    total = None
    for mask in (attention, None if padding is None else padding.view(-1, 1, 1, padding.shape[-1])):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
        mask = mask.to(q.dtype)
        total = mask if total is None else total + mask
    return total
