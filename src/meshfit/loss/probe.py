"""What a loss is a mean over, found by a trial on a few samples.

The loss of all of them, and its gradient, must be the weighted mean of those of the parts, for two ways to cut them:
in double precision, on a copy of the model, up to one part in a million. Where the model is too large to be copied, or
does not run in double precision, what rounding leaves is allowed. Random numbers are the same on both sides: see
loss/draws.py.

A loss for which no weighting makes that true (contrastive, ranking, over the batch's statistics) is one of the whole
batch: ``LossDenominator(kind="batch")``. What then has to be gathered is noted: which dim of each output is that of
the samples.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.axes.buffers.watch import buffers_kept
from meshfit.axes.expert import balance
from meshfit.axes.spec import whole_output
from meshfit.data import tree
from meshfit.errors import in_short
from meshfit.generators import Generators
from meshfit.loss.draws import Composing, Incomparable, Noting
from meshfit.loss.gather import gathering
from meshfit.loss.objective import LossDenominator, Objective, call, check_scalar, finders, split, stated
from meshfit.loss.outputs import NoRows, bytes_moved, cut_rows, cuts_of, output_rows
from meshfit.torch_private import BatchNorm, Dropout

SAMPLES = 8
LARGEST = 2**26
"""Elements of parameters up to which a model is copied into double precision."""

EXACT = 1e-6
ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROUNDED_TF32 = 1e-3
"""What a loss may differ by, in double precision and in others; gradients ten times as much."""

LAST = 8
"""Parameters, the last ones, whose gradients are compared."""


def find_denominator(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    device: torch.device,
    inside: Callable[[], AbstractContextManager[None]] | None = None,
    *,
    auxiliary: bool = False,
) -> LossDenominator:
    """What ``objective`` is a mean over; ``batch`` holds a few samples to try it on. ``inside`` goes around what runs a
    model that is laid out over ranks already: all of them call it together. ``auxiliary``: the load-balancing loss of a
    mixture is on trial too; else it is left out, as one that is made right by itself (axes/expert/balance.py).
    Whatever the model or the loss itself raises is raised here."""
    said = stated(objective)
    if said is not None and said.kind == "targets":
        targets = split(batch)[1]
        if isinstance(targets, Tensor) and targets.dim():
            classes = targets.shape[1] if targets.is_floating_point() and targets.dim() > 1 else 1
            return replace(said, unit=targets.numel() / max(1, len(targets)) / classes)
    there = tree.size(batch)
    samples = min(SAMPLES, there)
    if samples < 2:
        return LossDenominator(kind="samples")
    batch = tree.to_device(tree.rows(batch, slice(0, samples), there), device)
    small = sum(p.numel() for p in model.parameters()) <= LARGEST
    ways = [_Way(exact=True)] if inside is None and small else [] if inside is None else [_Way(gradients=False)]
    around = inside or nullcontext
    error: Exception | None = None
    for way in (*ways, _Way(), _Way(training=True)):  # the best first
        try:
            left_out = nullcontext() if auxiliary else balance.left_out(model)
            with _prepared(model, way) as used, torch.autocast(device.type, enabled=False), left_out:
                trial = _Trial(objective, used, way, around, batch, samples, device)
                found = trial.found()
                if trial.finite or len(kept := trial.finite_samples()) in (0, 1, samples):
                    return found
                some = tree.rows(batch, torch.tensor(kept, device=device), samples)
                return _Trial(objective, used, way, around, some, len(kept), device).found()
        except Exception as raised:  # not in this way: double precision, say, or not in eval mode
            error = raised
    assert error is not None
    raise error


@dataclass(frozen=True)
class _Way:
    """One way to run the trial."""

    exact: bool = False
    """In double precision, on a copy."""
    gradients: bool = True
    training: bool = False
    """As it is trained, for a model that has no loss in eval mode; but with no dropout, and no BatchNorm over the few
    samples: the loss alone is on trial."""


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t.to(torch.complex128) if t.is_complex() else t


@contextmanager
def _prepared(model: nn.Module, way: _Way) -> Iterator[nn.Module]:
    if way.exact:
        yield copy.deepcopy(model).double().eval()
        return
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = way.training and modes[module] and not isinstance(module, BatchNorm | Dropout)
    try:
        with buffers_kept(model):
            yield model
    finally:
        for module, mode in modes.items():
            module.training = mode


class CrossEntropies(TorchFunctionMode):
    """Notes every mean cross entropy computed below it: (result, targets, ignored index, class weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, int, Tensor | None]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (F.cross_entropy, F.nll_loss):
            given: dict[str, Any] = dict(
                zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)
            )
            given |= kwargs or {}
            if given.get("reduction", "mean") == "mean":
                self.seen.append((result, given["target"], given.get("ignore_index", -100), given.get("weight")))
        return result


@dataclass
class _Side:
    """What came of one run."""

    value: float
    count: float | None
    """Of a loss that gives (sum, count)."""
    gradients: list[Tensor | None]
    seen: list[tuple[Tensor, Tensor, int, Tensor | None]] = field(default_factory=list)


class _Trial:
    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        way: _Way,
        around: Callable[[], AbstractContextManager[None]],
        batch: Any,
        samples: int,
        device: torch.device,
    ):
        self.objective, self.model, self.way, self.around = objective, model, way, around
        self.batch, self.samples = tree.map_tensors(_double, batch) if way.exact else batch, samples
        kinds = {torch.float32, *(p.dtype for p in model.parameters())}
        rounded = max(ROUNDED.get(kind, EXACT) for kind in kinds)
        self.limit = EXACT if way.exact else max(rounded, ROUNDED_TF32) if device.type == "cuda" else rounded
        self.start = Generators(device)
        self.gathers = self.draws = False
        self.finite = True
        self.wholes: list[Tensor] = []
        """What the whole batch gave to ``meshfit.gather``, call by call."""

    def found(self) -> LossDenominator:
        try:
            return self._found()
        finally:
            self.start.restore()

    def _found(self) -> LossDenominator:
        run, unfit, dims, moved = self._objective, "", (), (0, 0)
        along: list[int | None] | None = None
        if self.objective.loss is not None:
            try:
                compare = 1 if self.way.exact else 50
                outputs, dims = output_rows(self._outputs, self.samples, self.limit * compare, self.start)
            except NoRows as why:
                unfit = str(why)
            else:
                targets = split(self.batch)[1]
                run, moved = partial(self._loss, outputs, dims), bytes_moved(outputs, dims, targets, self.samples)
                both = zip(dims, tree.leaves(outputs), strict=True)
                along = [dim for dim, leaf in both if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        try:
            over, why = self._compared(run, along)
        except Incomparable:
            over, why = None, "it draws random numbers in a way that depends on the number of samples"
        if over is None and self.start.moved_others:  # the draws of a part are not those of the whole
            return LossDenominator(kind="batch", untried=True)
        if over is None:
            targets = [leaf for leaf in tree.leaves(split(self.batch)[1]) if leaf is not None]
            if not unfit and not all(isinstance(leaf, Tensor) for leaf in targets):
                unfit = "its targets are not tensors, and are not gathered"
            return LossDenominator(kind="batch", dims=dims, moved=moved, draws=self.draws, why=why, unfit=unfit)
        return replace(over, gathers=self.gathers)

    def finite_samples(self) -> list[int]:
        """Those whose loss alone is finite: a batch with one that is not says nothing."""
        kept = []
        for i in range(self.samples):
            with suppress(Exception):
                if isfinite(self._side(self._objective, slice(i, i + 1)).value):
                    kept.append(i)
        self.start.restore()
        return kept

    # One run

    def _part(self, cut: slice) -> Any:
        """A copy: a model may write to its inputs."""
        return tree.map_tensors(torch.clone, tree.rows(self.batch, cut, self.samples))

    def _outputs(self, cut: slice) -> Any:
        with self.around():
            return whole_output(call(self.model, split(self._part(cut))[0]))

    def _objective(self, cut: slice) -> tuple[Any, Sequence[Tensor]]:
        """The loss of some samples by model and loss together, and what its gradient is compared of."""
        parameters = [p for p in self.model.parameters() if p.requires_grad][-LAST:] if self.way.gradients else []
        with self.around():
            return self.objective(self.model, self._part(cut)), parameters

    def _loss(self, outputs: Any, dims: tuple[int | None, ...], cut: slice) -> tuple[Any, Sequence[Tensor]]:
        """The same by the loss alone, of outputs that are there."""
        assert self.objective.loss is not None
        given: list[Tensor] = []
        left = iter(dims)

        def leaf(x: Any) -> Any:
            dim = next(left)
            if not isinstance(x, Tensor):
                return x
            x = _double(x.detach()) if self.way.exact else x.detach()
            x = x if dim is None else cut_rows(x, dim, cut, self.samples)
            if x.is_floating_point():
                given.append(x := x.clone().requires_grad_())
            return x

        loss, targets = self.objective.loss, tree.rows(split(self.batch)[1], cut, self.samples)
        if isinstance(loss, nn.Module):  # a copy: it may have buffers of its own
            loss = copy.deepcopy(loss)
            loss = loss.double() if self.way.exact else loss
        return loss(tree.map_leaves(leaf, outputs), tree.map_tensors(torch.clone, targets)), given

    def _side(self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], cut: slice) -> _Side:
        with torch.set_grad_enabled(self.way.gradients), CrossEntropies() as heard:
            loss, given = run(cut)
            pair = isinstance(loss, tuple | list)
            total = check_scalar(loss[0] if pair else loss)
            gradients: list[Tensor | None] = [None] * len(given)
            if given and total.requires_grad:
                gradients = list(torch.autograd.grad(total, given, allow_unused=True))
        count = float(torch.as_tensor(loss[1]).detach()) if pair else None
        return _Side(float(total.detach()), count, gradients, heard.seen)

    # Whole and parts

    def _compared(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], along: list[int | None] | None
    ) -> tuple[LossDenominator | None, str]:
        """What makes the whole out of the parts, None if nothing does, and the numbers. Gradients of parts are added;
        those of outputs put together ``along`` a dim of each."""
        everything = slice(0, self.samples)
        self.start.restore()
        with gathering(self._note):
            whole = self._side(run, everything)
        self.draws, self.finite = self.start.moved, isfinite(whole.value)
        ways: list[tuple[_Side, list[_Side], list[slice]]] = []
        for sizes in cuts_of(self.samples):
            cuts = [slice(0, sizes[0]), slice(sizes[0], self.samples)]
            try:
                whole, parts = self._sides(run, whole, cuts)
            except Incomparable:
                raise
            except Exception as error:
                if self.way.exact:
                    raise
                return (
                    None,
                    f"of {self.samples} samples it is {whole.value:.6g}; of {sizes[0]} alone: {in_short(error)}",
                )
            ways.append((whole, parts, cuts))
        for over in self._candidates(whole):
            if all(self._explains(over, *way, along) for way in ways):
                return over, ""
        mean = sum(p.value * (c.stop - c.start) for p, c in zip(ways[0][1], ways[0][2], strict=True)) / self.samples
        return None, f"of {self.samples} samples it is {whole.value:.6g}; the mean over two parts of them {mean:.6g}"

    def _sides(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], whole: _Side, cuts: list[slice]
    ) -> tuple[_Side, list[_Side]]:
        first: Noting | None = None
        notes, parts = [], []
        for cut in cuts:
            self.start.restore()
            with ExitStack() as stack:
                if self.draws:
                    notes.append(stack.enter_context(Noting(first)))
                    first = first or notes[0]
                stack.enter_context(gathering(self._replay(cut)))
                parts.append(self._side(run, cut))
        if not self.draws:
            return whole, parts
        self.wholes.clear()
        self.start.restore()
        with Composing(notes), gathering(self._note):
            whole = self._side(run, slice(0, self.samples))
        if self.gathers:  # again, now that what all give to it is known
            for i, cut in enumerate(cuts):
                self.start.restore()
                with Noting(notes[0] if i else None), gathering(self._replay(cut)):
                    parts[i] = self._side(run, cut)
        return whole, parts

    def _note(self, tensor: Tensor) -> Tensor:
        self.gathers = True
        self.wholes.append(tensor.detach())
        return tensor

    def _replay(self, cut: slice) -> Callable[[Tensor], Tensor]:
        """``meshfit.gather`` for a part: its rows among those that the other part gave."""
        calls = iter(list(self.wholes))

        def act(tensor: Tensor) -> Tensor:
            every = next(calls, None)
            if every is None or len(every) * (cut.stop - cut.start) != len(tensor) * self.samples:
                return tensor
            each = len(every) // self.samples
            return torch.cat([every[: cut.start * each], tensor, every[cut.stop * each :]])

        return act

    def _candidates(self, whole: _Side) -> Iterator[LossDenominator]:
        if whole.count is not None:
            yield LossDenominator(kind="pair")
            return
        for result, target, ignore, weight in whole.seen:
            if target.is_floating_point() or float(result.detach()) != whole.value:
                continue
            for find in finders(self.batch):
                found = find(self.batch)
                if torch.equal(found[found != ignore].flatten(), target[target != ignore].flatten()):
                    unit = target.numel() / self.samples
                    yield LossDenominator(kind="targets", unit=unit, ignore=ignore, weight=_native(weight), find=find)
        if not any((target == ignore).any() for _, target, ignore, _ in whole.seen):
            yield LossDenominator(kind="samples")
        yield LossDenominator(kind="sum")

    def _explains(
        self, over: LossDenominator, whole: _Side, parts: list[_Side], cuts: list[slice], along: list[int | None] | None
    ) -> bool:
        """Whether the parts, weighted as ``over`` says, make the whole: its value, and its gradient."""
        if over.kind == "pair":
            counts = [part.count or 0.0 for part in parts]
            if None in (whole.count, *(p.count for p in parts)) or not _near(sum(counts), whole.count, EXACT):
                return False
            weights, total = [1.0] * len(parts), 1.0
        elif over.kind == "targets":
            weights = [float(over.count(tree.rows(self.batch, cut, self.samples))) for cut in cuts]
            total = sum(weights)
        else:
            weights = [1.0 if over.kind == "sum" else float(cut.stop - cut.start) for cut in cuts]
            total = 1.0 if over.kind == "sum" else float(self.samples)
        if not total:
            return False
        limit = self.limit
        made = [w / total * part.value for w, part in zip(weights, parts, strict=True) if w]
        if not _near(sum(made), whole.value, limit, scale=max(map(abs, made), default=0.0)):
            return False
        if self.gathers:  # what comes back to a row from other ranks' losses is not seen here
            return True
        most = max((float(g.abs().max()) for g in whole.gradients if g is not None and g.numel()), default=0.0)
        for i, gradient in enumerate(whole.gradients):
            terms = [
                torch.zeros_like(part.gradients[i]) if not w else part.gradients[i] * (w / total)  # type: ignore[arg-type, operator]
                for w, part in zip(weights, parts, strict=True)
                if part.gradients[i] is not None
            ]
            if not terms and gradient is None:
                continue
            dim = None if along is None else along[i]
            if dim is not None and len(terms) < len(parts):
                return False
            joined = torch.cat(terms, dim) if dim is not None else sum(terms, torch.zeros(()))
            other = torch.zeros_like(joined) if gradient is None else gradient
            if not bool(((joined - other).abs() <= 10 * limit * most).all()):
                return False
        return True


def _near(a: float, b: float | None, limit: float, scale: float = 0.0) -> bool:
    return b is not None and abs(a - b) <= limit * max(abs(a), abs(b), scale)


def _native(weight: Tensor | None) -> Tensor | None:
    return weight.float() if weight is not None and weight.dtype == torch.float64 else weight
