"""The loss of a few samples, and of parts of them: whether the parts, weighted, make the whole.

``LossTrial`` (trial.py) asks which weighting does, in two parts; ``confirm.py`` asks it of single samples, as the model
trains. Each run starts from the same random numbers and the same Python state, on copies of the inputs.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.precision import Precision
from meshfit.data import tree
from meshfit.generators import Generators
from meshfit.loss.logged import as_numbers
from meshfit.loss.objective import LossDenominator, Objective, check_scalar, split
from meshfit.loss.outputs import cut_rows
from meshfit.loss.targets import CrossEntropies
from meshfit.python_state import PythonState
from meshfit.step import has_outputs, parted
from meshfit.torch_private.operators import TorchDispatchMode

EXACT = 1e-6
ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROUNDED_TF32 = 1e-3
"""What a loss may differ by, in double precision and in others; gradients ten times as much, what a model returns 50
times."""

FIRST, LAST = 2, 6
"""Parameters whose gradients are compared: of the first ones all of backward is seen, of the last ones the loss."""


@dataclass(frozen=True)
class TrialWay:
    """One way to run a loss on trial."""

    device: torch.device
    exact: bool = False
    """In double precision, on a copy."""
    precision: Precision = Precision()  # noqa: RUF009
    gradients: bool = True
    """Also through the model, not of a loss alone."""
    training: bool = False
    """As it is trained, for a model that has no loss in eval mode; but with no dropout, and no BatchNorm over the few
    samples: the loss alone is on trial."""


@dataclass
class LossRun:
    """What one run gave."""

    value: float
    count: float | None
    """Of a loss that gives (sum, count)."""
    gradients: list[Tensor | None]
    seen: list[tuple[Tensor, Tensor, int, Tensor | None]]
    """Cross entropies within it: see ``CrossEntropies``."""
    values: dict[str, tuple[float, float | None]]
    """To be logged: each with its count, if it gives (sum, count)."""
    full_mask: bool
    """Whether it is over a mask that is all ones for these samples: see ``CrossEntropies``."""


class SampleLoss:
    """The loss of ``batch``, which holds so many samples. ``around`` goes around what runs the model."""

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        way: TrialWay,
        around: Callable[[], AbstractContextManager[None]],
        batch: Any,
        samples: int,
    ):
        self.objective, self.model, self.way, self.around, self.samples = objective, model, way, around, samples
        self.batch = tree.map_tensors(_double, batch) if way.exact else batch
        kinds = {torch.float32, *(p.dtype for p in model.parameters())}
        rounded = max(ROUNDED.get(kind, EXACT) for kind in kinds)
        self._limit_alone = EXACT if way.exact else max(rounded, ROUNDED_TF32 if way.device.type == "cuda" else 0.0)
        self.limit = self._limit_alone if way.exact else max(self._limit_alone, ROUNDED[way.precision.dtype])
        """What rounding may change."""
        self.gradients = way.gradients
        self.gathers = False
        """Whether the loss calls ``meshfit.gather``."""
        self.returns_outputs: bool | None = None
        """Whether a step returns outputs too, for metrics; None: it has not run."""
        self.start = Generators(way.device)
        self.state = PythonState(model, *objective.code)
        self._outputs: Any = None
        self._dims: tuple[int | None, ...] = ()
        self._along: list[int | None] | None = None

    @property
    def everything(self) -> slice:
        return slice(0, self.samples)

    def use_outputs(self, outputs: Any, dims: tuple[int | None, ...]) -> None:
        """From now on run the loss by itself, of what the model returned for all samples; ``dims``: which dim of each
        tensor in it is that of the samples."""
        self._outputs, self._dims = outputs, dims
        both = zip(dims, tree.leaves(outputs), strict=True)
        self._along = [dim for dim, leaf in both if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.limit, self.gradients = self._limit_alone, True

    def run(self, cut: slice, *, gradients: bool | None = None, afresh: bool = True) -> LossRun:
        """The loss of some samples, and its gradient with respect to parameters or, of a loss by itself, to outputs.
        Without ``afresh`` Python's state is as the last run left it."""
        gradients = self.gradients if gradients is None else gradients
        self.start.restore()
        if afresh:
            self.state.restore()
        entropies = CrossEntropies() if cut == self.everything else None  # parts are asked for numbers alone
        with (
            self.limited(),
            torch.set_grad_enabled(gradients),
            entropies or nullcontext(),
            warnings.catch_warnings(action="ignore"),  # of batches of one sample, which may never come
        ):
            result, given = self._together(cut) if self._outputs is None else self._alone(cut)
            self.returns_outputs = has_outputs(result)
            loss, logged = parted(result)
            pair = isinstance(loss, tuple | list)
            total = check_scalar(loss[0] if pair else loss)
            found: Sequence[Tensor | None] = [None] * len(given)
            if gradients and given and total.requires_grad:
                found = torch.autograd.grad(total, given, allow_unused=True)
        count = float(torch.as_tensor(loss[1]).detach()) if pair else None
        seen, full_mask = ([], False) if entropies is None else (entropies.seen, entropies.full_mask)
        return LossRun(float(total.detach()), count, list(found), seen, as_numbers(logged), full_mask)

    def part(self, cut: slice) -> Any:
        """A copy of some samples: a model may write to its inputs."""
        return tree.map_tensors(torch.clone, tree.rows(self.batch, cut, self.samples))

    def limited(self) -> AbstractContextManager[Any]:
        """Around what runs: what code rounds in double precision limits what can be told."""
        return _Rounding(self) if self.way.exact else nullcontext()

    def _together(self, cut: slice) -> tuple[Any, Sequence[Tensor]]:
        with self.around(), self.way.precision.arithmetic(self.way.device):
            loss = self.objective(self.model, self.part(cut))
        parameters = [p for p in self.model.parameters() if p.requires_grad]  # now: a forward may freeze some
        return loss, parameters[:FIRST] + parameters[FIRST:][-LAST:]

    def _alone(self, cut: slice) -> tuple[Any, Sequence[Tensor]]:
        loss, given, dims = self.objective.loss, list[Tensor](), iter(self._dims)
        assert loss is not None

        def leaf(x: Any) -> Any:
            dim = next(dims)
            if not isinstance(x, Tensor):
                return x
            x = _double(x.detach()) if self.way.exact else x.detach()
            x = x if dim is None else cut_rows(x, dim, cut, self.samples)
            if x.is_floating_point():  # a copy; what precision= has rounded, in fp32
                kind = torch.float32 if x.dtype == self.way.precision.dtype else x.dtype
                given.append(x := x.to(kind, copy=True).requires_grad_())
            return x

        if isinstance(loss, nn.Module):  # a copy: it may have buffers of its own
            loss = copy.deepcopy(loss)
            loss = loss.double() if self.way.exact else loss
        targets = tree.rows(split(self.batch)[1], cut, self.samples)
        return loss(tree.map_leaves(leaf, self._outputs), tree.map_tensors(torch.clone, targets)), given

    def shares(self, over: LossDenominator, cuts: Sequence[slice]) -> list[float]:
        """What each part weighs in the whole: all together 1; or each 1, of sums."""
        if over.kind in ("sum", "pair"):
            return [1.0] * len(cuts)
        counts = [float(cut.stop - cut.start) for cut in cuts]
        if over.kind == "targets":
            counts = [float(over.count(tree.rows(self.batch, cut, self.samples))) for cut in cuts]
        total = sum(counts) or 1.0
        return [count / total for count in counts]

    def explains(self, over: LossDenominator, whole: LossRun, parts: Sequence[LossRun], cuts: Sequence[slice]) -> bool:
        """Whether the parts, weighted as ``over`` says, make the whole: its value, and its gradient. Gradients of
        parts with respect to parameters are added, those to outputs put together along the samples."""
        if over.kind == "pair":
            counts = [part.count or 0.0 for part in parts]
            if None in (whole.count, *(p.count for p in parts)) or not near(sum(counts), whole.count or 0.0, EXACT):
                return False
        shares = self.shares(over, cuts)
        made = [share * part.value for share, part in zip(shares, parts, strict=True) if share]
        if not made or not near(sum(made), whole.value, self.limit, scale=max(map(abs, made))):
            return False
        if self.gathers:  # what comes back to a row from other ranks' losses is not seen here
            return True
        most = max((float(g.abs().max()) for g in whole.gradients if g is not None and g.numel()), default=0.0)
        for i, gradient in enumerate(whole.gradients):
            terms = [
                each * share if share else torch.zeros_like(each)
                for share, part in zip(shares, parts, strict=True)
                if (each := part.gradients[i]) is not None
            ]
            if not terms and gradient is None:
                continue
            dim = None if self._along is None else self._along[i]
            if dim is not None and len(terms) < len(parts):
                return False
            joined = torch.cat(terms, dim) if dim is not None else sum(terms, torch.zeros(()))
            other = torch.zeros_like(joined) if gradient is None else gradient
            if not bool(((joined - other).abs() <= 10 * self.limit * most).all()):
                return False
        return True


class _Rounding(TorchDispatchMode):
    """Lets ``limit`` follow what code rounds doubles to by itself: ``x.float()`` in a norm, ``x.bfloat16()`` before a
    product."""

    def __init__(self, loss: SampleLoss):
        super().__init__()
        self.loss = loss

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ == "_to_copy.default" and args[0].dtype == torch.float64 and made.is_floating_point():
            self.loss.limit = max(self.loss.limit, ROUNDED.get(made.dtype, EXACT))
        return made


def near(a: float, b: float, limit: float, scale: float = 0.0) -> bool:
    return isfinite(a - b) and abs(a - b) <= limit * max(abs(a), abs(b), scale)


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t.to(torch.complex128) if t.is_complex() else t
