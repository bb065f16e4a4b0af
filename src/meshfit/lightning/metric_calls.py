"""torchmetrics objects of a LightningModule: what a step gives them is noted, and handed to meshfit's metrics.

A state in each rank would be that of its own samples. So while meshfit trains, a ``MetricCalls`` stands in the place of
the object. What ``validation_step`` gives it goes, as outputs of the step, to one object that sees whole batches: exact
for every metric, under every plan. In ``training_step`` the value of a batch is logged, of metrics that are means.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.data import tree
from meshfit.errors import JobError
from meshfit.metrics import TOLERANCE, has_state, off_parts, reduced, unsynchronised


def is_metric(module: nn.Module) -> bool:
    """Whether it is of torchmetrics: one, or a collection."""
    return type(module).__module__ != __name__ and has_state(module) and hasattr(module, "forward")


class MetricCalls(nn.Module):
    """Stands for the torchmetrics object at ``path`` of a module."""

    metric: Any
    trainer: Any

    def __init__(self, path: str, metric: nn.Module, trainer: Any):
        super().__init__()
        self.path = path
        self.__dict__["metric"], self.__dict__["trainer"] = metric, trainer  # no submodule: it is none of the model's

    @property
    def is_mean_of_values(self) -> bool:
        """Whether it averages numbers that it is given, as MeanMetric does: as logged values are."""
        return type(self.metric).__name__ == "MeanMetric"

    def __call__(self, *args: Any, **kwargs: Any) -> "BatchValue":
        """Not as a module is called: what goes in comes out as an output of the step, which a recording must see."""
        self.update(*args, **kwargs)
        return BatchValue(self, args, kwargs)

    forward = __call__

    def update(self, *args: Any, **kwargs: Any) -> None:
        call = self.trainer.call
        if call is None:
            raise JobError(f"self.{self.path} is updated outside of training_step and validation_step")
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not self.is_mean_of_values and (not given or any(not value.dim() for value in given)):
            raise JobError(
                f"self.{self.path} is given a single number in {call.name}",
                "a batch is cut over devices: give it one value for each sample, or log the number itself",
            )
        call.last[self.path] = noted = [list(args), kwargs]
        if not self.is_mean_of_values:
            call.metrics.setdefault(self.path, []).append(noted)

    def batch_value(self) -> "BatchValue":
        """Of what it was given last."""
        call = self.trainer.call
        if call is None or self.path not in call.last:
            raise JobError(f"self.{self.path} is logged before it was given anything")
        args, kwargs = call.last[self.path]
        return BatchValue(self, tuple(args), kwargs)

    def compute(self) -> Any:
        raise JobError(
            f"self.{self.path}.compute() is called in {self.trainer.call.name if self.trainer.call else 'a hook'}",
            f"self.log(name, self.{self.path}) logs what it comes to, of all samples; in on_validation_epoch_end it"
            " may be computed, too",
        )

    def reset(self) -> None:
        """Each evaluation begins with fresh ones."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self


class BatchValue:
    """What a metric returned in a step: the value of this part of the batch, if it is logged."""

    def __init__(self, of: MetricCalls, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.of, self.args, self.kwargs = of, args, kwargs

    def computed(self) -> Any:
        """A value of a part of a batch stands for the whole only where it is a mean over samples."""
        if self.of.is_mean_of_values:
            return self.args[0]
        if self.of.trainer.facts.recorded:
            raise JobError(
                f"self.{self.of.path} is logged by the batch, and {self.of.trainer.facts.recorded} runs a recording",
                "log a function's value, (outputs.argmax(1) == y).float().mean() say",
            )
        value = _value(self.of.metric, self.args, self.kwargs)
        samples = tree.size(list(self.args)) or tree.size(self.kwargs)
        for name, each in value.items() if isinstance(value, Mapping) else [("", value)]:
            alone = lambda args, kwargs, name=name: _named(_value(self.of.metric, args, kwargs), name)
            whole = reduced(self.of.path, each, samples)
            parts = self.of.path, alone, list(self.args), self.kwargs, samples, whole
            off, size = off_parts(*parts) if samples > 1 else (0.0, 1.0)
            if off > TOLERANCE * size:
                raise JobError(
                    f"self.{self.of.path} ({type(self.of.metric).__name__}) is logged by the batch, and is no mean over"
                    " samples: a batch is cut over devices, an epoch over batches",
                    f"in validation_step, self.{self.of.path}.update(...) and self.log(name, self.{self.of.path})",
                )
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "of" not in self.__dict__:
            raise AttributeError(name)
        raise JobError(
            f"the value of self.{self.of.path} for a batch is used ({name})",
            "self.log it; a number that the step needs is to be computed of its tensors",
        )


def _value(metric: Any, args: Any, kwargs: Any) -> Any:
    fresh = unsynchronised(copy.deepcopy(metric))
    fresh.reset()
    first = next(tree.tensors([list(args), kwargs]), None)
    fresh = fresh if first is None else fresh.to(first.device)
    with torch.no_grad():
        fresh.update(*args, **kwargs)
        return fresh.compute()


def _named(value: Any, name: str) -> Any:
    return value[name] if name else value


class EpochMetrics:
    """All torchmetrics objects of a module, as one metric with state, and ``on_validation_epoch_end`` where they are
    whole. The module in which that runs has no weights: what it would need of them is refused by torch."""

    def __init__(self, metrics: Mapping[str, nn.Module], shell: Any):
        """``shell``: the module without values, or None if it has no hook."""
        self.metrics, self.shell = dict(metrics), shell
        for module in (*self.metrics.values(), shell):
            unsynchronised(module)
        self._logged: dict[str, list[str]] = {}
        self._updated: set[str] = set()

    def __deepcopy__(self, memo: Any) -> "EpochMetrics":
        return self  # what hooks keep from one evaluation to the next (a best value) stays

    def reset(self) -> None:
        for path in self._updated:
            self.metrics[path].reset()  # type: ignore[operator]
        self._logged, self._updated = {}, set()

    def update(self, outputs: Mapping[str, Any], targets: Any) -> None:
        for key, calls in outputs.items():
            path, *names = key.split("\n")
            metric: Any = self.metrics[path]
            self._logged[path] = names
            self._updated.add(path)
            for args, kwargs in calls:
                first = next(tree.tensors([args, kwargs]), None)
                metric = metric if first is None else metric.to(first.device)
                metric.update(*args, **kwargs)

    def compute(self) -> dict[str, float]:
        found: dict[str, Any] = {}
        for path, names in self._logged.items():
            value = self.metrics[path].compute() if names else None  # type: ignore[operator]
            for name in names:
                found |= value if name == "*" and isinstance(value, Mapping) else {name: value}
        if self.shell is not None:
            with self.shell.log.__self__.calling(self.shell, "on_validation_epoch_end") as call:
                self.shell.on_validation_epoch_end()
            found |= call.values
        return {name: value.compute() if is_metric(value) else value for name, value in found.items()}


def shell_of(module: nn.Module) -> nn.Module:
    """A copy without values: its parameters and buffers are on the meta device."""
    empty: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        empty[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(module, empty)
