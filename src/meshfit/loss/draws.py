"""Random numbers in a trial of a loss: so that a batch and its parts can be compared, the whole draws what its parts
drew.

Each part is run first, and what its random operations gave is noted. In the run of the whole batch the same operations
give the same: rows that the parts drew for their samples, one part after another (an index into the samples moved to
where the part begins); and what does not follow the number of samples, a time step or a mixing weight for all of them,
as the first part drew it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfit.torch_private.operators import TorchDispatchMode
from meshfit.torch_private.trees import tree_leaves

INDEX = ("randperm", "randint", "random_")
"""Draw whole numbers, below a limit that may be the number of samples."""


class Incomparable(Exception):
    """The whole draws in another way than its parts."""


class DrawnValues:
    """What one random operation gave."""

    def __init__(self, func: Any, args: Any, kwargs: Any, made: Any):
        self.name = func.__name__.partition(".")[0]
        self.made = [t.detach().clone() for t in tree_leaves(made) if isinstance(t, Tensor)]
        self.limit = 0
        if self.name in INDEX:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, int) and not isinstance(x, bool)]
            self.limit = max(given[:2], default=0)


class Noting(TorchDispatchMode):
    """Notes every draw. What has the shape that it had in ``first``, another part of another size, is no row of a
    sample: it is as it was there."""

    def __init__(self, first: "Noting | None" = None):
        super().__init__()
        self.first, self.draws = first, list[DrawnValues]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            at = len(self.draws)
            if self.first is not None and at < len(self.first.draws):
                _put(made, self.first.draws[at].made)
            self.draws.append(DrawnValues(func, args, kwargs or {}, made))
        return made


class Composing(TorchDispatchMode):
    """Lets random operations of the whole give what they gave in ``parts``."""

    def __init__(self, parts: Sequence[Noting]):
        super().__init__()
        drawn = [part.draws for part in parts]
        alike = len({len(draws) for draws in drawn}) == 1
        # each operation once in every part; or, in a loop over samples, those of one part after another
        self.draws = list(zip(*drawn, strict=True)) if alike else [(draw,) for draws in drawn for draw in draws]
        self.at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            if self.at >= len(self.draws):
                raise Incomparable
            draws, self.at = self.draws[self.at], self.at + 1
            tensors = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            for i, tensor in enumerate(tensors):
                tensor.copy_(_composed([draw.made[i] for draw in draws], [draw.limit for draw in draws], tensor))
        return made


def _composed(parts: list[Tensor], limits: list[int], whole: Tensor) -> Tensor:
    if parts[0].shape == whole.shape:
        return parts[0]
    if len(set(limits)) > 1:  # indices into the samples of each part
        parts = [part + sum(limits[:i]) for i, part in enumerate(parts)]
    for dim in range(whole.dim()):
        if all(part.dim() == whole.dim() for part in parts) and sum(part.shape[dim] for part in parts) == len(
            whole.transpose(0, dim)
        ):
            rest = [size for at, size in enumerate(whole.shape) if at != dim]
            if all([size for at, size in enumerate(part.shape) if at != dim] == rest for part in parts):
                return torch.cat(parts, dim)
    raise Incomparable


def _put(made: Any, earlier: list[Tensor]) -> None:
    tensors = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
    if [t.shape for t in tensors] == [t.shape for t in earlier]:
        for tensor, value in zip(tensors, earlier, strict=True):
            tensor.copy_(value)
