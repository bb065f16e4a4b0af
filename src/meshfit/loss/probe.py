"""What a loss is a mean over, found on a few samples: parts of them, weighted rightly, make the whole.

    1  A cross entropy says of itself what it is a mean over (``stated``).
    2  Of any other loss each weighting is tried on two parts, for two ways to cut them (trial.py). Where none makes the
       whole (contrastive, ranking, over the batch's statistics), the loss is one of the whole batch:
       ``LossDenominator(kind="batch")``. Which dim of each output is that of the samples is noted: along it they are
       gathered.
    3  What was said or found is held against single samples, as the model trains (confirm.py).

All three compare values and gradients of runs (sample_loss.py): on a copy of the model in double precision, up to one
part in a million. Where the model is too large to be copied, or does not run in double precision, what rounding leaves
is allowed, 3 is left out, and 2 takes no more memory than a step does: it runs in the plan's precision, without a graph
of the model, on the samples of one microbatch at a time (two at least), and what is found must hold for each of those.
"""

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.buffers.watch import buffers_kept, modes_kept
from meshfit.axes.data.batchnorm import batch_norms, untracked, without_batches
from meshfit.axes.expert import balance
from meshfit.axes.precision import Precision
from meshfit.data import tree
from meshfit.loss.confirm import confirmed, samples_to_confirm
from meshfit.loss.objective import LossDenominator, Objective, split, stated
from meshfit.loss.running_on import running_on
from meshfit.loss.sample_loss import SampleLoss, TrialWay
from meshfit.loss.trial import LossTrial
from meshfit.torch_private.modules import BatchNorm, Dropout

SAMPLES = 8
LARGEST = 2**26
"""Elements of parameters up to which a model is copied into double precision."""

Around = Callable[[], AbstractContextManager[None]]


def find_denominator(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    device: torch.device,
    inside: Around | None = None,
    *,
    auxiliary: bool = False,
    precision: Precision | None = None,
    microbatch: int = SAMPLES,
) -> LossDenominator:
    """What ``objective`` is a mean over; ``batch`` holds a few samples to try it on. ``inside`` goes around what runs a
    model that is laid out over ranks already: all of them call it together. Any other may be in host memory.
    ``auxiliary``: the load-balancing loss of a mixture is on trial too; else it is left out, as one that is made right
    by itself (axes/expert/balance.py). ``precision`` and ``microbatch``, in samples: those of a step on ``device``.
    Whatever the model or the loss itself raises is raised here."""
    said = _stated(objective, batch)
    if tree.size(batch) < 2:
        return said or LossDenominator(kind="samples")
    home = device if inside is not None else next((p.device for p in model.parameters()), device)
    small = sum(p.numel() for p in model.parameters()) <= LARGEST
    copied = small and inside is None
    left_out = nullcontext if auxiliary else partial(balance.left_out, model)
    ways = [TrialWay(device=home), TrialWay(device=home, training=True)]
    trained = {"device": device, "gradients": False, "precision": precision or Precision()}
    first = [TrialWay(device=home, exact=True)] if copied else [replace(way, **trained) for way in ways]
    together = SAMPLES if small else max(2, microbatch)

    def tried(some: Any) -> LossDenominator:
        found = _tried(objective, model, some, together, (*first, *ways), inside or nullcontext, left_out)
        if found.weight is not None and not any(p.dtype == torch.float64 for p in model.parameters()):
            found = replace(found, weight=found.weight.float())  # the trial was in double precision, training is not
        return found

    found = said or tried(batch)
    if not copied or found.kind == "batch" or found.gathers:
        return found
    there = tree.size(batch)  # the last ones: the trial took the first
    some = tree.rows(batch, slice(there - samples_to_confirm(batch, SAMPLES, microbatch), there), there)
    some = tree.to_device(some, home)
    kept = _confirmed(found, objective, model, some, home, left_out)
    if said is None and objective.loss and kept.mixes and (again := tried(some)).kind == "batch":
        return again  # it is the loss, which these samples show and the first ones did not
    return kept


def _stated(objective: Objective, batch: Any) -> LossDenominator | None:
    """What a cross entropy says of itself."""
    said = stated(objective)
    if said is None or said.kind != "targets":
        return None
    targets = split(batch)[1]
    if not isinstance(targets, Tensor) or not targets.dim():
        return None
    classes = targets.shape[1] if targets.is_floating_point() and targets.dim() > 1 else 1
    return replace(said, unit=targets.numel() / max(1, len(targets)) / classes)


def _tried(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    together: int,
    ways: Sequence[TrialWay],
    inside: Around,
    left_out: Around,
) -> LossDenominator:
    """By the first of ``ways`` in which it runs."""
    error: Exception | None = None
    for way in ways:
        try:
            with _prepared(model, way, left_out) as used:
                return _agreed(partial(LossTrial, objective, used, way, inside), batch, together, way.device)
        except Exception as raised:  # not in this way: double precision, say, or not in eval mode
            error = raised
            if isinstance(raised, torch.OutOfMemoryError):
                traceback.clear_frames(raised.__traceback__)  # they hold on to what was made
    assert error is not None
    raise error


def _agreed(
    trial_of: Callable[[Any, int], LossTrial], batch: Any, together: int, device: torch.device
) -> LossDenominator:
    """What explains the loss of each ``together`` samples."""
    there = tree.size(batch)
    most = min(SAMPLES, there)
    together = min(together, most)
    agreed: list[LossDenominator] | None = None
    trial: LossTrial | None = None
    for first in range(0, most - together + 1, together):
        some = tree.to_device(tree.rows(batch, slice(first, first + together), there), device)
        trial = trial_of(some, together)
        found = trial.explained()
        if not trial.finite:
            kept = trial.finite_samples()
            if len(kept) < 2:  # they say nothing
                continue
            if len(kept) < together:
                trial = trial_of(tree.rows(some, torch.tensor(kept, device=device), together), len(kept))
                found = trial.explained()
        agreed = found if agreed is None else [over for over in agreed if any(_alike(over, each) for each in found)]
        if not agreed:
            return trial.as_batch()
    assert trial is not None
    return agreed[0] if agreed else trial.as_batch()


def _alike(a: LossDenominator, b: LossDenominator) -> bool:
    return a.kind == b.kind and (a.kind != "targets" or (a.ignore == b.ignore and a.targets == b.targets))


def _confirmed(
    said: LossDenominator, objective: Objective, model: nn.Module, batch: Any, device: torch.device, left_out: Around
) -> LossDenominator:
    """``said``, held against single samples: as it trains, or in eval mode if random numbers decide there. What looks
    like a loss of the whole batch must be one in double precision."""
    for exact in (False, True):
        found: LossDenominator | None = None
        for training in (True, False):
            way = TrialWay(device=device, training=training, exact=exact)
            with suppress(Exception), _prepared(model, way, left_out) as used:
                found = confirmed(said, SampleLoss(objective, used, way, nullcontext, batch, tree.size(batch)))
            if found is not None:
                break
        if found is None or found.kind != "batch" or exact:
            return found or said
    return said


@contextmanager
def _prepared(model: nn.Module, way: TrialWay, left_out: Around) -> Iterator[nn.Module]:
    """``model``, or a copy, so that ``way`` can run it; afterwards as it was."""
    if way.exact:
        model = copy.deepcopy(model).double()
    own = [norm for norm in batch_norms(model) if not type(norm).__module__.startswith("torch.")]
    own = [norm for norm in own if "forward" not in vars(norm)]  # by no wrapper around it
    norms, like = untracked(model), next(model.parameters(), torch.zeros(()))
    try:
        for norm in norms:  # like others in eval mode: with statistics that no batch changes
            norm.running_mean, norm.running_var = like.new_zeros(norm.num_features), like.new_ones(norm.num_features)
        for norm in own:
            norm.__dict__["forward"] = without_batches(norm)
        with (
            torch.autocast(way.device.type, enabled=False),
            buffers_kept(model),
            running_on(way.device, model),
            modes_kept(model) as modes,
            left_out(),
        ):
            for module, mode in modes.items():
                apart = isinstance(module, Dropout) or (isinstance(module, BatchNorm) and module not in own)
                module.training = way.training and mode and not apart
            yield model
    finally:
        for norm in own:
            del norm.__dict__["forward"]
        for norm in norms:
            norm.running_mean = norm.running_var = None
