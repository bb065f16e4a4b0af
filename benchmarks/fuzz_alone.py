"""The plain loop that fuzz.py compares with: what one device does, written without meshfit.

Batches are consecutive slices of the data (or of a permutation of it), the last of an epoch as short as it comes out.
Microbatches matter only to a BatchNorm, which is over each of them: the model then runs part by part, and the loss is
taken once, of all outputs together.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import fuzz_models as models
from benchmarks.fuzz_models import Draw
from meshfit.data.order import order


@dataclass
class Trained:
    """What a training came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)
    valid: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    """By step; several where the mean may be over this or that."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers in the end."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """Of the optimizer, by "key/parameter"."""


def train(draw: Draw, *, shake: float = 0.0) -> Trained:
    """``shake`` moves each weight by so much of itself, up or down: what rounding could make of the training."""
    model, found = models.build(draw), Trained()
    if shake:
        _shake(model, shake)
    tree = models.whole(draw, draw.samples, 1)
    optimizers = _list(models.OPTIMIZERS[draw.optimizer](model))
    schedulers = _schedulers(draw, optimizers)
    stepped = [p for one in optimizers for group in one.param_groups for p in group["params"] if p.requires_grad]
    average = [p.detach().clone() for p in model.parameters()]
    plateau = draw.scheduler == "plateau"
    parts = draw.degree("microbatches") if draw.batch_norms else 1
    objective = _objective(draw)
    for step, index in enumerate(_batches(draw), 1):
        if step > draw.steps:
            break
        batch = models.taken(tree, index)
        first: list[Any] = []

        def evaluate(batch: Any = batch, first: list[Any] = first) -> Tensor:
            model.zero_grad()
            loss, values = objective(model, batch, 1 if first else parts)
            loss.backward()
            for p in model.parameters():
                if not any(p is each for each in stepped):
                    p.grad = None
            norm = torch.nn.utils.clip_grad_norm_(stepped, draw.clip or float("inf"))
            if not first:
                first.extend([loss.item(), norm.item(), values])
            return loss

        if draw.optimizer == "lbfgs":
            optimizers[0].step(evaluate)
        else:
            evaluate()
            for one in optimizers:
                one.step()
        found.losses.append(first[0])
        found.norms.append(first[1])
        found.values.append({name: float(torch.as_tensor(value).detach()) for name, value in first[2].items()})
        found.rates.append(optimizers[0].param_groups[0]["lr"])
        for one in schedulers if not plateau else ():
            one.step()
        for mine, p in zip(average, model.parameters(), strict=True):
            if p.is_floating_point() or p.is_complex():
                mine.lerp_(p.detach(), 1 - draw.ema)
        if draw.valid and (step % draw.valid == 0 or step == draw.steps):
            shown = copy.deepcopy(model)
            if draw.ema:
                _put(shown, average)
            found.valid[step] = _evaluated(draw, shown)
            for one in schedulers if plateau else ():
                one.step(found.valid[step][0]["loss"])
    names = {p: name for name, p in model.named_parameters()}
    for one in optimizers:
        for p, state in one.state.items():
            found.states |= {
                f"{key}/{names[p]}": t for key, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape
            }
    if draw.ema:
        _put(model, average)
    found.tensors = tensors_of(model)
    return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def _list(optimizers: Any) -> list[Any]:
    return optimizers if isinstance(optimizers, list) else [optimizers]


def _schedulers(draw: Draw, optimizers: list[Any]) -> list[Any]:
    if not draw.scheduler:
        return []
    make = models.SCHEDULERS[draw.scheduler]
    return [make(one, draw.steps) if make.__code__.co_argcount == 2 else make(one) for one in optimizers]


def _shake(model: nn.Module, by: float) -> None:
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() or p.is_complex():
                p *= 1 + by * (torch.randint(0, 2, p.shape, generator=random) * 2.0 - 1).to(p.dtype)


@torch.no_grad()
def _put(model: nn.Module, weights: list[Tensor]) -> None:
    for p, weight in zip(model.parameters(), weights, strict=True):
        p.copy_(weight)


def _batches(draw: Draw, samples: int = 0) -> Iterator[Tensor]:
    """Indices of one batch after the other, without end."""
    epoch = 0
    while True:
        visited = np.arange(draw.samples)
        if draw.shuffle:
            visited = order(draw.samples, seed=draw.seed, epoch=epoch)[visited]
        for index in torch.from_numpy(visited).split(draw.batch):
            if draw.data != "drops" or len(index) == draw.batch:
                yield index
        epoch += 1


def _objective(draw: Draw) -> Callable[[nn.Module, Any, int], tuple[Tensor, dict[str, Any]]]:
    """The loss of a batch, and what is logged beside it."""
    step = None if draw.how in ("loss", "own") else models.make_step(draw)

    def of_step(model: nn.Module, batch: Any, parts: int) -> tuple[Tensor, dict[str, Any]]:
        made = model(**batch)["loss"] if step is None else step(model, batch)
        made, values = made if isinstance(made, tuple) and isinstance(made[1], dict) else (made, {})
        return (made[0] / made[1] if isinstance(made, tuple) else made), values

    def of_outputs(model: nn.Module, batch: Any, parts: int) -> tuple[Tensor, dict[str, Any]]:
        size = models.size_of(batch[0])
        count = min(parts, size)
        cuts = [slice(size * i // count, size * (i + 1) // count) for i in range(count)]
        outputs = _joined([models.called(model, models.taken(batch[0], cut)) for cut in cuts])
        loss = models.LOSSES[draw.loss](outputs, batch[1])
        return (loss[0] / loss[1] if isinstance(loss, tuple) else loss), {}

    return of_outputs if draw.how == "loss" else of_step


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, dict):
        return {name: _joined([each[name] for each in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*outputs, strict=True))
    return type(first)(**_joined([vars(each) for each in outputs]))


@torch.no_grad()
def _evaluated(draw: Draw, model: nn.Module) -> list[dict[str, float]]:
    """Over all validation samples: for each thing that its loss may be a mean over, the loss and the metrics."""
    model.eval()
    tree, objective = models.whole(draw, draw.samples + 1, 2), _objective(draw)
    size = draw.samples + 1
    sums: list[list[float]] = []
    outputs, targets, logged = [], [], []
    for index in torch.arange(size).split(draw.batch):
        batch = models.taken(tree, index)
        loss, values = objective(model, batch, 1)
        labels = batch["labels"] if draw.how == "own" else batch[1]
        sums.append(
            [value for weight in models.weights_of(draw.loss, labels) for value in (loss.item() * weight, weight)]
        )
        logged.append((len(index), values))
        if draw.metrics:
            outputs.append(models.logits_of(models.called(model, batch[0])))
            targets.append(labels)
    totals = [sum(column) for column in zip(*sums, strict=True)]
    means = [total / weight for total, weight in zip(totals[::2], totals[1::2], strict=True)]
    if "sum" in draw.loss:
        means = [sum(row[0] / row[1] for row in sums)]
    found: dict[str, float] = {}
    for name in logged[0][1]:
        found[name] = sum(len_ * float(values[name]) for len_, values in logged) / size
    if draw.metrics:
        every, labels = torch.cat(outputs), torch.cat(targets)
        metric = models.METRICS[draw.metrics]
        if draw.metrics == "top":
            found |= {"top/top": every.max().item(), "top/count": float(every.numel())}
        else:
            value = metric(every, labels)
            found[draw.metrics] = float(value[0]) / float(value[1]) if isinstance(value, tuple) else float(value)
    return [{"loss": mean, **found} for mean in means]
