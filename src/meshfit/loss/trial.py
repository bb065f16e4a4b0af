"""Trial of a loss on some samples: which weighting of its parts makes the whole.

A ``loss=`` is tried by itself, of what the model returned for all samples, unless that is too large: then, like a step
or a model's own loss, together with the model.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.spec import whole_output
from meshfit.data import tree
from meshfit.errors import in_short
from meshfit.generators import Generators
from meshfit.loss.draws import Composing, Incomparable, Noting
from meshfit.loss.gather import gathering
from meshfit.loss.logged import LoggedTrial, as_numbers, kind_of
from meshfit.loss.objective import LossDenominator, Objective, TargetPlace, call, check_scalar, split
from meshfit.loss.outputs import NoRows, TooLargeOutputs, bytes_moved, cut_rows, cuts_of, output_rows
from meshfit.loss.side import LossSide, Rounding, TrialWay
from meshfit.loss.targets import CrossEntropies, are_targets, moved, places
from meshfit.python_state import PythonState
from meshfit.step import has_outputs, parted

LARGEST_OUTPUTS = 2**28
"""Elements that a model returns for the trial, up to which the loss is tried by itself."""

EXACT = 1e-6
ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROUNDED_TF32 = 1e-3
"""What a loss may differ by, in double precision and in others; gradients ten times as much, what a model returns 50
times."""
LARGEST_LIMIT = 0.1

FIRST, LAST = 2, 6
"""Parameters whose gradients are compared: of the first ones all of backward is seen, of the last ones the loss."""


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t.to(torch.complex128) if t.is_complex() else t


class LossTrial:
    """Of some samples, against their parts."""

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        way: TrialWay,
        around: Callable[[], AbstractContextManager[None]],
        batch: Any,
        samples: int,
    ):
        self.objective, self.model, self.way, self.around = objective, model, way, around
        self.batch, self.samples = tree.map_tensors(_double, batch) if way.exact else batch, samples
        kinds = {torch.float32, *(p.dtype for p in model.parameters())}
        rounded = max(ROUNDED.get(kind, EXACT) for kind in kinds)
        self.alone = EXACT if way.exact else max(rounded, ROUNDED_TF32) if way.device.type == "cuda" else rounded
        """What rounding may change in a loss by itself."""
        self.limit = self.alone if way.exact else max(self.alone, ROUNDED[way.precision.dtype])
        """... in what is tried."""
        self.gradients, self.too_large = way.gradients, False
        self.start = Generators(way.device)
        self.state = PythonState(model, *objective.code)
        self.gathers = self.draws = self.draws_otherwise = False
        self.dims: tuple[int | None, ...] = ()
        self.moved, self.unfit, self.why = (0, 0), "", ""
        self.finite = True
        self.outputs: bool | None = None
        self.names: tuple[str, ...] = ()
        """Of logged values."""
        self.wholes: list[Tensor] = []
        """What the whole batch gave to ``meshfit.gather``, call by call."""

    def explained(self) -> list[LossDenominator]:
        """All that make the whole out of the parts, the likeliest first."""
        try:
            return [replace(over, gathers=self.gathers, outputs=self.outputs) for over in self._explained()]
        finally:
            self.draws_otherwise = self.start.moved_others or self.state.drew(torchs=False)
            self.start.restore()
            self.state.restore()

    def _explained(self) -> list[LossDenominator]:
        run, along = self._objective, None
        if self.objective.loss is not None:
            try:
                outputs = self._find_rows()
            except TooLargeOutputs:
                pass
            else:
                if not self.unfit:
                    run, self.limit, self.gradients = partial(self._loss, outputs), self.alone, True
                    both = zip(self.dims, tree.leaves(outputs), strict=True)
                    along = [dim for dim, leaf in both if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        try:
            found, self.why = self._compared(run, along)
        except Incomparable:
            found, self.why = [], "it draws random numbers in a way that depends on the number of samples"
        return found

    def _find_rows(self) -> Any:
        """What the model returns for all samples; notes which dims are those of the samples."""
        limit = lambda: self.limit if self.way.exact else min(50 * self.limit, LARGEST_LIMIT)
        try:
            outputs, self.dims = output_rows(self._outputs, self.samples, limit, self.start)
        except NoRows as why:
            self.unfit = str(why)
            return None
        self.moved = bytes_moved(outputs, self.dims, split(self.batch)[1], self.samples)
        return outputs

    def as_batch(self) -> LossDenominator:
        """A loss of the whole batch: nothing else explains it."""
        if self.draws_otherwise:  # the draws of a part are not those of the whole
            return LossDenominator(kind="batch", untried=True)
        if self.too_large:
            self._find_rows()
            self.start.restore()
        targets = [leaf for leaf in tree.leaves(split(self.batch)[1]) if leaf is not None]
        if not self.unfit and not all(isinstance(leaf, Tensor) for leaf in targets):
            self.unfit = "its targets are not tensors, and are not gathered"
        logged = tuple((name, "loss") for name in self.names)
        facts = {"draws": self.draws, "why": self.why, "unfit": self.unfit, "logged": logged}
        return LossDenominator(kind="batch", dims=self.dims, moved=self.moved, **facts)

    def finite_samples(self) -> list[int]:
        """Those whose loss alone is finite: a batch with one that is not says nothing."""
        kept, self.gradients = [], False
        for i in range(self.samples):
            with suppress(Exception):
                if isfinite(self._side(self._objective, slice(i, i + 1)).value):
                    kept.append(i)
        self.start.restore()
        return kept

    # One run

    def _limited(self) -> AbstractContextManager[Any]:
        """Around what runs: what code rounds in double precision limits what can be told."""
        return Rounding(self._rounded) if self.way.exact else nullcontext()

    def _rounded(self, kind: torch.dtype) -> None:
        self.limit = max(self.limit, ROUNDED.get(kind, EXACT))

    def _part(self, cut: slice) -> Any:
        """A copy: a model may write to its inputs."""
        return tree.map_tensors(torch.clone, tree.rows(self.batch, cut, self.samples))

    def _outputs(self, cut: slice) -> Any:
        self.state.restore()
        with self._limited(), self.around(), self.way.precision.arithmetic(self.way.device):
            returned = call(self.model, split(self._part(cut))[0])
            if self.too_large:  # shapes alone; of a tensor that is split, those of the whole
                return tree.map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), returned)
            self.too_large = sum(t.numel() for t in tree.tensors(returned)) > LARGEST_OUTPUTS
            if self.too_large:
                raise TooLargeOutputs
            return whole_output(returned)

    def _objective(self, cut: slice) -> tuple[Any, Sequence[Tensor]]:
        """The loss of some samples by model and loss together, and what its gradient is compared of."""
        with self.around(), self.way.precision.arithmetic(self.way.device):
            loss = self.objective(self.model, self._part(cut))
        parameters = [p for p in self.model.parameters() if p.requires_grad]  # now: a forward may freeze some
        return loss, parameters[:FIRST] + parameters[FIRST:][-LAST:] if self.way.gradients else []

    def _loss(self, outputs: Any, cut: slice) -> tuple[Any, Sequence[Tensor]]:
        """The same by the loss alone, of outputs that are there."""
        assert self.objective.loss is not None
        given: list[Tensor] = []
        left = iter(self.dims)

        def leaf(x: Any) -> Any:
            dim = next(left)
            if not isinstance(x, Tensor):
                return x
            x = _double(x.detach()) if self.way.exact else x.detach()
            x = x if dim is None else cut_rows(x, dim, cut, self.samples)
            if x.is_floating_point():  # a copy; what precision= has rounded, in fp32
                kind = torch.float32 if x.dtype == self.way.precision.dtype else x.dtype
                given.append(x := x.to(kind, copy=True).requires_grad_())
            return x

        loss, targets = self.objective.loss, tree.rows(split(self.batch)[1], cut, self.samples)
        if isinstance(loss, nn.Module):  # a copy: it may have buffers of its own
            loss = copy.deepcopy(loss)
            loss = loss.double() if self.way.exact else loss
        return loss(tree.map_leaves(leaf, outputs), tree.map_tensors(torch.clone, targets)), given

    def value(self, cut: slice, *, afresh: bool, gradients: bool) -> LossSide:
        """By model and loss together; unless ``afresh``, after whatever ran before."""
        self.gradients = gradients
        self.start.restore()
        return self._side(self._objective, cut, afresh=afresh)

    def _side(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], cut: slice, *, afresh: bool = True
    ) -> LossSide:
        if afresh:
            self.state.restore()
        heard = CrossEntropies() if cut == slice(0, self.samples) else None  # parts are asked for numbers alone
        with (
            self._limited(),
            torch.set_grad_enabled(self.gradients),
            heard or nullcontext(),
            warnings.catch_warnings(action="ignore"),  # of batches of one sample, which may never come
        ):
            result, given = run(cut)
            self.outputs = has_outputs(result)
            loss, logged = parted(result)
            pair = isinstance(loss, tuple | list)
            total = check_scalar(loss[0] if pair else loss)
            gradients: list[Tensor | None] = [None] * len(given)
            if given and total.requires_grad:
                gradients = list(torch.autograd.grad(total, given, allow_unused=True))
        count = float(torch.as_tensor(loss[1]).detach()) if pair else None
        return LossSide(float(total.detach()), count, gradients, heard.seen if heard else [], as_numbers(logged))

    # Whole and parts

    def _compared(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], along: list[int | None] | None
    ) -> tuple[list[LossDenominator], str]:
        """What makes the whole out of the parts, and the numbers. Gradients of parts are added;
        those of outputs put together ``along`` a dim of each."""
        everything = slice(0, self.samples)
        self.start.restore()
        with gathering(self._note):
            whole = self._side(run, everything)
        self.draws, self.finite = self.start.moved or self.state.drew(torchs=True), isfinite(whole.value)
        self.names = tuple(whole.values)
        ways: list[tuple[LossSide, list[LossSide], list[slice]]] = []
        for sizes in cuts_of(self.samples):
            cuts = [slice(0, sizes[0]), slice(sizes[0], self.samples)]
            try:
                whole, parts = self._sides(run, whole, cuts)
            except Incomparable:
                raise
            except Exception as error:
                if self.way.exact:
                    raise
                why = f"of {self.samples} samples it is {whole.value:.6g}; of {sizes[0]} alone: {in_short(error)}"
                return [], why
            ways.append((whole, parts, cuts))
        found = [o for o in self._candidates(run, whole) if all(self.explains(o, *way, along) for way in ways)]
        found = [replace(over, logged=self._logged(over, ways)) for over in found]
        mean = sum(p.value * (c.stop - c.start) for p, c in zip(ways[0][1], ways[0][2], strict=True)) / self.samples
        return found, f"of {self.samples} samples it is {whole.value:.6g}; the mean over two parts of them {mean:.6g}"

    def _sides(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], whole: LossSide, cuts: list[slice]
    ) -> tuple[LossSide, list[LossSide]]:
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

    def _candidates(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], whole: LossSide
    ) -> Iterator[LossDenominator]:
        if whole.count is not None:
            yield LossDenominator(kind="pair")
            return
        for result, target, ignore, weight in whole.seen:
            if target.is_floating_point() or float(result.detach()) != whole.value:
                continue
            unit = target.numel() / self.samples
            found = [place for place in places(self.batch) if are_targets(place(self.batch), target, ignore)]
            for place in self._followed(run, found, ignore) if len(found) > 1 else found:
                yield LossDenominator(kind="targets", unit=unit, ignore=ignore, weight=weight, targets=place)
        if not any((target == ignore).any() for _, target, ignore, _ in whole.seen):
            yield LossDenominator(kind="samples")
        yield LossDenominator(kind="sum")

    def _followed(
        self, run: Callable[[slice], tuple[Any, Sequence[Tensor]]], found: list[TargetPlace], ignore: int
    ) -> list[TargetPlace]:
        """Of tensors that hold the same in these samples (tokens, and labels of which none is ignored), those that the
        loss takes its targets from: it follows when their values are moved by one, and none is ignored."""
        batch, gradients, following = self.batch, self.gradients, []
        self.gradients = False
        for place in found:
            other = moved(batch, place, ignore)
            self.batch = other
            self.start.restore()
            with suppress(Exception), gathering(lambda tensor: tensor):
                seen = self._side(run, slice(0, self.samples)).seen
                if any(are_targets(place(other), target, ignore) for _, target, _, _ in seen):
                    following.append(place)
        self.batch, self.gradients = batch, gradients
        return following or found

    def _logged(
        self, over: LossDenominator, ways: list[tuple[LossSide, list[LossSide], list[slice]]]
    ) -> tuple[tuple[str, str], ...]:
        """What each logged value is a mean over."""
        trials = []
        for whole, parts, cuts in ways if self.names else ():
            samples = [float(cut.stop - cut.start) for cut in cuts]
            weights = [part.count or 0.0 for part in parts] if over.kind == "pair" else samples
            if over.kind == "targets":
                weights = [float(over.count(tree.rows(self.batch, cut, self.samples))) for cut in cuts]
            trials.append(LoggedTrial(whole.values, [part.values for part in parts], samples, weights))
        return tuple((name, kind_of(name, trials, over.kind == "sum", self.limit)) for name in self.names)

    def explains(
        self,
        over: LossDenominator,
        whole: LossSide,
        parts: list[LossSide],
        cuts: list[slice],
        along: list[int | None] | None = None,
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
