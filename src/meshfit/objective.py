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
from dataclasses import dataclass
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
            return _own_loss(call(model, batch))
        inputs, targets = split(batch)
        return self.loss(call(model, inputs), targets)

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Any]:
        """(loss or None, outputs, targets) of a batch, for evaluation."""
        if self.step is not None:
            inputs, targets = split(batch)
            return self.step(model, batch), call(model, inputs), targets
        if self.loss is None:
            outputs = call(model, batch)
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


def find_over(objective: Objective, model: nn.Module, batch: Any, device: torch.device) -> Over:
    """What ``objective`` is a mean over; ``batch`` holds a few samples to try it on."""
    stated = _stated(objective)
    samples = next((len(t) for t in tree.tensors(batch) if t.dim()), 0)
    if stated is not None and stated.kind == "targets":
        targets = split(batch)[1]
        if isinstance(targets, Tensor):
            unit = targets.numel() / max(1, len(targets)) / (targets.shape[1] if targets.is_floating_point() else 1)
            return Over(kind="targets", unit=unit, ignore=stated.ignore, weight=stated.weight)
    elif stated is not None:
        return stated
    try:
        return _tried(objective, model, tree.to_device(batch, device), samples)
    except Exception:  # the model cannot run on so few samples, or not in eval mode: training will tell
        return Over(kind="samples")


def _stated(objective: Objective) -> Over | None:
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


def _tried(objective: Objective, model: nn.Module, batch: Any, samples: int) -> Over:
    if samples < 2:
        return Over(kind="samples")
    half = samples // 2
    halves = [tree.map_tensors(lambda t, at=at: t[at], batch) for at in (slice(0, half), slice(half, samples))]
    training = {module: module.training for module in model.modules()}
    devices = [next(model.parameters()).device] if torch.cuda.is_available() else []
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), torch.no_grad():
        model.eval()  # no dropout, no BatchNorm over the few samples: the loss alone is on trial
        try:
            with _CrossEntropies() as heard:
                whole = objective(model, batch)
            if isinstance(whole, tuple | list):
                return Over(kind="pair")
            parts = [float(objective(model, part)) for part in halves]
        finally:
            for module, mode in training.items():
                module.training = mode
    return _explain(float(whole), parts, [half, samples - half], batch, halves, heard, whole)


def _explain(whole: float, parts: list[float], sizes: list[int], batch: Any, halves: list, heard, loss) -> Over:
    def explains(weights: list[float]) -> bool:
        mean = sum(w * part for w, part in zip(weights, parts, strict=True) if w) / (sum(weights) or 1)
        return abs(mean - whole) <= 1e-3 * abs(whole) + 1e-6

    for result, target, ignore, weight in heard.seen:
        if (result is loss or float(result) == float(loss)) and not target.is_floating_point():
            for find in _finders(batch):
                found, wanted = find(batch), target
                if torch.equal(found[found != ignore].flatten(), wanted[wanted != ignore].flatten()):
                    unit = target.numel() / sum(sizes)
                    over = Over(kind="targets", unit=unit, ignore=ignore, weight=weight, find=find)
                    if explains([float(over.count(half)) for half in halves]):
                        return over
    if explains([float(size) for size in sizes]) and not any((t == i).any() for _, t, i, _ in heard.seen):
        return Over(kind="samples")
    if abs(sum(parts) - whole) <= 1e-3 * abs(whole) + 1e-6:
        return Over(kind="sum")
    warnings.warn(
        "meshfit: this loss of a batch is not a weighted mean of the losses of its parts (a contrastive loss, or a"
        " mean over targets of which some are ignored?). Spread over ranks or microbatches it is weighted by samples"
        " and will not train exactly like one device. Return (sum, count) from the loss if it is a mean.",
        stacklevel=2,
    )
    return Over(kind="samples")


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
