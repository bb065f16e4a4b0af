"""From a batch to a loss, and what that loss is a mean over.

``Objective`` calls the model as the data suggests and gives the loss. To train in parts (over ranks, over
microbatches) like one device on the whole batch, the parts' losses must be weighted rightly: a mean by what
it is a mean over. ``LossDenominator`` says what that is:

    samples   mean((x - y)^2) and the like: by the samples of each part
    targets   cross entropy: by the targets that are not ignored (by their class weights, if it has them)
    pair      the loss returns (sum, count): sums are added, counts are added, then divided
    sum       a sum already: added up as it is
    batch     none of these: a loss of the whole batch (contrastive, ranking, over its statistics). It is computed of
              the outputs and targets of all parts, gathered: loss/batch_loss.py

Cross entropies say it themselves. Of others it is found by a trial on a few samples: loss/probe.py.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.data import tree
from meshfit.data.tree import call
from meshfit.errors import DataError, JobError
from meshfit.step import has_outputs

TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys under which a dict batch holds its targets, where ``loss=`` is given."""


@dataclass(frozen=True)
class Objective:
    """The loss of a batch: ``loss(model(inputs), targets)``, ``model(**batch).loss`` or ``step(model, batch)``."""

    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """A scalar, or the pair (sum, count); with values to log (loss, {"name": value}), with outputs for metrics
        (loss, {"name": value}, outputs)."""
        if self.step is not None:
            return self.step(model, batch)
        if self.loss is None:
            return _own_loss(_called_whole(model, batch))
        inputs, targets = split(batch)
        return self.loss(call(model, inputs), targets)

    @property
    def code(self) -> tuple[Any, ...]:
        """The user's own functions."""
        return tuple(each for each in (self.loss, self.step) if each is not None)

    @property
    def may_log(self) -> bool:
        """Whether it may return values beside the loss."""
        return self.step is not None or (self.loss is not None and stated(self) is None)

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Any]:
        """(loss or None, outputs, targets) of a batch, for evaluation."""
        if self.step is not None:
            inputs, targets = split(batch)
            result = self.step(model, batch)
            return result, result[2] if has_outputs(result) else call(model, inputs), targets
        if self.loss is None:
            outputs = _called_whole(model, batch)
            return _own_loss(outputs), outputs, split(batch)[1]
        inputs, targets = split(batch)
        outputs = call(model, inputs)
        return self.loss(outputs, targets), outputs, targets


def split(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets): the last of a tuple, the known key of a dict; a lone tensor is its own target."""
    if isinstance(batch, tree.PerSample):
        return batch, batch
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
    """What a model calls loss; or all that it returns, or the first of a tuple, where that is one number."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    listed: list[Any] = [*outputs] if isinstance(outputs, tuple | list) else [outputs]
    numbers = [i for i, each in enumerate(listed) if isinstance(each, Tensor) and not each.dim()]
    if numbers and numbers[0] == 0 and listed[0].is_floating_point():
        return listed[0]
    raise JobError(
        "the model returned no loss, and no loss= was given",
        f"it returned a {type(outputs).__name__}",
        "give loss=, a function of outputs and targets, or let the batch hold what the model's own loss needs"
        " (labels, for Hugging Face models)",
        *[f"step=lambda model, batch: model(*batch)[{i}] takes the one number in it" for i in numbers[:1]],
    )


@dataclass(frozen=True)
class TargetPlace:
    """Where a batch holds its targets."""

    leaf: int | None = None
    """Which of its tensors; None: the last of a tuple, the known key of a dict, as ``split`` says."""
    skip: int = 0
    """... less its first positions: a language model's own loss predicts each next token."""

    def __call__(self, batch: Any) -> Tensor:
        return split(batch)[1] if self.leaf is None else list(tree.leaves(batch))[self.leaf][..., self.skip :]


@dataclass(frozen=True, kw_only=True)
class LossDenominator:
    """What a loss is a mean over."""

    kind: str = "samples"
    unit: float = 1.0
    """Targets a sample has, about: keeps gradients at their usual size until the true count is known."""

    ignore: int = -100
    weight: Tensor | None = None
    targets: TargetPlace = TargetPlace()

    dims: tuple[int | None, ...] = ()
    """Of a loss of the whole batch: the dim of samples of each output; None: the same whatever the samples are."""
    moved: tuple[int, int] = (0, 0)
    """... bytes of a sample's outputs and targets, and of the gradients that come back."""
    draws: bool = False
    """Whether it draws random numbers."""
    why: str = ""
    """... the numbers that say that it is no mean."""
    unfit: str = ""
    """... why outputs and targets cannot be gathered; empty if they can."""
    untried: bool = False
    """... whether that could not be tried: it draws random numbers of NumPy or Python."""
    gathers: bool = False
    """Whether it calls ``meshfit.gather``."""
    logged: tuple[tuple[str, str], ...] = ()
    """Values that the step logs, by name: what each is a mean over. "loss": what the loss is; or "samples", "sum",
    "pair"."""

    counters: tuple[str, ...] = ()
    """Numbers that code keeps in Python, and every call of the loss changes alike: ``self.calls += 1``."""
    writes: str = ""
    """A trained weight that every forward writes, whatever the samples are."""
    outputs: bool | None = None
    """Whether a step returns outputs too, for metrics; None: it has not been tried."""
    mixes: bool = False
    """Of a loss of the whole batch: whether the model itself looks at other samples of the batch."""
    remembers: str = ""
    """Of a loss of the whole batch: what code keeps of the samples of earlier batches."""

    def count(self, batch: Any) -> Tensor:
        """What a part weighs when the mean is over its targets."""
        targets = self.targets(batch)
        if targets.is_floating_point():  # class probabilities: torch divides by the number of positions
            return targets.new_full((), targets.numel() // targets.shape[1], dtype=torch.float32)
        if self.weight is None:
            return (targets != self.ignore).sum()
        kept = targets != self.ignore
        return (self.weight.to(targets.device)[torch.where(kept, targets, 0)] * kept).sum()

    def kind_of(self, name: str) -> str:
        """What the logged value ``name`` is a mean over."""
        return dict(self.logged).get(name, "sum" if self.kind == "sum" else "loss")

    @property
    def known(self) -> bool:
        """Whether the weights follow from the samples alone, before anything is computed."""
        return self.kind in ("samples", "sum", "batch")


def stated(objective: Objective) -> LossDenominator | None:
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
        return LossDenominator(kind="sum")
    if mean_over_targets:
        ignore = keywords.get("ignore_index", getattr(loss, "ignore_index", -100))
        return LossDenominator(
            kind="targets", ignore=ignore, weight=keywords.get("weight", getattr(loss, "weight", None))
        )
    return None


def check_scalar(loss: Any) -> Tensor:
    """The loss as a scalar tensor, or an error that says what came instead."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Mapping):
        raise DataError(f"the loss is {what}, not one number", 'return (loss, {"name": value}) to log values beside it')
    raise DataError(f"the loss is {what}, not one number", "return a mean, or (sum, count)")
