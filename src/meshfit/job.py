"""What the user asked for: one value, checked before anything starts."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from meshfit.arguments import check_arguments
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.checkpoint.cadence import Cadence
from meshfit.data.datasets import sample_count
from meshfit.data.reading import Readers
from meshfit.deferred import Deferred, Unfollowable
from meshfit.errors import JobError, PlanError, did_you_mean
from meshfit.hugging_face import complete
from meshfit.launch.devices import Devices, find
from meshfit.loss.objective import Objective, stated
from meshfit.metrics import check as check_metric
from meshfit.metrics import measures
from meshfit.plan import Plan, settle
from meshfit.schedule.actions import schedule


@dataclass(frozen=True)
class Job:
    """One training: the arguments of ``meshfit.fit``, which explains them."""

    model: Any
    data: Any
    _: KW_ONLY
    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    optimizer: Any = None
    scheduler: Callable[..., Any] | None = None
    batch_size: int | str = 32
    epochs: float | None = None
    steps: int | None = None
    valid: Any = None
    valid_every: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    best: str | None = None
    patience: int | None = None
    ema: float | None = None
    clip: float | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    shuffle: bool = True
    workers: int | str | None = None
    seed: int = 0
    plan: Plan | str = "auto"
    devices: Devices | str | int = "auto"
    out: Path | str | None = None
    checkpoint: int | str | None = None
    resume: bool | Path | str = False
    listen: str | None = None
    join: str | None = None
    timeout: float = 600.0
    independent: bool = False

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.loss is not None and self.step is not None:
            raise JobError("loss= and step= were both given", "step(model, batch) computes the loss itself: keep one")
        for name, metric in self.metrics.items():
            check_metric(name, metric)
        stated(self.objective)  # refuses a loss that is not one number
        for name in ("best", "patience", "metrics"):
            if getattr(self, name) and self.valid is None:
                raise JobError(f"{name}= needs valid=, data to evaluate on")
        if self.best and not any(measures(name, self.best.lstrip("-")) for name in (*self.metrics, "loss")):
            raise JobError(f"best={self.best!r} is not measured", did_you_mean(self.best, ["-loss", *self.metrics]))
        Readers.of(self.workers)
        Cadence.of(self.checkpoint)  # refuses what it cannot parse
        for name in ("checkpoint", "resume"):
            if self.out is None and (self.checkpoint is not None if name == "checkpoint" else self.resume is True):
                raise JobError(f"{name}= needs out=, the run's folder", 'out="runs/one", say')
        if self.patience and not self.best:
            raise JobError("patience= needs best=, the metric to watch", 'best="-loss", say')

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.step)

    def training(self) -> Self:
        """The same job, after a check of what only training needs."""
        if self.optimizer is None:
            raise JobError("optimizer= is missing", "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), say")
        _check(
            callable(self.optimizer) or isinstance(self.optimizer, torch.optim.Optimizer),
            "optimizer",
            self.optimizer,
            "a function of the parameters",
        )
        if self.epochs is None and self.steps is None:
            raise JobError("neither epochs= nor steps= was given", "epochs=5, say")
        return self

    def settled(self, *, count: int | None = None, kind: str | None = None) -> Self:
        """The same job with its devices, its plan parsed and checked, and its batch size as a number.

        ``count`` and ``kind``: the devices of an existing world (torchrun's), instead of ``devices``.
        """
        devices = self.devices if isinstance(self.devices, Devices) else find(self.devices)
        if count is not None:
            devices = Devices(kind or devices.kind, tuple(range(count)))
        plan = settle(self.plan, devices.count)
        settled = replace(self, devices=devices, plan=plan, batch_size=self._samples_a_batch(plan))
        return settled.flowing(self)

    def flowing(self, asked: "Job") -> Self:
        """The same job with enough microbatches for the stages of a pipeline, where ``asked`` has no number of them:
        four a stage, or as many as there are samples; one for a model with BatchNorm, whose statistics are those of a
        microbatch."""
        plan, size = self.plan, self.batch_size
        assert isinstance(plan, Plan)
        assert isinstance(size, int)
        said = isinstance(asked.plan, Plan) or "microbatches=" in asked.plan
        if plan.pipeline == 1 or plan.schedule == "sequential" or said or batch_norms(self._shape()):
            return self
        for count in range(min(4 * plan.pipeline, size // plan.shares), 1, -1):
            try:
                schedule(plan.schedule, plan.pipeline, count, plan.chunks or None)
            except PlanError:
                continue
            return replace(self, plan=replace(plan, microbatches=count))
        return self

    def _samples_a_batch(self, plan: Plan) -> int:
        size = self.batch_size
        if isinstance(size, str):
            each, _, unit = size.partition("/")
            if not each.isdecimal() or unit != "device":
                raise JobError(f"batch_size={size!r} is not understood", 'write 256, or "32/device"')
            size = int(each) * plan.shares
        _check(size > 0, "batch_size", size, "a number of samples above 0")
        parts = plan.shares * plan.microbatches
        if size < parts:
            split = [key for key in ("data", "shard", "microbatches") if getattr(plan, key) > 1]
            largest = max(split, key=lambda key: getattr(plan, key))
            rest = parts // getattr(plan, largest)
            fits = f", or {largest}={size // rest}" if size >= rest else ""
            raise PlanError(
                f"a batch of {size} samples cannot be shared by {plan}",
                f"that is {parts} parts: {' x '.join(f'{key}={getattr(plan, key)}' for key in split)}",
                f"batch_size={parts} works{fits}",
            )
        for name in ("data", "valid"):
            data = getattr(self, name)
            if data is not None and sample_count(data, name) == 0:
                raise JobError(f"{name}= holds no samples")
        return size

    def build(self) -> nn.Module:
        """The model; a function builds it under ``seed``, so that it starts the same under every plan."""
        if isinstance(self.model, nn.Module):
            complete(self.model)
            _refuse_meta(self.model)
            return self.model
        model = self._run_function()
        _refuse_meta(model)
        return model

    def defer(self) -> Deferred:
        """The model that a function builds, on meta. ``Unfollowable``: it must be built as it is."""
        deferred = Deferred(self._run_function)
        _refuse_meta(deferred.model, known=set(deferred.parameters))
        if any(isinstance(t, torch.Tensor) for state in self._state_at_start(deferred) for t in state.values()):
            raise Unfollowable("the optimizer makes tensors of them when it is built")
        return deferred

    def _shape(self) -> nn.Module:
        """The model, with or without values."""
        if isinstance(self.model, nn.Module):
            return self.model
        try:
            return self.defer().model
        except Unfollowable:
            return self.build()

    def _state_at_start(self, deferred: Deferred) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else list(self.make_optimizer(deferred.model).state.values())

    def _run_function(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.model()
        if not isinstance(model, nn.Module):
            raise JobError(f"model= is a function that returned {_what(model)}, not an nn.Module")
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            mine = {id(p) for p in model.parameters()}
            if not all(id(p) in mine for group in self.optimizer.param_groups for p in group["params"]):
                raise JobError(
                    "optimizer= holds parameters that are not the model's",
                    "pass a function: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
                )
            return self.optimizer
        first = next(iter(_parameters(self.optimizer)), None)
        optimizer = self.optimizer(model if first == "model" else list(model.parameters()))
        if not hasattr(optimizer, "param_groups"):
            raise JobError(f"optimizer= is a function that returned {_what(optimizer)}, not an optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise JobError(
                "LBFGS evaluates the loss several times a step", "meshfit computes it once: use another optimizer"
            )
        return optimizer

    def make_scheduler(self, optimizer: torch.optim.Optimizer, steps: int | None) -> Any:
        if self.scheduler is None:
            return None
        needs = _parameters(self.scheduler)
        if isinstance(self.scheduler, type) and len(needs) > 1:
            raise JobError(
                f"scheduler={self.scheduler.__name__} needs {', '.join(needs[1:])} too",
                f"scheduler=lambda optimizer: {self.scheduler.__name__}(optimizer, {needs[1]}=...)",
            )
        scheduler = self.scheduler(optimizer, steps) if len(needs) > 1 else self.scheduler(optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise JobError(
                "ReduceLROnPlateau follows a metric, but schedulers are stepped every step", "use another one"
            )
        return scheduler


def _refuse_meta(model: nn.Module, known: Collection[torch.Tensor] = ()) -> None:
    """Refuse weights on the meta device, except under it and for those ``known``: they can be inspected, but not
    trained."""
    if torch.get_default_device().type == "meta":
        return
    named = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in named if tensor.is_meta and tensor not in known]
    if empty:
        raise JobError(
            f"the model is on the meta device: {empty[0]} has a shape, but no values",
            f"{len(empty)} of its {len(named)} tensors have no values",
            'model.to_empty(device="cpu"), then load or initialise its weights',
            "or pass a function that builds the model: model=lambda: Net()",
        )


def _parameters(function: Callable) -> list[str]:
    """Names of the required arguments."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["params"]
    return [p.name for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _what(value: Any) -> str:
    return "None" if value is None else f"something of type {type(value).__name__}"


def _check(right: bool, name: str, value: Any, wanted: str) -> None:
    if not right:
        raise JobError(f"{name}={value!r} is not {wanted}")
