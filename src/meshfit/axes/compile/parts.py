"""A block that is given split tensors, compiled: with plain tensors in the place of a rank's parts.

The compiler does not see through the classes of tensors that hold a rank's rows (sequence=split) or positions
(context=), so a compiled block is given those as plain tensors. That is the same only if the block's own code treats
each row alike. So before a block is compiled for a kind of inputs, it runs both ways once, without the compiler, on
those inputs: outputs and the gradients of inputs and weights must agree, on all ranks. A block that does not stays as
it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.spec import SplitTensor, to_local
from meshfit.axes.tensor.border import trying
from meshfit.axes.tensor.region import SEQUENCE
from meshfit.axes.tensor.sliced import SlicedTensor
from meshfit.comm.group import Group
from meshfit.generators import Generators
from meshfit.torch_private.trees import tree_flatten, tree_unflatten

Forward = Callable[..., Any]

CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


class BlockOfParts:
    """``forward`` of a block, compiled where that is the same. ``groups``: those that split tensors."""

    def __init__(self, block: nn.Module, forward: Forward, groups: Sequence[Group]):
        self._block, self._forward, self._groups = block, forward, groups
        self._compiled = torch.compile(forward)
        self._kinds: dict[Any, tuple[bool, ...] | None] = {}
        """By kind of inputs: which outputs are split; None: it is not compiled for such."""
        self._split: tuple[bool, ...] | None = None
        """Which inputs are split, in all kinds that it is compiled for: regions inside know one way alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trying.get():
            return self._forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        split = [leaf for leaf in leaves if isinstance(leaf, SplitTensor)]
        if not _alike(split):
            return self._forward(*args, **kwargs)
        kind = _kind(self._block, leaves)
        if kind not in self._kinds:
            pattern = tuple(isinstance(leaf, SplitTensor) for leaf in leaves)
            self._kinds[kind] = self._tried(leaves, spec, split) if self._split in (None, pattern) else None
            self._split = pattern if self._kinds[kind] is not None else self._split
        made_split = self._kinds[kind]
        if made_split is None:
            return self._forward(*args, **kwargs)
        args, kwargs = tree_unflatten([_local(leaf) for leaf in leaves], spec)
        made, spec = tree_flatten(self._compiled(*args, **kwargs))
        shown = [split[0].like(x) if is_split else x for x, is_split in zip(made, made_split, strict=True)]
        return tree_unflatten(shown, spec)

    def _tried(self, leaves: list[Any], spec: Any, split: Sequence[SplitTensor]) -> tuple[bool, ...] | None:
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        drawn = Generators(device)
        try:
            want, made = self._run("noting", leaves, spec)
            drawn.restore()
            try:
                got, _ = self._run("plain", leaves, spec)
                agree = len(want) == len(got) and all(map(_close, want, got))
                agree = agree and _alike([*split[:1], *(x for x in made if isinstance(x, SplitTensor))])
            except (RuntimeError, ValueError, TypeError):  # another shape than its code is made for
                agree = False
        finally:
            drawn.restore()
        for group in self._groups:
            agree = bool(group.all_gather(torch.tensor([agree], device=device).int()).all())
        return tuple(isinstance(x, SplitTensor) for x in made) if agree else None

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Without what other axes put around the block: that is not compiled either."""
        around = self._block.__dict__.pop("forward")
        self._block.__dict__["forward"] = self._forward
        try:
            yield
        finally:
            self._block.__dict__["forward"] = around

    def _run(self, how: str, leaves: list[Any], spec: Any) -> tuple[list[Tensor | None], list[Any]]:
        """Outputs and gradients, of copies of weights and inputs, as plain tensors; and what was returned."""
        held = {**dict(self._block.named_parameters()), **dict(self._block.named_buffers())}
        own = {name: _leaf(tensor) for name, tensor in held.items()}
        given = [_leaf(_local(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        shown = [
            leaf.like(mine) if how == "noting" and isinstance(leaf, SplitTensor) else mine
            for leaf, mine in zip(leaves, given, strict=True)
        ]
        args, kwargs = tree_unflatten(shown, spec)
        with trying.set_to(how), self._bare():
            made, _ = tree_flatten(torch.func.functional_call(self._block, own, args, kwargs))
        outputs = [_local(leaf) for leaf in made if isinstance(leaf, Tensor)]
        inputs = [t for t in (*given, *own.values()) if isinstance(t, Tensor) and t.requires_grad]
        roots = [out for out in outputs if out.requires_grad]
        if not roots or not inputs:
            return [*outputs], made
        weights = [torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out) for out in roots]
        with trying.set_to(how) if how == "plain" else nullcontext():
            found = torch.autograd.grad(roots, inputs, weights, allow_unused=True)
        return [*outputs, *found], made


def _local(leaf: Any) -> Any:
    return to_local(leaf)[0] if isinstance(leaf, SplitTensor) else leaf


def _alike(split: Sequence[SplitTensor]) -> bool:
    """Whether all are split in one way, and a compiled block may be given the plain tensors in their place."""
    hows = [to_local(x)[1] for x in split]
    if any(len(how) != 1 or how != hows[0] for how in hows):
        return False
    return not any(isinstance(x, SlicedTensor) and not _even_rows(x) for x in split)


def _even_rows(x: SlicedTensor) -> bool:
    return x.at == SEQUENCE and x.length > 0 and x.length % x.group.size == 0


def _leaf(tensor: Tensor) -> Tensor:
    """A copy, without what made it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _kind(block: nn.Module, leaves: list[Any]) -> Any:
    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return type(x).__name__, tuple(x.shape), x.dtype, x.requires_grad
        return x if isinstance(x, CONSTANTS) else type(x)  # not its repr, which may hold an address

    devices = sorted({leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)})
    autocast = [(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]
    return block.training, torch.is_grad_enabled(), tuple(autocast), tuple(map(of, leaves))


def _close(want: Tensor | None, got: Tensor | None) -> bool:
    if want is None or got is None:
        return (want is None) == (got is None)
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not want.is_floating_point():
        return torch.equal(want, got)
    limit = {torch.float64: 1e-9, torch.float32: 1e-3}.get(want.dtype, 3e-2)  # autocast rounds on the way
    return bool((want - got).abs().max() <= limit * want.abs().max().clamp(min=1e-6)) if want.numel() else True
