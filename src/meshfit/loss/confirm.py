"""What a loss is said to be a mean over, held against a batch cut into single samples, as the model trains.

A cross entropy says what it is a mean over, and other losses are tried in eval mode, in two parts (loss/probe.py).
Neither shows a *model* that looks at the other samples of its batch (at their mean, at the first: ``if x[0] > 0:``), a
step that cuts texts to the longest of them, or what is done in training mode alone. Such a loss is of the whole batch,
and the model cannot give its outputs by parts.

What code keeps in Python from one call to the next is found here too (``self.calls += 1``): a number that depends on
calls alone is put back between the microbatches of a step, so that it counts steps; what depends on the samples of
earlier batches, and changes the loss, cannot be had in parts.
"""

import warnings
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.buffers.watch import buffers_kept, weights_kept
from meshfit.data import tree
from meshfit.loss.objective import LossDenominator
from meshfit.loss.side import LossSide
from meshfit.loss.trial import LossTrial
from meshfit.patches import unprinted
from meshfit.python_state import SCALARS

SMALL = 2**18
"""Numbers of a batch up to which all samples are looked at, whatever a microbatch has."""


def looked_at(batch: Any, most: int, microbatch: int) -> int:
    """How many samples to look at: no more than fit where a microbatch does."""
    there = min(most, tree.size(batch))
    numbers = sum(t.numel() for t in tree.tensors(tree.rows(batch, slice(0, there), tree.size(batch))))
    return there if numbers <= SMALL else min(there, max(2, microbatch))


def held(over: LossDenominator, trial: LossTrial) -> LossDenominator | None:
    """``over``, with what code keeps in Python; or a loss of the whole batch, where single samples do not make the
    whole. None where it cannot be told: random numbers decide, or it does not run."""
    cuts = [slice(i, i + 1) for i in range(trial.samples)]
    with warnings.catch_warnings(), unprinted(), torch.no_grad():  # what the training says will be heard
        warnings.simplefilter("ignore")  # of the shapes of single samples
        try:
            whole, left, weights = _run(trial, slice(0, trial.samples))
            if trial.start.moved or trial.start.moved_others or not isfinite(whole.value):
                return None
            if left or weights:
                following, later, _ = _run(trial, slice(0, trial.samples), afresh=False)
                _, others, other_weights = _run(trial, cuts[0])
                by_calls, once = _same_numbers(left, others), _same_numbers(left, later)
                counters = tuple(name for name in by_calls if name not in once)
                kept = [name for name in left if name not in by_calls]
                if kept and abs(following.value - whole.value) > trial.limit * abs(whole.value):
                    return LossDenominator(kind="batch", remembers=kept[0])
                for name, weight in weights.items():
                    if name not in other_weights or not torch.equal(weight, other_weights[name]):
                        return LossDenominator(kind="batch", remembers=f"{name}, a weight that the forward writes")
                over = replace(over, counters=counters, writes=next(iter(weights), ""))
            parts = [_run(trial, cut)[0] for cut in cuts]
            if trial.explains(over, whole, parts, cuts):
                return over
            again = _run(trial, slice(0, trial.samples))[0]
            if abs(again.value - whole.value) > trial.limit * abs(whole.value):
                return None  # it draws numbers that nobody seeds
        except Exception:  # a single sample is squeezed away, say
            return None
        finally:
            trial.start.restore()
            trial.state.restore()
    few = [tree.rows(trial.batch, cut, trial.samples) for cut in cuts]
    counts = [float(over.count(part)) if over.kind == "targets" else 1.0 for part in few]
    values = [part.value for part, count in zip(parts, counts, strict=True) if count]
    if not all(map(isfinite, values)):
        return None
    one_by_one = f"the mean over them one by one {sum(values) / len(values):.6g}"
    why = f"of {trial.samples} samples it is {whole.value:.6g}; {one_by_one}"
    return LossDenominator(kind="batch", why=why, mixes=True)


def _run(trial: LossTrial, cut: slice, *, afresh: bool = True) -> tuple[LossSide, dict[str, Any], dict[str, Tensor]]:
    """The loss of some samples; what it left in Python, and the trained weights that it wrote."""
    with buffers_kept(trial.model), weights_kept(trial.model) as written:
        side, left = trial.value(cut, afresh=afresh), trial.state.changed()
        trained = {name for name, p in trial.model.named_parameters() if p.requires_grad}  # others: axes/buffers
        return side, left, {name: weight for name, weight in written().items() if name in trained}


def _same_numbers(some: dict[str, Any], others: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        name
        for name, value in some.items()
        if isinstance(value, SCALARS) and name in others and type(others[name]) is type(value) and others[name] == value
    )
