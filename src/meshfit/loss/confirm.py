"""What a loss is said to be a mean over, held against a batch cut into single samples, as the model trains.

A cross entropy says what it is a mean over, and other losses are tried in eval mode, in two parts (loss/probe.py).
Neither shows a *model* that looks at the other samples of its batch (at their mean, at the first: ``if x[0] > 0:``), a
step that cuts texts to the longest of them, or what is done in training mode alone. Such a loss is of the whole batch,
and the model cannot give its outputs by parts.

What code keeps in Python from one call to the next is found here too (``self.calls += 1``): a number that depends on
calls alone is put back between the microbatches of a step, so that it counts steps; what depends on the samples of
earlier batches, and changes the loss, cannot be had in parts.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshfit.axes.buffers.watch import buffers_kept, weights_kept
from meshfit.data import tree
from meshfit.loss.draws import Undrawn
from meshfit.loss.objective import LossDenominator
from meshfit.loss.side import LossSide
from meshfit.loss.trial import LossTrial
from meshfit.patches import unprinted
from meshfit.python_state import LARGEST, SCALARS

PARTS = 1, 2
"""Samples of a part: of one alone there may be no statistics, where there are of two."""

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
    with warnings.catch_warnings(), unprinted(), Undrawn(trial.way.device) as still:
        warnings.simplefilter("ignore")  # of the shapes of single samples; what the training says will be heard
        try:
            for graph in (False, True):  # a forward may ask for one
                with suppress(Exception):
                    return _held(over, trial, still, graph)
        finally:
            trial.start.restore()
            trial.state.restore()
    return None


def _held(over: LossDenominator, trial: LossTrial, still: Undrawn, graph: bool) -> LossDenominator | None:
    run = partial(_run, trial, still, gradients=graph)
    everything = slice(0, trial.samples)
    whole, left, weights = run(everything)
    drew = still.drew or trial.start.moved_others or trial.state.drew(torchs=False)
    if drew or not isfinite(whole.value):
        return None
    if left or weights:
        again, later, _ = run(everything, afresh=False)
        _, others, other_weights = run(slice(trial.samples // 2, trial.samples))
        after_others, _, _ = run(everything, afresh=False)
        by_calls, once = _same(left, others), _same(left, later)
        counters = tuple(name for name in by_calls if name not in once)
        kept = [name for name in left if name not in by_calls]
        if kept and not (_near(again, whole, trial) and _near(after_others, whole, trial)):
            return LossDenominator(kind="batch", remembers=kept[0])
        for name, weight in weights.items():
            if name not in other_weights or not torch.equal(weight, other_weights[name]):
                return LossDenominator(kind="batch", remembers=f"{name}, a weight that the forward writes")
        over = replace(over, counters=counters, writes=next(iter(weights), ""))
    for each in PARTS:
        mean = _mean_of_parts(over, trial, whole, _cuts(trial.samples, each), run)
        if mean is not None:
            break
    else:
        return None
    if mean and not all(_near(run(everything)[0], whole, trial) for _ in range(3)):
        return None  # it draws numbers that nobody seeds; two draws may happen to be alike
    if not mean and _gradients_mix(over, trial, still):
        each, mean = trial.samples // 2, "as large, but not so its gradient"
    if not mean:
        return over
    why = f"of {trial.samples} samples it is {whole.value:.6g}; the mean over parts of {each} is {mean}"
    return LossDenominator(kind="batch", why=why, mixes=True)


def _near(side: LossSide, whole: LossSide, trial: LossTrial) -> bool:
    return abs(side.value - whole.value) <= trial.limit * abs(whole.value)


def _cuts(samples: int, each: int) -> list[slice]:
    starts = range(0, samples - each + 1, each)
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], samples], strict=True)]


def _mean_of_parts(
    over: LossDenominator, trial: LossTrial, whole: LossSide, cuts: list[slice], run: Callable[..., Any]
) -> str | None:
    """Empty where the parts make the whole, else their mean. None: they do not run, or are not finite."""
    try:
        parts = [run(cut)[0] for cut in cuts]
    except Exception:  # a single sample is squeezed away, say
        return None
    if trial.explains(over, whole, parts, cuts):
        return ""
    few = [tree.rows(trial.batch, cut, trial.samples) for cut in cuts]
    counts = [float(over.count(part)) if over.kind == "targets" else 1.0 for part in few]
    values = [part.value for part, count in zip(parts, counts, strict=True) if count]
    return f"{sum(values) / len(values):.6g}" if all(map(isfinite, values)) else None


def _gradients_mix(over: LossDenominator, trial: LossTrial, still: Undrawn) -> bool:
    """Whether a backward looks at other samples, where the forward does not: by a hook, or a Function."""
    cuts = _cuts(trial.samples, max(1, trial.samples // 2))
    try:
        whole, *parts = [_run(trial, still, cut, gradients=True)[0] for cut in (slice(0, trial.samples), *cuts)]
    except Exception:  # training will say it
        return False
    return not trial.explains(over, whole, parts, cuts)


def _run(
    trial: LossTrial, still: Undrawn, cut: slice, *, afresh: bool = True, gradients: bool = False
) -> tuple[LossSide, dict[str, Any], dict[str, Tensor]]:
    """The loss of some samples; what it left in Python, and the trained weights that it wrote."""
    with buffers_kept(trial.model), weights_kept(trial.model, still.seeing) as written:
        side = trial.value(cut, afresh=afresh, gradients=gradients)
        left = {name: _snapshot(value) for name, value in trial.state.changed().items()}
        trained = {name for name, p in trial.model.named_parameters() if p.requires_grad}  # others: axes/buffers
        return side, left, {name: weight for name, weight in written().items() if name in trained}


def _snapshot(value: Any) -> Any:
    """A copy of numbers, texts and tensors, and of containers of them; of anything else what is like nothing."""
    kept = lambda x: isinstance(x, SCALARS) or (isinstance(x, Tensor | np.ndarray) and np.prod(x.shape) <= LARGEST)
    return copy.deepcopy(value) if all(map(kept, tree.leaves(value))) else object()


def _same(some: dict[str, Any], others: dict[str, Any]) -> tuple[str, ...]:
    """What both hold alike."""
    alike = lambda a, b: type(a) is type(b) and tree.same(a, b)
    return tuple(name for name, value in some.items() if name in others and alike(value, others[name]))
