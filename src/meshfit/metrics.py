"""Metrics over a data set, the same number under every plan.

A metric is a function of outputs and targets, or an object with ``update``, ``compute`` and ``reset`` (torchmetrics,
torcheval, your own). There are three kinds:

    mean      a function whose value for a batch is the mean over its parts (accuracy): each rank sums its own samples
    merged    an object that declares how its state is reduced (torchmetrics: sum, cat, max, min): each rank updates its
              own copy, the states are merged once, lists in the order of the samples
    gathered  all others (F1 as a function, a correlation): the first rank gets whole batches, outputs and targets of
              all ranks in the order of the samples; a function is called once, with all of them

Whether a function is a mean is probed on the first batch: the whole against its parts, with its outputs and targets,
and again with noise on the outputs and shuffled targets, so that it also shows for a model that predicts one class. A
function that passes, and on a later batch turns out to be no mean, is an error. An object's own synchronisation is off.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.comm.first import from_first_rank
from meshfit.comm.objects import gather_object
from meshfit.data import tree
from meshfit.errors import DataError, JobError
from meshfit.transfer import wide

TOLERANCE = 1e-6  # of a trial; over all batches, where rounding of a mean near zero adds up:
TOLERANCE_OF_ALL = 1e-4
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dim_zero_sum": lambda stacked: stacked.sum(0),
    "dim_zero_max": lambda stacked: stacked.amax(0),
    "dim_zero_min": lambda stacked: stacked.amin(0),
}
"""By torchmetrics' name; lists are reduced by ``dim_zero_cat``."""


def has_state(metric: Any) -> bool:
    """Whether a metric is an object that is updated, rather than a function."""
    return all(callable(getattr(metric, verb, None)) for verb in ("update", "compute", "reset"))


def check(name: str, metric: Any) -> None:
    """Refuse what is no metric."""
    if has_state(metric):
        if type(metric).__module__.partition(".")[0] == "ignite":
            raise JobError(
                f"metrics[{name!r}] is of ignite, whose metrics communicate over all ranks when they compute",
                "torchmetrics and torcheval have the same ones, or give a function of outputs and targets",
            )
    elif not callable(metric):
        raise JobError(
            f"metrics[{name!r}] is {metric!r}",
            "a metric is a function of outputs and targets, or an object with update, compute and reset",
        )


def measures(name: str, value: str) -> bool:
    """Whether the metric ``name`` gives the number ``value``: itself, or one of several; one without a name may give
    any."""
    return value == name or not name or value.startswith(f"{name}/")


class Metrics:
    """All metrics of one evaluation, in one rank."""

    def __init__(self, metrics: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device, share: int):
        self.group, self.device, self.share = group, device, share
        self.means: dict[str, Mean] = {}
        self.merged: dict[str, Merged] = {}
        self.gathered: dict[str, Any] = {}
        self._untried: dict[str, Callable[..., Any]] = {}
        for name, metric in _flat(metrics):
            if not has_state(metric):
                self._untried[name] = metric
            elif reductions := _reductions(metric):
                self.merged[name] = Merged(_local_copy(metric, device), reductions)
            else:
                self.gathered[name] = _local_copy(metric, device)
        self._batches = 0

    def update(self, outputs: Any, targets: Any, samples: int, whole: int) -> None:
        """With this rank's ``samples``, maybe none, of a batch of ``whole``. All ranks call it for every batch."""
        if (self.gathered or self._untried) and whole:
            part = (self.share, _on_cpu(outputs), _on_cpu(targets)) if samples else None
            parts = self._gather(part)
            if self._untried:
                self._decide(parts)
            if self.gathered and parts is not None:
                batch = _joined(parts, self.device)
                for metric in self.gathered.values():
                    metric.update(*batch)
        if samples:
            for metric in self.means.values():
                metric.update(outputs, targets, samples)
            for metric in self.merged.values():
                metric.update(outputs, targets, (self._batches, self.share))
        self._batches += 1

    def sums(self) -> dict[str, tuple[Any, Any]]:
        """(sum, count) of each metric that is a mean; a count of NaN where a batch has shown that it is none."""
        return {name: (metric.total, metric.count if metric.adds_up else nan) for name, metric in self.means.items()}

    def values(self) -> dict[str, float]:
        """The other metrics, on every rank."""
        if not self.merged and not self.gathered:
            return {}
        found = self._gather({name: metric.state() for name, metric in self.merged.items()})

        def computed() -> dict[str, float]:
            for name, metric in self.merged.items():
                metric.merge([each[name] for each in found or []])
            every = {name: merged.metric for name, merged in self.merged.items()} | self.gathered
            return {k: v for name, metric in every.items() for k, v in _numbers(name, metric.compute()).items()}

        return from_first_rank(computed, self.group)

    def _gather(self, mine: Any) -> list[Any] | None:
        """What ranks have, where it is not None, on the first rank; None on the others."""
        if self.group is None:
            return [mine] if mine is not None else []
        everybody = gather_object(mine, self.group)
        return None if everybody is None else [each for each in everybody if each is not None]

    def _decide(self, parts: list[Any] | None) -> None:
        """Probe on the first rank which functions are means."""

        def probed() -> dict[str, bool]:
            batch = _joined(parts or [], self.device)
            return {name: is_mean(name, metric, *batch) for name, metric in self._untried.items()}

        mean = from_first_rank(probed, self.group)
        for name, metric in self._untried.items():
            if mean[name]:
                self.means[name] = Mean(name, metric)
            else:
                self.gathered[name] = CalledOnce(name, metric)
        self._untried = {}


@dataclass(slots=True)
class Mean:
    """A function that is a mean over samples: its sum and count over this rank's."""

    name: str
    metric: Callable[..., Any]
    total: Any = 0.0
    count: Any = 0.0
    _off: float = 0.0
    _size: float = 0.0
    """How far batches are from the means over their parts, and how large these are, summed."""

    def update(self, outputs: Any, targets: Any, samples: int) -> None:
        total, count = reduced(self.name, self.metric(outputs, targets), samples)
        if samples > 1:
            off, size = off_parts(self.name, self.metric, outputs, targets, samples, (total, count))
            self._off, self._size = self._off + off, self._size + size
        self.total, self.count = self.total + total, self.count + count

    @property
    def adds_up(self) -> bool:
        return self._off <= TOLERANCE_OF_ALL * self._size


@dataclass(slots=True)
class Merged:
    """This rank's copy of a torchmetrics object whose state can be reduced."""

    metric: Any
    reductions: dict[str, str]
    _at: list[tuple[int, int]] = field(default_factory=list)
    """(batch, share) of each update."""

    def update(self, outputs: Any, targets: Any, at: tuple[int, int]) -> None:
        self.metric.update(outputs, targets)
        self._at.append(at)

    def state(self) -> "State":
        return self._at, {name: _on_cpu(getattr(self.metric, name)) for name in self.reductions}

    def merge(self, states: "list[State]") -> None:
        for name, reduction in self.reductions.items():
            if reduction != "dim_zero_cat":
                stacked = torch.stack([state[name] for _, state in states])
                merged: Any = REDUCTIONS[reduction](stacked).to(self.metric.device)
            else:  # one entry an update, in the order of the samples
                entries = [(at, value) for ats, state in states for at, value in _entries(ats, state[name])]
                merged = [value.to(self.metric.device) for _, value in sorted(entries, key=lambda entry: entry[0])]
            setattr(self.metric, name, merged)
        self.metric._update_count = sum(len(ats) for ats, _ in states)  # 0 would make it warn


State = tuple[list[tuple[int, int]], dict[str, Any]]
"""(batch, share) of each update; tensors, and lists of them, by name."""


@dataclass(slots=True)
class CalledOnce:
    """A function as an object: called once, with all outputs and targets."""

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
    """(sum, count) of what a function returned: a mean, one number a sample, or that pair."""
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, list | np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) == samples:
        return wide(value).sum(), samples
    if isinstance(value, Tensor) and value.numel() != 1:
        raise DataError(
            f"the metric {name!r} returned a tensor of shape {tuple(value.shape)} for {samples} samples",
            "return a mean, one number a sample, or (sum, count)",
        )
    if not isinstance(value, Tensor | Real | np.number):
        raise DataError(
            f"the metric {name!r} returned a {type(value).__name__}",
            "return a mean, one number a sample, or (sum, count)",
        )
    return (wide(value) if isinstance(value, Tensor) else value) * samples, samples


def is_mean(name: str, metric: Callable[..., Any], outputs: Any, targets: Any) -> bool:
    """Whether a function of these samples is the mean over any parts of them."""
    samples = tree.size(targets) or tree.size(outputs)
    if samples < 2:  # it cannot be probed; called once with all samples, any function is right
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
            off, size = off_parts(name, metric, outputs, targets, samples, whole)
            if off > TOLERANCE * size:
                return False
        except DataError:  # it returned no number
            raise
        except Exception:  # it needs samples that a part may lack
            return False
    return True


def off_parts(
    name: str, metric: Any, outputs: Any, targets: Any, samples: int, whole: tuple[Any, Any]
) -> tuple[float, float]:
    """How far ``whole`` is from the mean over two uneven parts, and how large theirs are: near zero they may cancel,
    and their rounding not."""
    cut = max(1, samples // 3)
    total = count = 0.0
    size = 1e-3  # below which no difference counts
    for part in (slice(0, cut), slice(cut, samples)):
        some = [
            tree.map_tensors(lambda t, part=part: t[part] if _per_sample(t, samples) else t, x)
            for x in (outputs, targets)
        ]
        value, weight = (float(v) for v in reduced(name, metric(*some), len(range(samples)[part])))
        if weight:  # a mean over nothing is NaN, with a weight of 0
            total, count, size = total + value, count + weight, max(size, abs(value / weight))
    want, got = float(whole[0]) / (float(whole[1]) or 1.0), total / (count or 1.0)
    if got == want or (isnan(got) and isnan(want)):
        return 0.0, size
    return (abs(got - want), size) if isfinite(got - want) else (inf, 1.0)


def _per_sample(tensor: Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == samples


def _noisy(tensor: Tensor, draw: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
    return tensor + (noise * (float(wide(tensor).std(correction=0)) + 1e-3)).to(tensor)


def _flat(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Metrics one by one: those of a torchmetrics collection, too."""
    for name, metric in metrics.items():
        if has_state(metric) and isinstance(metric, nn.ModuleDict):
            yield from _flat({f"{name}/{key}": each for key, each in metric.items()})
        else:
            yield name, metric


def _reductions(metric: Any) -> dict[str, str]:
    """How each tensor of a torchmetrics object's state is reduced; nothing where that is not all of its state."""
    found = getattr(metric, "_reductions", None)
    if not isinstance(metric, nn.Module) or not isinstance(found, dict) or next(metric.children(), None) is not None:
        return {}
    names = {state: getattr(reduction, "__name__", "") for state, reduction in found.items()}
    for state, name in names.items():
        is_list = isinstance(getattr(metric, state), list)
        if name not in REDUCTIONS and not (name == "dim_zero_cat" and is_list):
            return {}
    return names


def _local_copy(metric: Any, device: torch.device) -> Any:
    """A copy on ``device``, reset, that does not synchronise with other ranks."""
    metric = unsynchronised(copy.deepcopy(metric))
    metric = metric.to(device) if hasattr(metric, "to") else metric
    metric.reset()  # type: ignore[operator]
    return metric


def unsynchronised(metric: Any) -> Any:
    """The same, without the communication of its own that torchmetrics' have."""
    parts: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
    for each in parts:
        if hasattr(each, "sync_on_compute"):
            each.sync_on_compute = each.dist_sync_on_step = False
            each.distributed_available_fn = _never
    return metric


def _never() -> bool:
    return False


def _entries(at: list[tuple[int, int]], values: list[Tensor]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """What each update appended to a list."""
    if len(values) != len(at):
        raise DataError(
            f"a metric appended {len(values)} tensors to its state in {len(at)} updates, so their order is not known",
            "an object without `_reductions` gets whole batches instead",
        )
    return zip(at, values, strict=True)


def _joined(parts: list[tuple[int, Any, Any]], device: torch.device) -> tuple[Any, Any]:
    """Outputs and targets of a batch, in the order of its samples."""
    parts = sorted(parts, key=lambda part: part[0])
    return tuple(tree.to_device(tree.concatenate([part[i] for part in parts]), device) for i in (1, 2))


def _on_cpu(value: Any) -> Any:
    return tree.map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The value of a metric as named numbers: a dict by its keys, a tensor by its indices."""
    if isinstance(value, Mapping):
        prefix = f"{name}/" if name else ""
        return {k: v for key, each in value.items() for k, v in _numbers(f"{prefix}{key}", each).items()}
    if isinstance(value, tuple | list) or (isinstance(value, Tensor | np.ndarray) and value.ndim):
        return {k: v for i, each in enumerate(value) for k, v in _numbers(f"{name}/{i}", each).items()}
    return {name: float(value)}
