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
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshfit.axes.buffers.watch import buffers_kept, weights_kept
from meshfit.data import tree
from meshfit.loss.draws import Undrawn
from meshfit.loss.objective import LossDenominator
from meshfit.loss.sample_loss import LossRun, SampleLoss, near
from meshfit.patches import unprinted
from meshfit.python_state import LARGEST, SCALARS

PARTS = 1, 2
"""Samples of a part: of one alone there may be no statistics, where there are of two."""

SMALL = 2**18
"""Numbers of a batch up to which all samples are looked at, whatever a microbatch has."""


def samples_to_confirm(batch: Any, most: int, microbatch: int) -> int:
    """No more than fit where a microbatch does."""
    there = min(most, tree.size(batch))
    numbers = sum(t.numel() for t in tree.tensors(tree.rows(batch, slice(0, there), tree.size(batch))))
    return there if numbers <= SMALL else min(there, max(2, microbatch))


class _Run(NamedTuple):
    loss: LossRun
    kept: dict[str, Any]
    """What it left in Python, by path."""
    weights: dict[str, Tensor]
    """Trained weights that it wrote."""


def confirmed(over: LossDenominator, loss: SampleLoss) -> LossDenominator | None:
    """``over``, with what code keeps in Python; or a loss of the whole batch, where single samples do not make the
    whole. None where it cannot be told: random numbers decide, or it does not run."""
    with warnings.catch_warnings(), unprinted(), Undrawn(loss.way.device) as undrawn:
        warnings.simplefilter("ignore")  # of the shapes of single samples; what the training says will be heard
        try:
            for gradients in (False, True):  # a forward may ask for a graph
                with suppress(Exception):
                    return _confirmed(over, loss, undrawn, partial(_run, loss, undrawn, gradients=gradients))
        finally:
            loss.start.restore()
            loss.state.restore()
    return None


def _confirmed(
    over: LossDenominator, loss: SampleLoss, undrawn: Undrawn, run: Callable[..., _Run]
) -> LossDenominator | None:
    whole, kept, weights = run(loss.everything)
    same = lambda other: near(other.loss.value, whole.value, loss.limit)
    drew = undrawn.drew or loss.start.moved_others or loss.state.drew(torchs=False)
    if drew or not isfinite(whole.value):
        return None
    if kept or weights:
        again = run(loss.everything, afresh=False)
        others = run(slice(loss.samples // 2, loss.samples))
        after_others = run(loss.everything, afresh=False)
        by_calls, once = _alike(kept, others.kept), _alike(kept, again.kept)
        by_samples = [name for name in kept if name not in by_calls]
        if by_samples and not (same(again) and same(after_others)):
            return LossDenominator(kind="batch", remembers=by_samples[0])
        for name, weight in weights.items():
            if name not in others.weights or not torch.equal(weight, others.weights[name]):
                return LossDenominator(kind="batch", remembers=f"{name}, a weight that the forward writes")
        counters = tuple(name for name in by_calls if name not in once)
        over = replace(over, counters=counters, writes=next(iter(weights), ""))

    def of_batch(each: int, mean: str) -> LossDenominator:
        why = f"of {loss.samples} samples it is {whole.value:.6g}; the mean over parts of {each} is {mean}"
        return LossDenominator(kind="batch", why=why, mixes=True)

    for each in PARTS:
        cuts = _cuts(loss.samples, each)
        try:
            parts = [run(cut).loss for cut in cuts]
        except Exception:  # a single sample is squeezed away, say
            continue
        if loss.explains(over, whole, parts, cuts):
            half = max(1, loss.samples // 2)
            mixed = _gradients_mix(over, loss, _cuts(loss.samples, half), run)
            return of_batch(half, "as large, but not so its gradient") if mixed else over
        values = [part.value for share, part in zip(loss.shares(over, cuts), parts, strict=True) if share]
        if all(map(isfinite, values)):  # another value for the same samples: it draws numbers that nobody seeds
            steady = all(same(run(loss.everything)) for _ in range(3))  # two draws may happen to be alike
            return of_batch(each, f"{fmean(values):.6g}") if steady else None
    return None


def _cuts(samples: int, each: int) -> list[slice]:
    starts = range(0, samples - each + 1, each)
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], samples], strict=True)]


def _gradients_mix(over: LossDenominator, loss: SampleLoss, cuts: list[slice], run: Callable[..., _Run]) -> bool:
    """Whether a backward looks at other samples, where the forward does not: by a hook, or a Function."""
    try:
        whole, *parts = [run(cut, gradients=True).loss for cut in (loss.everything, *cuts)]
    except Exception:  # training will say it
        return False
    return not loss.explains(over, whole, parts, cuts)


def _run(loss: SampleLoss, undrawn: Undrawn, cut: slice, *, gradients: bool, afresh: bool = True) -> _Run:
    with buffers_kept(loss.model), weights_kept(loss.model, undrawn.seeing) as written:
        found = loss.run(cut, afresh=afresh, gradients=gradients)
        kept = {name: _snapshot(value) for name, value in loss.state.changed().items()}
        trained = {name for name, p in loss.model.named_parameters() if p.requires_grad}  # others: axes/buffers
        return _Run(found, kept, {name: weight for name, weight in written().items() if name in trained})


def _snapshot(value: Any) -> Any:
    """A copy of numbers, texts and tensors, and of containers of them; of anything else what is like nothing."""
    plain = lambda x: isinstance(x, SCALARS) or (isinstance(x, Tensor | np.ndarray) and np.prod(x.shape) <= LARGEST)
    return copy.deepcopy(value) if all(map(plain, tree.leaves(value))) else object()


def _alike(some: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """What both hold alike."""
    alike = lambda a, b: type(a) is type(b) and tree.same(a, b)
    return [name for name, value in some.items() if name in others and alike(value, others[name])]
