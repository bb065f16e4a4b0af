"""What a model computes in a step: its operations, as digests, without arithmetic.

The weights are on meta, where that is possible; all else is real: what a batch or a constant decides is decided as in
training. Two steps with the same operations on the same shapes are planned alike, so a plan found before can be used
again (cache.py). Where the operations are the same for shorter sequences, the plan is made on those: trials on a long
one take its square.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.calls import watched_calls
from meshfit.anatomy.copies import study, twin
from meshfit.anatomy.record_program import tensors
from meshfit.data import tree
from meshfit.torch_private.autograd import watched_functions
from meshfit.torch_private.operators import TorchDispatchMode
from meshfit.torch_private.tensors import storage_id
from meshfit.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten

SHORT = 32
"""Sequences are cut to so much and the remainder of their length, so that it can be divided by as much as before."""


@dataclass(frozen=True)
class Program:
    shaped: str
    """A digest of all operations: what they are, of what, with which shapes and numbers."""

    shapeless: str
    """Of what they are, and of what."""

    sizes: dict[str, int]
    """Elements of the first tensor that each module returned."""


def program_of(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Program | None:
    """Of ``loss(model, batch)``. A model that reads what it computes is run with its weights, on the CPU; None where
    that fails too."""
    batch = tree.map_tensors(torch.clone, batch)  # each in memory of its own, whatever they were views of
    for copied in (partial(twin, model, meta=True), partial(study, model)):
        try:
            copy = copied().train()
            digest = _Digest(copy, batch)
            calls, functions = watched_calls(copy, digest.entered, digest.left), watched_functions(digest.applied)
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), calls, functions, digest:
                loss(copy, batch)
        except Exception:  # of the model's own code, in ways that cannot be foreseen
            continue
        return Program(digest.shaped.hexdigest(), digest.shapeless.hexdigest(), digest.sizes)
    return None


class _Digest(TorchDispatchMode):
    def __init__(self, model: nn.Module, batch: Any):
        super().__init__()
        self.shaped, self.shapeless = hashlib.sha256(), hashlib.sha256()
        self.sizes: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._names: dict[Any, str] = {}
        self._held: list[torch.UntypedStorage] = []  # an address must not be used again
        for tensor in (*model.parameters(), *model.buffers(), *tree.tensors(batch)):
            self._number(tensor, made=True)
        self._given = len(self._numbers)

    def add(self, operation: str, shapeless: str | None = None) -> None:
        self.shaped.update(operation.encode())
        self.shapeless.update((operation if shapeless is None else shapeless).encode())

    def entered(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Plans change what modules take and return: the same operations outside of one are another program."""
        self.add(f"entered {path}")

    def left(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.add(f"left {path}")
        first = next(iter(tensors(out)), None)
        self.sizes.setdefault(path, 0 if first is None else first.numel())

    def applied(self, function: Any, apply: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Of an ``autograd.Function`` the backward does not run here: its code counts."""
        self.add(inspect.getsource(function))
        return apply(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        name = f"{self._named(func)} {torch.is_grad_enabled()}"
        operation, read = [name, self._named(spec)], [name]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                number = self._number(leaf)
                read.append(str(number))
                operation.append(f"{number} {leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} {leaf.storage_offset()}")
            elif not isinstance(leaf, torch.device | torch.Generator):
                operation.append(repr(leaf))
        self.add("|".join(operation), "" if self._is_of_table(func, args) else "|".join(read))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            moved = [_to_meta(leaf) for leaf in leaves]
            if any(new is not old for new, old in zip(moved, leaves, strict=True)):
                args, kwargs = tree_unflatten(moved, spec)
        out = func(*args, **kwargs)
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._number(leaf, made=True)
        return out

    def _is_of_table(self, func: Any, args: tuple) -> bool:
        """Whether it takes the first rows of a buffer, a parameter or an input: of all rows that is no operation."""
        return func is torch.ops.aten.slice.Tensor and self._number(args[0]) < self._given

    def _named(self, thing: Any) -> str:
        """Of an operation or the form of its arguments, which are few."""
        if thing not in self._names:
            self._names[thing] = str(thing)
        return self._names[thing]

    def _number(self, tensor: Tensor, made: bool = False) -> int:
        """Of its memory. What no operation made is a constant of the code: its values count."""
        storage = tensor.untyped_storage()
        known = self._numbers.get(storage_id(storage))
        if known is None:
            known = self._numbers[storage_id(storage)] = len(self._numbers)
            self._held.append(storage)
            if not made and not tensor.is_meta:
                self.shaped.update(contents_of(tensor))
        return known


def contents_of(tensor: Tensor) -> bytes:
    """What it holds, in short."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).digest() if flat.numel() else b""


def _to_meta(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x


def shorter(batch: Any) -> Any:
    """``batch`` with its sequences, or whatever is longest in it, cut short; None if it is short already."""
    length = max((size for t in tree.tensors(batch) for size in t.shape[1:]), default=0)
    if length <= 2 * SHORT:
        return None
    short = SHORT + length % SHORT

    def cut(t: Tensor) -> Tensor:
        for dim in range(1, t.dim()):
            t = t.narrow(dim, 0, short) if t.shape[dim] == length else t
        return t.contiguous()

    return tree.map_tensors(cut, batch)
