"""Metrics over a data set, the same number under every plan.

A metric is a function of outputs and targets, or an object with ``update``, ``compute`` and ``reset`` (torchmetrics,
torcheval, your own). What a rank can do by itself depends on what the metric is:

    mean      a function whose value for a batch is the mean over its parts (accuracy): each rank sums its own samples
    merged    an object that says how its state is reduced (torchmetrics: sum, cat, max, min): each rank updates its own
              copy, the states are merged once, lists in the order of the samples
    gathered  anything else (F1 as a function, a correlation): the first rank is handed whole batches, outputs and
              targets of all ranks in the order of the samples; functions are called once, with all of them

Which a function is, is tried on the first batch: whole against parts, with its outputs and targets, and again with
noise on the outputs and targets in another order, so that a model that predicts one class hides nothing. A function
that passes and shows later that it is no mean is an error. An object's own synchronisation is turned off.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.data import tree
from meshfit.errors import DataError, JobError

TOLERANCE = 1e-6
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dim_zero_sum": lambda stacked: stacked.sum(0),
    "dim_zero_max": lambda stacked: stacked.amax(0),
    "dim_zero_min": lambda stacked: stacked.amin(0),
}
"""What torchmetrics calls the ways to reduce a state, but for ``dim_zero_cat``."""


def has_state(metric: Any) -> bool:
    """Whether a metric is an object that is updated, rather than a function."""
    return all(callable(getattr(metric, verb, None)) for verb in ("update", "compute", "reset"))


def check(name: str, metric: Any) -> None:
    """Refuse what is no metric."""
    if has_state(metric):
        if type(metric).__module__.partition(".")[0] == "ignite":
            raise JobError(
                f"metrics[{name!r}] is of ignite, whose metrics talk to all ranks by themselves when they compute",
                "torchmetrics and torcheval have the same ones, or give a function of outputs and targets",
            )
    elif not callable(metric):
        raise JobError(
            f"metrics[{name!r}] is {metric!r}",
            "a metric is a function of outputs and targets, or an object with update, compute and reset",
        )


def measures(name: str, value: str) -> bool:
    """Whether the metric ``name`` gives the number ``value``: itself, or one of several."""
    return value == name or value.startswith(f"{name}/")


class Metrics:
    """All metrics of one evaluation, in one rank."""

    def __init__(self, metrics: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device, share: int):
        self.group, self.device, self.share = group, device, share
        self.means: dict[str, Mean] = {}
        self.merged: dict[str, Merged] = {}
        self.gathered: dict[str, Gathered] = {}
        self._untried: dict[str, Callable[..., Any]] = {}
        for name, metric in _flat(metrics):
            if not has_state(metric):
                self._untried[name] = metric
            elif reductions := _reductions(metric):
                self.merged[name] = Merged(_apart(metric, device), reductions)
            else:
                self.gathered[name] = Gathered(_apart(metric, device))
        self._batches = 0

    def see(self, outputs: Any, targets: Any, samples: int, whole: int) -> None:
        """What this rank has of a batch of ``whole`` samples: maybe nothing. All ranks call it for every batch."""
        if (self.gathered or self._untried) and whole:
            part = (self.share, _on_cpu(outputs), _on_cpu(targets)) if samples else None
            parts = self._gather(part)
            if self._untried:
                self._decide(parts)
            if self.gathered and parts is not None:
                batch = _joined(parts, self.device)
                for metric in self.gathered.values():
                    metric.see(*batch)
        if samples:
            for metric in self.means.values():
                metric.see(outputs, targets, samples)
            for metric in self.merged.values():
                metric.see(outputs, targets, (self._batches, self.share))
        self._batches += 1

    def sums(self) -> dict[str, tuple[Any, Any]]:
        """(sum, count) of each metric that is a mean; a count of NaN where it showed that it is none."""
        return {name: (metric.total, metric.count) for name, metric in self.means.items()}

    def values(self) -> dict[str, float]:
        """The other metrics, on every rank."""
        if not self.merged and not self.gathered:
            return {}
        found = self._gather({name: metric.state() for name, metric in self.merged.items()})

        def computed() -> dict[str, float]:
            for name, metric in self.merged.items():
                metric.merge([each[name] for each in found or []])
            every = {**self.merged, **self.gathered}
            return {k: v for name, metric in every.items() for k, v in _numbers(name, metric.compute()).items()}

        return self._told(None if found is None else computed)

    def _told(self, find: Callable[[], Any] | None) -> Any:
        """What the first rank finds, or raises, on every rank."""
        told: list[Any] = [None]
        if find is not None:
            try:
                told = [find()]
            except Exception as error:  # the others wait for an answer
                told = [error]
        if self.group is not None:
            dist.broadcast_object_list(told, group=self.group, group_src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        return told[0]

    def _gather(self, mine: Any) -> list[Any] | None:
        """What each rank has that has something, on the first rank; None on the others."""
        if self.group is None:
            return [mine] if mine is not None else []
        first = dist.get_rank(self.group) == 0
        everybody: list[Any] | None = [None] * dist.get_world_size(self.group) if first else None
        dist.gather_object(mine, everybody, group=self.group, group_dst=0)
        return None if everybody is None else [each for each in everybody if each is not None]

    def _decide(self, parts: list[Any] | None) -> None:
        """Which functions are means, tried on the first rank."""

        def tried() -> dict[str, bool]:
            batch = _joined(parts or [], self.device)
            return {name: is_mean(name, metric, *batch) for name, metric in self._untried.items()}

        mean = self._told(None if parts is None else tried)
        for name, metric in self._untried.items():
            if mean[name]:
                self.means[name] = Mean(name, metric)
            else:
                self.gathered[name] = Gathered(Called(name, metric))
        self._untried = {}


@dataclass(slots=True)
class Mean:
    """A function that is a mean over samples: its sum and count over this rank's."""

    name: str
    metric: Callable[..., Any]
    total: Any = 0.0
    count: Any = 0.0

    def see(self, outputs: Any, targets: Any, samples: int) -> None:
        total, count = reduced(self.name, self.metric(outputs, targets), samples)
        if samples > 1 and not _adds_up(self.name, self.metric, outputs, targets, samples, (total, count)):
            count = float("nan")
        self.total, self.count = self.total + total, self.count + count


@dataclass(slots=True)
class Merged:
    """An object of torchmetrics whose state adds up: this rank's copy of it."""

    metric: Any
    reductions: dict[str, str]
    _at: list[tuple[int, int]] = field(default_factory=list)
    """(batch, share) of each update."""

    def see(self, outputs: Any, targets: Any, at: tuple[int, int]) -> None:
        self.metric.update(outputs, targets)
        self._at.append(at)

    def state(self) -> tuple[list[tuple[int, int]], int, dict[str, Any]]:
        return (
            self._at,
            self.metric._update_count,
            {name: _on_cpu(getattr(self.metric, name)) for name in self.reductions},
        )

    def merge(self, states: list[tuple[list[tuple[int, int]], int, dict[str, Any]]]) -> None:
        for name, reduction in self.reductions.items():
            if reduction != "dim_zero_cat":
                stacked = torch.stack([state[name] for _, _, state in states])
                merged: Any = REDUCTIONS[reduction](stacked).to(self.metric.device)
            else:  # one entry an update, in the order of the samples
                entries = [(at, value) for ats, _, state in states for at, value in _entries(ats, state[name])]
                merged = [value.to(self.metric.device) for _, value in sorted(entries, key=lambda entry: entry[0])]
            setattr(self.metric, name, merged)
        self.metric._update_count = sum(count for _, count, _ in states)  # else it warns that it saw nothing

    def compute(self) -> Any:
        return self.metric.compute()


@dataclass(slots=True)
class Gathered:
    """A metric that is handed whole batches, on the first rank."""

    metric: Any

    def see(self, outputs: Any, targets: Any) -> None:
        self.metric.update(outputs, targets)

    def compute(self) -> Any:
        return self.metric.compute()


@dataclass(slots=True)
class Called:
    """A function, called once with all outputs and targets."""

    name: str
    metric: Callable[..., Any]
    _seen: list[tuple[Any, Any]] = field(default_factory=list)

    def update(self, outputs: Any, targets: Any) -> None:
        self._seen.append((outputs, targets))

    def compute(self) -> Any:
        outputs, targets = (tree.concatenate([batch[i] for batch in self._seen]) for i in (0, 1))
        total, count = reduced(self.name, self.metric(outputs, targets), tree.size(targets) or tree.size(outputs))
        return total / count


def reduced(name: str, value: Any, samples: int) -> tuple[Any, Any]:
    """(sum, count) of what a function gave: a mean, one number a sample, or the pair itself."""
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, list | np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) == samples:
        return value.double().sum(), samples
    if isinstance(value, Tensor) and value.numel() != 1:
        raise DataError(
            f"the metric {name!r} gave a tensor of shape {tuple(value.shape)} for {samples} samples",
            "return a mean, one number a sample, or (sum, count)",
        )
    return (value.double() if isinstance(value, Tensor) else value) * samples, samples


def is_mean(name: str, metric: Callable[..., Any], outputs: Any, targets: Any) -> bool:
    """Whether a function of these samples is the mean over any parts of them."""
    samples = tree.size(targets) or tree.size(outputs)
    if samples < 2:  # nothing to try it on: called with all, it is right whatever it is
        return False
    draw = torch.Generator().manual_seed(0)
    for trial in range(4):
        if trial:  # other targets for the same outputs, and other outputs
            order = torch.randperm(samples, generator=draw)
            targets = tree.map_tensors(
                lambda t, order=order: t[order.to(t.device)] if _per_sample(t, samples) else t, targets
            )
        if trial > 1:
            outputs = tree.map_tensors(lambda t: _noisy(t, draw), outputs)
        try:
            whole = reduced(name, metric(outputs, targets), samples)
            if not _adds_up(name, metric, outputs, targets, samples, whole):
                return False
        except DataError:  # it gave no number
            raise
        except Exception:  # it wants samples that a part need not have: called with all, it has them
            return False
    return True


def _adds_up(name: str, metric: Any, outputs: Any, targets: Any, samples: int, whole: tuple[Any, Any]) -> bool:
    """Whether ``whole`` is the sum over two uneven parts."""
    cut = max(1, samples // 3)
    total = count = 0.0
    for part in (slice(0, cut), slice(cut, samples)):
        some = [
            tree.map_tensors(lambda t, part=part: t[part] if _per_sample(t, samples) else t, x)
            for x in (outputs, targets)
        ]
        value, weight = (float(v) for v in reduced(name, metric(*some), len(range(samples)[part])))
        if weight:  # a mean over nothing is NaN, and weighs nothing
            total, count = total + value, count + weight
    want, got = float(whole[0]) / (float(whole[1]) or 1.0), total / (count or 1.0)
    return (
        got == want or abs(got - want) <= TOLERANCE * max(abs(want), abs(got)) + 1e-9 or (got != got and want != want)
    )


def _per_sample(tensor: Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == samples


def _noisy(tensor: Tensor, draw: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
    return tensor + (noise * (float(tensor.double().std(correction=0)) + 1e-3)).to(tensor)


def _flat(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Metrics one by one: a collection of torchmetrics is many."""
    for name, metric in metrics.items():
        if has_state(metric) and isinstance(metric, nn.ModuleDict):
            yield from _flat({f"{name}/{key}": each for key, each in metric.items()})
        else:
            yield name, metric


def _reductions(metric: Any) -> dict[str, str]:
    """How each tensor of a torchmetrics object's state is reduced, if that is all there is to it."""
    found = getattr(metric, "_reductions", None)
    if not isinstance(metric, nn.Module) or not isinstance(found, dict) or next(metric.children(), None) is not None:
        return {}
    names = {state: getattr(reduction, "__name__", "") for state, reduction in found.items()}
    for state, name in names.items():
        is_list = isinstance(getattr(metric, state), list)
        if name not in REDUCTIONS and not (name == "dim_zero_cat" and is_list):
            return {}
    return names


def _apart(metric: Any, device: torch.device) -> Any:
    """A copy that begins anew on ``device``, and talks to no other rank."""
    metric = copy.deepcopy(metric)
    metric = metric.to(device) if hasattr(metric, "to") else metric
    parts: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
    for each in parts:
        if hasattr(each, "sync_on_compute"):
            each.sync_on_compute = each.dist_sync_on_step = False
            each.distributed_available_fn = _alone
    metric.reset()  # type: ignore[operator]
    return metric


def _alone() -> bool:
    return False


def _entries(at: list[tuple[int, int]], values: list[Tensor]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """What each update put into a list."""
    if len(values) != len(at):
        raise DataError(
            f"a metric put {len(values)} tensors into its state in {len(at)} updates, so their order is not known",
            "an object without `_reductions` is handed whole batches instead",
        )
    return zip(at, values, strict=True)


def _joined(parts: list[tuple[int, Any, Any]], device: torch.device) -> tuple[Any, Any]:
    """Outputs and targets of a batch, in the order of its samples."""
    parts = sorted(parts, key=lambda part: part[0])
    return tuple(tree.to_device(tree.concatenate([part[i] for part in parts]), device) for i in (1, 2))


def _on_cpu(value: Any) -> Any:
    return tree.map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """What a metric computed, as named numbers: a dict by its keys, a tensor by its places."""
    if isinstance(value, Mapping):
        return {k: v for key, each in value.items() for k, v in _numbers(f"{name}/{key}", each).items()}
    if isinstance(value, tuple | list) or (isinstance(value, Tensor | np.ndarray) and value.ndim):
        return {k: v for i, each in enumerate(value) for k, v in _numbers(f"{name}/{i}", each).items()}
    return {name: float(value)}
