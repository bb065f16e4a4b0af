"""Trial of a loss on some samples: which weighting of its two parts makes the whole.

A ``loss=`` is tried by itself, of what the model returned for all samples, unless that is too large: then, like a step
or a model's own loss, together with the model.

Random numbers (draws.py): the whole draws what its parts drew. ``meshfit.gather``: a part is given its rows among those
of the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.spec import whole_output
from meshfit.data import tree
from meshfit.errors import in_short
from meshfit.loss.draws import Composing, Incomparable, Noting
from meshfit.loss.gather import gathering
from meshfit.loss.objective import LossDenominator, TargetPlace, call, split
from meshfit.loss.outputs import NoRows, bytes_moved, cuts_of, output_rows
from meshfit.loss.sample_loss import LossRun, SampleLoss, near
from meshfit.loss.targets import are_targets, places, with_other_targets

LARGEST_OUTPUTS = 2**28
"""Elements that a model returns for the trial, up to which the loss is tried by itself."""
LARGEST_LIMIT = 0.1


class TooLargeOutputs(Exception):
    """The loss is not tried by itself."""


class LossTrial(SampleLoss):
    """Of all samples, against two parts of them. What is found beside the weighting is kept for ``as_batch``."""

    finite = True
    draws = draws_otherwise = too_large = False
    """Whether random numbers are drawn: of torch, and of NumPy or Python."""
    dims: tuple[int | None, ...] = ()
    moved = 0, 0
    unfit = why = ""
    names: tuple[str, ...] = ()
    """Of logged values."""
    gathered: Sequence[Tensor] = ()
    """What the whole batch gave to ``meshfit.gather``, call by call."""

    def explained(self) -> list[LossDenominator]:
        """All that make the whole out of the parts, the likeliest first."""
        try:
            if self.objective.loss is not None:
                with suppress(TooLargeOutputs):
                    self._find_rows()
            return self._compared()
        except Incomparable:
            self.why = "it draws random numbers in a way that depends on the number of samples"
            return []
        finally:
            self.draws_otherwise = self.start.moved_others or self.state.drew(torchs=False)
            self.start.restore()
            self.state.restore()

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
        return LossDenominator(
            kind="batch",
            dims=self.dims,
            moved=self.moved,
            draws=self.draws,
            why=self.why,
            unfit=self.unfit,
            logged=tuple((name, "loss") for name in self.names),
        )

    def finite_samples(self) -> list[int]:
        """Those whose loss alone is finite: a batch with one that is not says nothing."""
        kept, self._outputs = [], None
        for i in range(self.samples):
            with suppress(Exception):
                if isfinite(self.run(slice(i, i + 1), gradients=False).value):
                    kept.append(i)
        self.start.restore()
        return kept

    def _find_rows(self) -> None:
        """Run the model on all samples and on parts: which dims of its outputs are those of the samples. If they can be
        told, the loss is run of these outputs from now on."""
        limit = lambda: self.limit if self.way.exact else min(50 * self.limit, LARGEST_LIMIT)
        try:
            outputs, self.dims = output_rows(self._returned, self.samples, limit, self.start)
        except NoRows as why:
            self.unfit = str(why)
            return
        self.moved = bytes_moved(outputs, self.dims, split(self.batch)[1], self.samples)
        if not self.too_large:
            self.use_outputs(outputs, self.dims)

    def _returned(self, cut: slice) -> Any:
        """What the model returns for some samples."""
        self.state.restore()
        with self.limited(), self.around(), self.way.precision.arithmetic(self.way.device):
            returned = call(self.model, split(self.part(cut))[0])
            if self.too_large:  # shapes alone; of a tensor that is split, those of the whole
                return tree.map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), returned)
            self.too_large = sum(t.numel() for t in tree.tensors(returned)) > LARGEST_OUTPUTS
            if self.too_large:
                raise TooLargeOutputs
            return whole_output(returned)

    def _compared(self) -> list[LossDenominator]:
        with gathering(self._note):
            whole = self.run(self.everything)
        self.draws, self.finite = self.start.moved or self.state.drew(torchs=True), isfinite(whole.value)
        self.names = tuple(whole.values)
        compared: list[tuple[LossRun, list[LossRun], list[slice]]] = []
        for cuts in cuts_of(self.samples):
            try:
                whole, parts = self._with_same_draws(whole, cuts)
            except Incomparable:
                raise
            except Exception as error:
                if self.way.exact:
                    raise
                self.why = (
                    f"of {self.samples} samples it is {whole.value:.6g}; of {cuts[0].stop} alone: {in_short(error)}"
                )
                return []
            compared.append((whole, parts, cuts))
        _, parts, cuts = compared[0]
        mean = sum(part.value * (cut.stop - cut.start) for part, cut in zip(parts, cuts, strict=True)) / self.samples
        self.why = f"of {self.samples} samples it is {whole.value:.6g}; the mean over two parts of them {mean:.6g}"
        if near(mean, whole.value, self.limit):
            self.why += ", but with another gradient"
        if self._masked(whole):
            self.why = (
                f"it is over a mask that is all ones in the {self.samples} samples tried, and may not be in others"
            )
        found = [over for over in self._candidates(whole) if all(self.explains(over, *each) for each in compared)]
        more = {"gathers": self.gathers, "outputs": self.returns_outputs}
        return [replace(over, logged=self._logged(over, compared), **more) for over in found]

    def _with_same_draws(self, whole: LossRun, cuts: list[slice]) -> tuple[LossRun, list[LossRun]]:
        """The whole and its parts; the whole once more if it draws, so that it draws what the parts drew."""
        parts, draws = [], list[Noting]()
        for cut in cuts:
            draws.append(Noting(draws[0] if draws else None))
            with draws[-1] if self.draws else nullcontext(), gathering(self._replay(cut)):
                parts.append(self.run(cut))
        if not self.draws:
            return whole, parts
        self.gathered = []
        with Composing(draws), gathering(self._note):
            whole = self.run(self.everything)
        if self.gathers:  # again, now that what all give to it is known
            for i, cut in enumerate(cuts):
                with Noting(draws[0] if i else None), gathering(self._replay(cut)):
                    parts[i] = self.run(cut)
        return whole, parts

    def _note(self, tensor: Tensor) -> Tensor:
        self.gathers = True
        self.gathered = [*self.gathered, tensor.detach()]
        return tensor

    def _replay(self, cut: slice) -> Callable[[Tensor], Tensor]:
        """``meshfit.gather`` for a part: its rows among those that the other part gave."""
        calls = iter(self.gathered)

        def act(tensor: Tensor) -> Tensor:
            every = next(calls, None)
            if every is None or len(every) * (cut.stop - cut.start) != len(tensor) * self.samples:
                return tensor
            each = len(every) // self.samples
            return torch.cat([every[: cut.start * each], tensor, every[cut.stop * each :]])

        return act

    def _candidates(self, whole: LossRun) -> Iterator[LossDenominator]:
        if whole.count is not None:
            yield LossDenominator(kind="pair")
            return
        if self._masked(whole):  # what else explains it here need not do so where the mask has zeros
            yield LossDenominator(kind="sum")
            return
        for result, target, ignore, weight in whole.seen:
            if target.is_floating_point() or float(result.detach()) != whole.value:
                continue
            unit = target.numel() / self.samples
            found = [place for place in places(self.batch) if are_targets(place(self.batch), target, ignore)]
            for place in self._followed(found, ignore) if len(found) > 1 else found:
                yield LossDenominator(kind="targets", unit=unit, ignore=ignore, weight=weight, targets=place)
        if not any((target == ignore).any() for _, target, ignore, _ in whole.seen):
            yield LossDenominator(kind="samples")
        yield LossDenominator(kind="sum")

    def _masked(self, whole: LossRun) -> bool:
        """Whether the user's own code takes a mean over a mask, which happens to be all ones in these samples."""
        return whole.full_mask and whole.count is None and bool(self.objective.code)

    def _followed(self, found: list[TargetPlace], ignore: int) -> list[TargetPlace]:
        """Of tensors that hold the same in these samples (tokens, and labels of which none is ignored), those that the
        loss takes its targets from: it follows when their values are moved by one, and none is ignored."""
        batch, following = self.batch, []
        for place in found:
            self.batch = with_other_targets(batch, place, ignore)
            with suppress(Exception), gathering(lambda tensor: tensor):
                seen = self.run(self.everything, gradients=False).seen
                if any(are_targets(place(self.batch), target, ignore) for _, target, _, _ in seen):
                    following.append(place)
        self.batch = batch
        return following or found

    def _logged(
        self, over: LossDenominator, compared: list[tuple[LossRun, list[LossRun], list[slice]]]
    ) -> tuple[tuple[str, str], ...]:
        """What each logged value is a mean over: what the loss is, or samples; or it is a sum."""

        def adds_up(name: str, kind: str) -> bool:
            for whole, parts, cuts in compared:
                shares = self.shares(over if kind == "loss" else LossDenominator(kind=kind), cuts)
                if kind == "loss" and over.kind == "pair":
                    counts = [part.count or 0.0 for part in parts]
                    shares = [count / (sum(counts) or 1.0) for count in counts]
                made = [s * part.values.get(name, (nan, None))[0] for s, part in zip(shares, parts, strict=True)]
                if not near(sum(made), whole.values[name][0], self.limit, scale=max(map(abs, made))):
                    return False
            return True

        kinds = ("samples", "sum") if over.kind == "sum" else ("loss", "samples", "sum")
        kind_of = lambda name: next((kind for kind in kinds if adds_up(name, kind)), kinds[0])
        gives_count = lambda name: compared[0][0].values[name][1] is not None
        return tuple((name, "pair" if gives_count(name) else kind_of(name)) for name in self.names)
