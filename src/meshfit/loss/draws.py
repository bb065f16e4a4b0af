"""Random numbers in a trial of a loss: so that a batch and its parts can be compared, the whole draws what its parts
drew.

Each part is run first, and what its random operations gave is noted. In the run of the whole batch the same operations
give the same: rows that the parts drew for their samples, one part after another (an index into the samples moved to
where the part begins); and what does not follow the number of samples, a time step or a mixing weight for all of them,
as the first part drew it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshfit import generators
from meshfit.axes.buffers.watch import See
from meshfit.torch_private.operators import TorchDispatchMode
from meshfit.torch_private.trees import tree_leaves

INDEX = ("randperm", "randint", "random_")
"""Draw whole numbers, below a limit that may be the number of samples."""


MOST_DRAWS = 20_000
"""In a run without draws: a loop that draws until something comes would never end."""


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


class Undrawn(TorchDispatchMode):
    """Lets random operations give the middle of what they may: dropout drops nothing, noise is none. ``drew``: one was
    met for which that is not known."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.left, self.drew = device, MOST_DRAWS, False
        self._see: See | None = None

    @contextmanager
    def seeing(self, see: See) -> Iterator[None]:
        """Within it each operation is shown to ``see``, before it runs: a mode less than one of its own."""
        before, self._see = self._see, see
        try:
            yield
        finally:
            self._see = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._see is not None:
            self._see(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.left -= 1
        if self.left < 0:
            raise Incomparable
        before = generators.as_tensor(self.device)
        made, name = func(*args, **kwargs), func.__name__.partition(".")[0]
        own = any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(kwargs))
        if not own and torch.equal(before, generators.as_tensor(self.device)):
            return made  # attention without dropout, say
        if name == "native_dropout":
            made[0].copy_(args[0])
            made[1].fill_(1)
        elif name in ("bernoulli", "bernoulli_"):
            given = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if name == "bernoulli_" else args[0])
            made.copy_(given) if isinstance(given, Tensor) else made.fill_(given)
        elif name in MIDDLE:
            ends = {place: value for place, value in enumerate(args[1:]) if name.endswith("_")}
            made.fill_(MIDDLE[name](ends.get(0), ends.get(1)))
        else:
            self.drew = True
        return made


MIDDLE: dict[str, Callable[[Any, Any], float]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda *_: 0.5),
    **dict.fromkeys(("randn", "randn_like"), lambda *_: 0.0),
    "uniform_": lambda low, high: ((low or 0.0) + (1.0 if high is None else high)) / 2,
    "normal_": lambda mean, std: mean or 0.0,
    "exponential_": lambda rate, _: 1 / (rate or 1.0),
}


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
