"""From a batch to a loss, and what that loss is a mean over.

``Objective`` calls the model as the data suggests and gives the loss. To train in parts (over ranks, over
microbatches) like one device on the whole batch, the parts' losses must be weighted rightly: a mean by what
it is a mean over. ``Over`` says what that is:

    samples   mean((x - y)^2) and the like: by the samples of each part
    targets   cross entropy: by the targets that are not ignored (by their class weights, if it has them)
    pair      the loss returns (sum, count): sums are added, counts are added, then divided
    sum       a sum already: added up as it is

Known losses say it themselves. Of others it is found by a trial on a few samples: the loss of all must be the
weighted loss of the two halves. A loss for which no weighting makes that true (a contrastive loss, say)
does not split; a warning says so, since no plan that splits its batch can train like one device.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.data import tree
from meshfit.errors import DataError, JobError

TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys under which a dict batch holds its targets, where ``loss=`` is given."""


@dataclass(frozen=True)
class Objective:
    """The loss of a batch: ``loss(model(inputs), targets)``, ``model(**batch).loss`` or ``step(model, batch)``."""

    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """A scalar, or the pair (sum, count)."""
        if self.step is not None:
            return self.step(model, batch)
        if self.loss is None:
            return _own_loss(_called_whole(model, batch))
        inputs, targets = split(batch)
        return self.loss(call(model, inputs), targets)

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Any]:
        """(loss or None, outputs, targets) of a batch, for evaluation."""
        if self.step is not None:
            inputs, targets = split(batch)
            return self.step(model, batch), call(model, inputs), targets
        if self.loss is None:
            outputs = _called_whole(model, batch)
            return _own_loss(outputs), outputs, split(batch)[1]
        inputs, targets = split(batch)
        outputs = call(model, inputs)
        return self.loss(outputs, targets), outputs, targets


def call(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)``, ``model(*inputs)`` or ``model(**inputs)``, by what the inputs are."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def split(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets): the last of a tuple, the known key of a dict; a lone tensor is its own target."""
    if isinstance(batch, Mapping):
        for key in TARGETS:
            if key in batch:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
        return batch, None
    if isinstance(batch, tuple | list) and len(batch) > 1:
        *inputs, targets = batch
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets
    only = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return only, only


def _called_whole(model: nn.Module, batch: Any) -> Any:
    """The model given all of a batch, targets too."""
    try:
        return call(model, batch)
    except TypeError as error:
        if isinstance(batch, Mapping):
            raise
        raise JobError(
            "no loss= was given, and the model cannot be called with inputs and targets",
            f"{type(error).__name__}: {error}",
            "give loss=, a function of outputs and targets",
        ) from error


def _own_loss(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise JobError(
            "the model returned no loss, and no loss= was given",
            f"it returned a {type(outputs).__name__}",
            "give loss=, a function of outputs and targets, or let the batch hold what the model's own loss needs"
            " (labels, for Hugging Face models)",
        )
    return loss


@dataclass(frozen=True, kw_only=True)
class Over:
    """What a loss is a mean over."""

    kind: str = "samples"
    unit: float = 1.0
    """Targets a sample has, about: keeps gradients at their usual size until the true count is known."""

    ignore: int = -100
    weight: Tensor | None = None
    find: Callable[[Any], Tensor] = lambda batch: split(batch)[1]
    """The targets in a batch."""

    def count(self, batch: Any) -> Tensor:
        """What a part weighs when the mean is over its targets."""
        targets = self.find(batch)
        if targets.is_floating_point():  # class probabilities: torch divides by the number of positions
            return torch.tensor(float(targets.numel() // targets.shape[1]), device=targets.device)
        if self.weight is None:
            return (targets != self.ignore).sum()
        kept = targets[targets != self.ignore]
        return self.weight.to(kept.device)[kept].sum()

    @property
    def known(self) -> bool:
        """Whether the weights follow from the samples alone, before anything is computed."""
        return self.kind in ("samples", "sum")


def find_over(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    device: torch.device,
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Over:
    """What ``objective`` is a mean over; ``batch`` holds a few samples to try it on. ``inside`` goes around what runs
    the model."""
    said = stated(objective)
    if said is not None and said.kind == "targets":
        targets = split(batch)[1]
        if isinstance(targets, Tensor) and targets.dim():
            unit = targets.numel() / max(1, len(targets)) / (targets.shape[1] if targets.is_floating_point() else 1)
            return replace(said, unit=unit)
    elif said is not None:
        return said
    try:
        with inside():
            found = _tried(objective, model, tree.to_device(batch, device))
    except Exception:  # the model cannot run on so few samples, or not in eval mode: training will tell
        return Over(kind="samples")
    if found is None:
        warnings.warn(
            "meshfit: this loss of a batch is not a weighted mean of the losses of its parts (a contrastive loss, or a"
            " mean over targets of which some are ignored?). Spread over ranks or microbatches it is weighted by"
            " samples and will not train exactly like one device. Return (sum, count) from the loss if it is a mean.",
            stacklevel=2,
        )
        return Over(kind="samples")
    return found


def stated(objective: Objective) -> Over | None:
    """What the loss says of itself; None when it says nothing."""
    loss, keywords = objective.loss, {}
    if objective.step is not None or loss is None:
        return None
    while isinstance(loss, functools.partial):
        loss, keywords = loss.func, {**loss.keywords, **keywords}
    mean_over_targets = loss in (F.cross_entropy, F.nll_loss) or type(loss) in (
        nn.CrossEntropyLoss,
        nn.NLLLoss,
    )
    torch_loss = mean_over_targets or (isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn"))
    if not torch_loss:
        return None
    reduction = keywords.get("reduction", getattr(loss, "reduction", "mean"))
    if reduction == "none":
        raise JobError('the loss has reduction="none", so it is no single number', 'use reduction="mean" or "sum"')
    if reduction == "sum":
        return Over(kind="sum")
    if mean_over_targets:
        ignore = keywords.get("ignore_index", getattr(loss, "ignore_index", -100))
        return Over(kind="targets", ignore=ignore, weight=keywords.get("weight", getattr(loss, "weight", None)))
    return Over(kind="samples") if isinstance(loss, nn.MSELoss | nn.L1Loss | nn.BCEWithLogitsLoss) else None


class _CrossEntropies(TorchFunctionMode):
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


def _tried(objective: Objective, model: nn.Module, batch: Any) -> Over | None:
    """What makes the whole out of the parts; None if nothing does."""
    samples = next((len(t) for t in tree.tensors(batch) if t.dim()), 0)
    if samples < 2:
        return Over(kind="samples")
    sizes = [samples // 2, samples - samples // 2]
    cuts = (slice(0, sizes[0]), slice(sizes[0], samples))
    halves = [tree.map_tensors(lambda t, cut=cut: t[cut], batch) for cut in cuts]
    gpus = [t.device for t in islice(tree.tensors(batch), 1) if t.is_cuda]
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(gpus), torch.no_grad():
        before = torch.get_rng_state()
        model.eval()  # no dropout, no BatchNorm over the few samples: the loss alone is on trial
        try:
            with _CrossEntropies() as heard:
                loss = objective(model, tree.map_tensors(torch.clone, batch))  # a model may write to its inputs
            if isinstance(loss, tuple | list):
                return Over(kind="pair")
            parts = [float(objective(model, tree.map_tensors(torch.clone, half))) for half in halves]
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not torch.equal(before, torch.get_rng_state()):  # it draws random numbers: nothing can be told from values
            return Over(kind="samples")
    whole = float(loss)

    def explains(weights: list[float], over: float) -> bool:
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)
        return abs(total / over - whole) <= 1e-3 * abs(whole) + 1e-6

    for result, target, ignore, weight in heard.seen:
        if target.is_floating_point() or not (result is loss or float(result) == whole):
            continue
        for find in _finders(batch):
            found = find(batch)
            if torch.equal(found[found != ignore].flatten(), target[target != ignore].flatten()):
                over = Over(kind="targets", unit=target.numel() / samples, ignore=ignore, weight=weight, find=find)
                counts = [float(over.count(half)) for half in halves]
                if sum(counts) and explains(counts, sum(counts)):
                    return over
    ignoring = any((target == ignore).any() for _, target, ignore, _ in heard.seen)
    if not ignoring and explains([float(size) for size in sizes], samples):
        return Over(kind="samples")
    return Over(kind="sum") if explains([1.0, 1.0], 1.0) else None


def _finders(batch: Any) -> list[Callable[[Any], Tensor]]:
    """Ways to find integer targets in a batch: each of its tensors, as it is or less its first position
    (a language model's own loss predicts each next token)."""
    finders: list[Callable[[Any], Tensor]] = []
    for place, leaf in enumerate(tree.leaves(batch)):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            finders.append(functools.partial(_leaf, place=place, skip=0))
            if leaf.dim() > 1:
                finders.append(functools.partial(_leaf, place=place, skip=1))
    return finders


def _leaf(batch: Any, *, place: int, skip: int) -> Tensor:
    leaf = list(tree.leaves(batch))[place]
    return leaf[..., skip:]


def check_scalar(loss: Any) -> Tensor:
    """The loss as a scalar tensor, or an error that says what came instead."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise DataError(f"the loss is {what}, not one number", "return a mean, or (sum, count)")
