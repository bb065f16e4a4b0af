"""Logits that are not computed yet: a head's input and weight, which show the shape of what they would make.

A head returns ``PendingLogits`` in training. Functions of shapes and of single elements (views, the shift of a language
model, ``.float()``, scaling, tanh) are done to the input, or noted to be done to each chunk of logits. Then
``F.cross_entropy`` computes logits and loss some tokens at a time: chunks.py. Whatever else reads them gets all logits,
computed there and then: exact, and as large as without; a warning says so once.
"""

import logging
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.axes.head_loss.chunks import Autocast, Chunks, HeldGradients, chunked_cross_entropy
from meshfit.axes.spec import Spec, SplitTensor, name_of
from meshfit.axes.tensor.sliced import POINTWISE, SlicedTensor, local_of
from meshfit.comm.group import Group
from meshfit.torch_private.trees import tree_leaves

Forward = Callable[..., Any]

BY_CHUNKS = POINTWISE - {"detach", "data", "cpu", "cuda", "clone"}
"""Functions that can wait until a chunk of logits is there."""


class Head:
    """The layer that makes logits, while a training runs."""

    def __init__(self, path: str, layer: nn.Linear):
        self.path, self.layer = path, layer
        self.held: ReferenceType[HeldGradients] | None = None
        """Gradients of its weight that wait for their backward."""
        self._warned = False

    def around(self, forward: Forward) -> Forward:
        """For its forward: logits that wait for their loss."""

        def run(input: Tensor) -> Tensor:
            if not (self.layer.training and torch.is_grad_enabled()):
                return forward(input)
            if isinstance(input, SlicedTensor):
                input = input.whole()
            if isinstance(input, SplitTensor):  # along the sequence, by an axis around this one
                return input.on_local(run)
            return PendingLogits.made_by(self, input, self.layer.weight, self.layer.bias)

        return run

    def read_by(self, name: str) -> None:
        """Logits were computed whole, for the function ``name``."""
        if not self._warned:
            logger = logging.getLogger("meshfit")
            logger.warning(
                "recompute=loss: all logits of %s were computed at once, because %s reads them", self.path, name
            )
        self._warned = True


class PendingLogits(SlicedTensor):
    """As a tensor, the head's input: its last dim (``at``) stands for that of the classes."""

    group: Group | None  # type: ignore[assignment]
    """The ranks over which the classes are cut."""

    head: Head
    weight: Tensor
    bias: Tensor | None
    autocast: Autocast
    """Under which the head was called."""

    todo: tuple[tuple[Any, tuple, dict[str, Any]], ...]
    """Functions of each logit, in order: the arguments after the logits."""

    @staticmethod
    def made_by(head: Head, x: Tensor, weight: Tensor, bias: Tensor | None) -> "PendingLogits":
        of_head = {"head": head, "weight": weight, "bias": bias, "autocast": Autocast.now(x.device)}
        return PendingLogits.made(x, **of_head, todo=(), group=None, at=-1, length=0)

    def over(self, group: Group) -> "PendingLogits":
        """The same, of which each rank of ``group`` has some classes."""
        return self.like(local_of(self), group=group)

    @property
    def full_length(self) -> int:
        return self.weight.shape[0] * (1 if self.group is None else self.group.size)

    def whole(self) -> Tensor:
        """All logits, computed at once."""
        if self.gathered is None:
            made = self.computed()
            self.gathered = made.whole() if isinstance(made, SlicedTensor) else made
        return self.gathered

    def computed(self) -> Tensor:
        """This rank's logits, at once."""
        with self.autocast():
            made = F.linear(local_of(self).movedim(self.at, -1), self.weight, self.bias).movedim(-1, self.at)
        for func, args, kwargs in self.todo:
            made = func(made, *args, **kwargs)
        return made if self.group is None else SlicedTensor.of(made, self.group, self.at)

    def at_once(self, reader: str) -> Tensor:
        """This rank's logits, for ``reader``, who cannot take them by chunks."""
        self.head.read_by(reader)
        return self.whole() if self.changed else self.computed()

    def to_local(self) -> tuple[Tensor, Spec | None]:
        made = self.at_once("the next stage")
        return made.to_local() if isinstance(made, SlicedTensor) else (made, None)

    def pointwise(self, func: Any, args: Any, kwargs: Any) -> "PendingLogits | None":
        others = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
        single = all(type(x) is Tensor and x.numel() == 1 and not x.requires_grad for x in others)
        if name_of(func) == "clone" and args[0] is self:
            return self.like(local_of(self))
        if name_of(func) not in BY_CHUNKS or not args or args[0] is not self or not single:
            return None
        return self.like(local_of(self), todo=(*self.todo, (func, tuple(args[1:]), kwargs)))

    def cross_entropy(self, target: Tensor, **how: Any) -> Tensor:
        rows = local_of(self).movedim(self.at, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        now = Autocast.now(rows.device)
        chunks = Chunks(
            of_head=self.autocast, of_loss=now, todo=self.todo, dtype=self.made_dtype, group=self.group, **how
        )
        return chunked_cross_entropy(self.head, rows, self.weight, self.bias, target, chunks)

    @property
    def made_dtype(self) -> torch.dtype:
        """Of the logits."""
        made = torch.empty(0, dtype=self.autocast.of_product(local_of(self).dtype), device=local_of(self).device)
        for func, args, kwargs in self.todo:
            made = func(made, *args, **kwargs)
        return made.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = name_of(func), args[0] if args else None
        if isinstance(first, PendingLogits) and name in ASKED and not first.changed:
            return ASKED[name](first)
        if not any(isinstance(x, PendingLogits) and not x.changed for x in tree_leaves((args, kwargs or {}))):
            return super().__torch_function__(func, types, args, kwargs)
        before = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, PendingLogits) and x.gathered is None]
        made = super().__torch_function__(func, types, args, kwargs)
        for x in before:
            if x.gathered is not None:
                x.head.read_by(name)
        return made


ASKED: dict[str, Callable[[PendingLogits], Any]] = {
    "dtype": lambda x: x.made_dtype,
    "requires_grad": lambda x: local_of(x).requires_grad or x.weight.requires_grad,
    "element_size": lambda x: x.made_dtype.itemsize,
    "itemsize": lambda x: x.made_dtype.itemsize,
    "grad_fn": lambda x: x.whole().grad_fn,
    "__repr__": lambda x: f"PendingLogits({tuple(x.shape)}, {x.dtype}, of {x.head.path})",
}
