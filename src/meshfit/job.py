"""What the user asked for: one value, checked before anything starts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from meshfit.arguments import check_arguments
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.checkpoint.cadence import Cadence
from meshfit.checkpoint.graceful_stop import check_notice
from meshfit.checkpoint.weights import load_weights
from meshfit.data.datasets import Recipe, sample_count
from meshfit.data.reading import Readers
from meshfit.deferred import Deferred, Unfollowable
from meshfit.errors import JobError, PlanError, did_you_mean
from meshfit.hugging_face import complete, padding_token
from meshfit.launch.devices import Devices, find
from meshfit.launch.system import check_ranks
from meshfit.loss.objective import Objective, stated
from meshfit.metrics import check as check_metric
from meshfit.metrics import measures
from meshfit.optimizers import Optimizers, Schedulers, made_optimizers, made_schedulers, what
from meshfit.patches import replaced
from meshfit.phases import AskedPhase, SumOfPhases, phases_of
from meshfit.plan import Plan
from meshfit.plan_devices import on_fewer, settle, settle_range
from meshfit.quantised import prepare, quantised
from meshfit.schedule.orders import schedule
from meshfit.units import in_seconds

GIVEN_UP = 60.0  # seconds after which those who wait in a collective have surely given up
NO_EVALUATION = dict.fromkeys(("valid", "valid_step", "metrics", "best", "keep_best", "patience"))
"""Arguments of a job that does not evaluate."""
NEEDS = (
    (("best", "keep_best", "patience", "metrics", "valid_step"), "valid", "data to evaluate on", ""),
    (("keep_best", "preemption"), "checkpoint", "how often to save", 'checkpoint="10 minutes", say'),
    (("checkpoint", "resume"), "out", "the run's folder", 'out="runs/one", say'),
    (("partial",), "weights", "the files that the model starts from", ""),
    (("patience",), "best", "the metric to watch", 'best="-loss", say'),
)
"""Arguments, and another one that they mean nothing without."""


@dataclass(frozen=True)
class Job:
    """One training: the arguments of ``meshfit.fit``, which explains them."""

    model: nn.Module | Callable[[], nn.Module]
    data: Any
    _: KW_ONLY
    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    weights: Path | str | Sequence[Path | str] | None = None
    partial: bool = False
    optimizer: Any = None
    scheduler: Any = None
    batch_size: int | str | None = None
    batch_tokens: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    length: Any = None
    pack: int | None = None
    epochs: float | None = None
    steps: int | None = None
    valid: Any = None
    valid_every: int | None = None
    valid_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] | None = None
    best: str | None = None
    patience: int | None = None
    ema: float | None = None
    clip: float | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    shuffle: bool | None = None
    workers: int | str | None = None
    seed: int = 0
    plan: Plan | str = "auto"
    devices: Devices | str | int = "auto"
    out: Path | str | None = None
    checkpoint: int | str | None = None
    keep: int = 2
    keep_best: str | None = None
    resume: bool | Path | str = False
    restarts: int | Literal["auto"] = "auto"
    preemption: Path | str | None = None
    grace: float | str = 30.0
    listen: str | None = None
    join: str | None = None
    timeout: float = 600.0
    hang_timeout: float | str | None = None
    check_replicas: int | bool | None = None
    independent: bool = False

    def __post_init__(self) -> None:
        check_arguments(self)
        self._take_recipe()
        if self.loss is not None and self.step is not None:
            raise JobError("loss= and step= were both given", "step(model, batch) computes the loss itself: keep one")
        if "loss" in (self.metrics or {}):
            raise JobError(
                "metrics= has one named 'loss', which is what the loss itself is called", "name it otherwise"
            )
        for name, metric in (self.metrics or {}).items():
            check_metric(name, metric)
        for phase in self.phases:
            stated(phase.objective)  # refuses a loss that is not one number
        Readers.of(self.workers)
        Cadence.of(self.checkpoint)  # refuses what it cannot parse
        if self.preemption is not None:
            check_notice(self.preemption)
        self._check_needs()
        known = ["loss", *(self.metrics or {})]
        logs = self.step is not None or self.valid_step is not None  # it may be a value that these log
        for name in ("best", "keep_best"):
            asked = getattr(self, name)
            if asked and not logs and not any(measures(m, asked.lstrip("-")) for m in known):
                raise JobError(f"{name}={asked!r} is not measured", did_you_mean(asked, ["-loss", *known[1:]]))

    def _check_needs(self) -> None:
        for names, other, meaning, remedy in NEEDS:
            for name in names:
                asked = getattr(self, name)
                asked = asked is True if name == "resume" else asked  # from a path it needs none
                if asked and getattr(self, other) is None:
                    raise JobError(f"{name}= needs {other}=, {meaning}", remedy)

    @property
    def grace_seconds(self) -> float:
        seconds = in_seconds(self.grace)
        assert seconds is not None  # checked
        return seconds

    def _take_recipe(self) -> None:
        """How samples become batches goes with the data."""
        if self.pack is not None:
            for name, other in (("collate", "pack"), ("length", "pack"), ("batch_size", "batch_tokens")):
                if getattr(self, name) is not None and getattr(self, other) is not None:
                    raise JobError(f"{name}= and {other}= were both given", "rows are packed to one length: keep one")
            if self.batch_tokens is not None:
                object.__setattr__(self, "batch_size", max(1, self.batch_tokens // self.pack))
                object.__setattr__(self, "batch_tokens", None)
        if self.batch_tokens is not None and self.length is None and not isinstance(self.data, Recipe):
            raise JobError("batch_tokens= needs length=, what a sample's tokens are", 'length="input_ids", say')
        how: dict[str, Any] = {"collate": self.collate, "length": self.length}
        how |= {"tokens": self.batch_tokens, "pack": self.pack}
        for name in ("data", "valid"):
            if (data := getattr(self, name)) is None and name == "valid":
                continue
            data = Recipe.of(data, name, padding=padding_token(self.model), **how)
            if name == "valid" and data.loader is not None:  # every sample counts
                data = replace(data, loader=replace(data.loader, drop_last=False))
            object.__setattr__(self, name, data)
            if isinstance(how["length"], str) or callable(how["length"]):
                continue
            how |= {"length": None, "tokens": None}  # lengths that were given are those of data=
        for name in ("collate", "length", "batch_tokens", "pack"):
            object.__setattr__(self, name, None)
        loader, default = self.data.loader, {"batch_size": 32, "shuffle": True, "workers": None}
        for name, value in default.items():
            asked, said = getattr(self, name), value if loader is None else getattr(loader, name)
            if asked is not None and loader is not None and name != "workers" and asked != said:
                raise JobError(f"{name}={asked} is given, and the DataLoader says {said}", "leave one out")
            if asked is None:
                object.__setattr__(self, name, said)

    @cached_property
    def skipped(self) -> list[str]:
        """How ``weights`` differs from the model that was built last, with ``partial``."""
        return []

    @property
    def hang_seconds(self) -> float:
        """How long a rank may stand still in a step: longer than others wait for it, unless that was said."""
        return in_seconds(self.hang_timeout) or self.timeout + GIVEN_UP

    @property
    def phases(self) -> tuple[AskedPhase, ...]:
        return phases_of(self.step, self.loss, self.optimizer, self.scheduler)

    @property
    def objective(self) -> Objective:
        """Of all phases together."""
        phases = self.phases
        return phases[0].objective if len(phases) == 1 else Objective(None, SumOfPhases(phases))

    @property
    def valid_objective(self) -> Objective:
        """Of evaluations."""
        return self.objective if self.valid_step is None else Objective(None, self.valid_step)

    def training(self) -> Self:
        """The same job, after a check of what only training needs."""
        if self.optimizer is None:
            raise JobError("optimizer= is missing", "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), say")
        for phase in self.phases:
            given = phase.optimizer
            listed = isinstance(given, list | tuple) and bool(given) and all(map(_is_optimizer, given))
            if not (callable(given) or _is_optimizer(given) or listed):
                raise JobError(f"optimizer={given!r} is not a function of the parameters")
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
        if devices.most:
            plan = on_fewer(settle_range(self.plan, devices.most), devices.count or 1)
        else:
            plan = settle(self.plan, devices.count)
        if devices.count is None:  # as many as the plan names
            check_ranks(plan)
        recipes = {name: recipe.measured() for name in ("data", "valid") if (recipe := getattr(self, name)) is not None}
        if any(recipe.needs_padding_token for recipe in recipes.values()):
            padding = padding_token(self._shape())
            recipes = {name: replace(recipe, padding=padding) for name, recipe in recipes.items()}
        measured = replace(self, **recipes)
        settled = replace(measured, devices=devices, plan=plan, batch_size=measured._samples_a_batch(plan))
        return settled._with_microbatches(self)

    def _with_microbatches(self, asked: "Job") -> Self:
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
        for name in ("data", "valid"):
            data = getattr(self, name)
            if data is not None and sample_count(data, name) == 0:
                raise JobError(f"{name}= holds no samples")
        if self.data.tokens is not None:
            return self.data.mean_size() or plan.shares * plan.microbatches
        size = self.batch_size
        assert size is not None  # as it is after _take_recipe
        if isinstance(size, str):
            each, _, unit = size.partition("/")
            if not each.isdecimal() or unit != "device":
                raise JobError(f"batch_size={size!r} is not understood", 'write 256, or "32/device"')
            size = int(each) * plan.shares
        if size <= 0:
            raise JobError(f"batch_size={size!r} is not a number of samples above 0")
        parts = plan.shares * plan.microbatches
        if size < parts:
            split = [key for key in ("data", "shard", "expert", "microbatches") if getattr(plan, key) > 1]
            largest = max(split, key=lambda key: getattr(plan, key))
            rest = parts // getattr(plan, largest)
            fits = f", or {largest}={size // rest}" if size >= rest else ""
            raise PlanError(
                f"a batch of {size} samples cannot be shared by {plan}",
                f"that is {parts} parts: {' x '.join(f'{key}={getattr(plan, key)}' for key in split)}",
                f"batch_size={parts} works{fits}",
            )
        return size

    def build(self) -> nn.Module:
        """The model; a function builds it under ``seed``, so that it starts the same under every plan."""
        if isinstance(self.model, nn.Module):
            complete(self.model)
            _refuse_meta(self.model)
            return prepare(self.model)
        model = self._run_function()
        _refuse_meta(model)
        return prepare(model)

    def defer(self) -> Deferred:
        """The model that a function builds, on meta. ``Unfollowable``: it must be built as it is."""
        deferred = Deferred(self._run_function)
        if any(True for _ in quantised(deferred.model)):
            raise Unfollowable("it holds weights in 4 bits")
        _refuse_meta(deferred.model, known=set(deferred.parameters))
        states = [] if self.optimizer is None else self.make_optimizer(deferred.model).state.values()
        if any(isinstance(t, torch.Tensor) for state in states for t in state.values()):
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

    def _run_function(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            with replaced(torch.distributed, "is_initialized", lambda before: lambda: False):
                model = self.model()  # as on one device: some libraries build in all-reduces of their own
            if not isinstance(model, nn.Module):
                raise JobError(f"model= is a function that returned {what(model)}, not an nn.Module")
            self._load(model)
        return model

    def loaded(self) -> Self:
        """The same job, with ``weights`` in the model where that is an object; a function's come when it is called."""
        if isinstance(self.model, nn.Module):
            self._load(self.model)
        return self

    def _load(self, model: nn.Module) -> None:
        if self.weights is not None:
            self.skipped[:] = load_weights(model, self.weights, partial=self.partial)

    def make_optimizer(self, model: nn.Module) -> Optimizers:
        """Of all phases."""
        return Optimizers([one for some in self.make_optimizers(model) for one in some.each])

    def make_optimizers(self, model: nn.Module) -> list[Optimizers]:
        """One for each phase."""
        made = [made_optimizers(phase.optimizer, model) for phase in self.phases]
        names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        held: set[torch.Tensor] = set()
        for p in (p for some in made for p in some.parameters):
            if p in held:
                raise JobError(
                    f"{names.get(p, 'a parameter')} is in two optimizers",
                    "each of them would step it, and keep a state of it: give it to one",
                )
            held.add(p)
        return made

    def make_scheduler(self, optimizers: Optimizers, steps: int | None, phase: int = 0) -> Schedulers | None:
        """Of the optimizers of a phase."""
        asked = self.phases[phase].scheduler
        return None if asked is None else made_schedulers(asked, optimizers, steps)

    @property
    def followed(self) -> str:
        """The metric that schedules follow."""
        return self.best.lstrip("-") if self.best else "loss"


def _is_optimizer(given: Any) -> bool:
    return isinstance(given, torch.optim.Optimizer)


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


def plan_of(job: Job) -> Plan:
    """Of a settled job."""
    assert isinstance(job.plan, Plan)
    return job.plan
