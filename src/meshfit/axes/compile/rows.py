"""A block inside which a tensor group acts, compiled: with plain tensors in the place of a rank's rows.

The compiler does not see through the class of tensors that rows are (sequence=split), so a compiled block is given the
rank's rows as plain tensors. That is the same only if the block's own code treats each row alike. So before a block is
compiled for a kind of inputs, it runs both ways once, without the compiler, on those inputs: outputs and the gradients
of inputs and weights must agree, on all ranks of the group. A block that does not stays as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.tensor.plain import trying
from meshfit.axes.tensor.region import SEQUENCE
from meshfit.axes.tensor.vocabulary import SlicedTensor, local_of
from meshfit.comm.group import Group
from meshfit.generators import Generators
from meshfit.torch_private import tree_flatten, tree_unflatten

Forward = Callable[..., Any]


class BlockOfRows:
    """``forward`` of a block, compiled where that is the same."""

    def __init__(self, block: nn.Module, forward: Forward, group: Group):
        self._block, self._forward, self._group = block, forward, group
        self._compiled = torch.compile(forward)
        self._kinds: dict[Any, tuple[bool, ...] | None] = {}
        """By kind of inputs: which outputs are rows; None: it is not compiled for such."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trying.get():
            return self._forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        rows = [leaf for leaf in leaves if isinstance(leaf, SlicedTensor)]
        if any(x.at != SEQUENCE or not x.length or x.changed or x.length % self._group.size for x in rows):
            return self._forward(*args, **kwargs)
        kind = _kind(self._block, leaves)
        if kind not in self._kinds:
            self._kinds[kind] = self._tried(leaves, spec)
        made_rows = self._kinds[kind]
        if made_rows is None:
            return self._forward(*args, **kwargs)
        args, kwargs = tree_unflatten([_local(leaf) for leaf in leaves], spec)
        made, spec = tree_flatten(self._compiled(*args, **kwargs))
        length = rows[0].length if rows else 0
        of_rows = [
            SlicedTensor.rows(leaf, length, self._group) if is_rows else leaf
            for leaf, is_rows in zip(made, made_rows, strict=True)
        ]
        return tree_unflatten(of_rows, spec)

    def _tried(self, leaves: list[Any], spec: Any) -> tuple[bool, ...] | None:
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        drawn = Generators(device)
        try:
            want, rows = self._run("noting", leaves, spec)
            drawn.restore()
            try:
                got, _ = self._run("plain", leaves, spec)
                agree = len(want) == len(got) and all(map(_close, want, got))
            except (RuntimeError, ValueError, TypeError):  # another shape than its code is made for
                agree = False
        finally:
            drawn.restore()
        every = self._group.all_gather(torch.tensor([agree], device=device).int())
        return rows if bool(every.all()) else None

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Without what other axes put around the block: that is not compiled either."""
        around = self._block.__dict__.pop("forward")
        self._block.__dict__["forward"] = self._forward
        try:
            yield
        finally:
            self._block.__dict__["forward"] = around

    def _run(self, how: str, leaves: list[Any], spec: Any) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """Outputs and gradients, of copies of weights and inputs; which outputs are rows."""
        held = {**dict(self._block.named_parameters()), **dict(self._block.named_buffers())}
        own = {name: _leaf(tensor) for name, tensor in held.items()}
        given = [_leaf(_local(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        shown = [
            leaf.like(mine) if how == "noting" and isinstance(leaf, SlicedTensor) else mine
            for leaf, mine in zip(leaves, given, strict=True)
        ]
        args, kwargs = tree_unflatten(shown, spec)
        with trying.set_to(how), self._bare():
            made, _ = tree_flatten(torch.func.functional_call(self._block, own, args, kwargs))
        rows = tuple(isinstance(leaf, SlicedTensor) for leaf in made)
        outputs = [_local(leaf) for leaf in made if isinstance(leaf, Tensor)]
        inputs = [t for t in (*given, *own.values()) if isinstance(t, Tensor) and t.requires_grad]
        roots = [out for out in outputs if out.requires_grad]
        if not roots or not inputs:
            return [*outputs], rows
        weights = [torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out) for out in roots]
        with trying.set_to(how) if how == "plain" else nullcontext():
            found = torch.autograd.grad(roots, inputs, weights, allow_unused=True)
        return [*outputs, *found], rows


def _local(leaf: Any) -> Any:
    return local_of(leaf) if isinstance(leaf, SlicedTensor) else leaf


def _leaf(tensor: Tensor) -> Tensor:
    """A copy, without what made it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _kind(block: nn.Module, leaves: list[Any]) -> Any:
    of = lambda x: (type(x).__name__, tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x)
    return block.training, torch.is_grad_enabled(), torch.is_autocast_enabled(), tuple(map(of, leaves))


def _close(want: Tensor | None, got: Tensor | None) -> bool:
    if want is None or got is None:
        return (want is None) == (got is None)
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not want.is_floating_point():
        return torch.equal(want, got)
    limit = {torch.float64: 1e-9, torch.float32: 1e-3}.get(want.dtype, 3e-2)  # autocast rounds on the way
    return bool((want - got).abs().max() <= limit * want.abs().max().clamp(min=1e-6)) if want.numel() else True
