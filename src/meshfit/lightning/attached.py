"""A LightningModule as a rank runs it: its steps as functions of a batch, what ``self.trainer`` and ``self.log`` are.

What a module reads of its trainer is given where it can be true, and refused by name otherwise. Where a plan runs a
recording of the step (pipeline, branch), a number that changes from step to step would stay as it was recorded.
"""

import dis
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from meshfit import events
from meshfit.data import tree
from meshfit.errors import JobError, PlanError
from meshfit.lightning.metric_calls import BatchValue, MetricCalls

LIBRARIES = "lightning", "pytorch_lightning"

INSTEAD = {
    "world_size": "a batch is that of all devices: nothing is to be scaled by their number",
    "num_devices": "a batch is that of all devices: nothing is to be scaled by their number",
    "logger": "self.log for numbers; callbacks=[meshfit.observe.track.Track(...)] hands them to a tracker",
    "loggers": "self.log for numbers; callbacks=[meshfit.observe.track.Track(...)] hands them to a tracker",
    "optimizers": "configure_optimizers says what there is; lr is in each step of the result's history",
    "lr_scheduler_configs": "configure_optimizers says what there is; meshfit steps it",
    "strategy": "plan= says how the training is spread",
    "should_stop": 'callbacks=[EarlyStopping(...)], or a function of a meshfit.Step that returns "stop"',
    "is_last_batch": "a callback is given a meshfit.Step, whose .last says it",
    "callback_metrics": "after fit, module.trainer.callback_metrics; before, a callback with a meshfit.Step",
}
"""By the name of what a module reads."""


@dataclass
class StepCall:
    """One call of a step or hook: what it logged."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    """Calls of torchmetrics objects, by their path in the module."""
    last: dict[str, Any] = field(default_factory=dict)
    """The last of them, and of those that average single numbers."""
    logged: dict[str, list[str]] = field(default_factory=dict)
    """Names under which they were logged, by path."""


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """What is known before the training begins: by Lightning's names, what a module may read of its trainer."""

    max_epochs: int | None
    max_steps: int
    estimated_stepping_batches: int | None
    num_training_batches: int | None
    accumulate_grad_batches: int
    default_root_dir: str | None
    steps_of_epoch: int | None
    recorded: str
    """The plan, where it runs a recording of the step; or empty."""
    cut: bool
    """Whether a batch is cut, over devices or microbatches."""


class AttachedTrainer:
    """Stands where a module expects its trainer. It goes with every copy of the module, and knows no weights."""

    _OWN = ("facts", "held", "_calls", "_outside", "_model")

    def __init__(self, facts: TrainerFacts):
        self.facts = facts
        self.held: dict[str, float] = {}
        """``callback_metrics``, in the caller's process."""
        self._calls: dict[int, StepCall] = {}
        self._outside = 0, 0
        self._model: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": {}, "_model": None}

    @contextmanager
    def calling(self, module: nn.Module, name: str) -> Iterator[StepCall]:
        for each in module.modules():
            if is_module(each):
                each.__dict__["_trainer"] = self  # copies and pickles of a module come without it
        made = StepCall(name)
        self._calls[threading.get_ident()] = made
        try:
            yield made
        finally:
            del self._calls[threading.get_ident()]

    @property
    def call(self) -> StepCall | None:
        return self._calls.get(threading.get_ident())

    def outside(self, step: int, epoch: int, model: nn.Module | None = None) -> None:
        """Where the training is, for what runs between its steps."""
        self._outside, self._model = (step, epoch), model

    # What modules read

    @property
    def global_step(self) -> int:
        if self.call is None or not self.call.name.endswith("_step"):
            return self._outside[0]
        self._refuse_recorded("global_step")
        step = events.current().step
        return max(0, step - 1 if self.call.name == "training_step" else step)

    @property
    def current_epoch(self) -> int:
        if self.call is None or not self.call.name.endswith("_step"):
            return self._outside[1]
        self._refuse_recorded("current_epoch")
        return max(0, events.current().step - 1) // self._known("current_epoch")

    @property
    def batch_index(self) -> int:
        """Of the batch that is trained on."""
        self._refuse_recorded("batch_idx")
        if self.facts.accumulate_grad_batches > 1:
            raise JobError(
                "training_step reads batch_idx", "with accumulate_grad_batches a batch is one optimizer step"
            )
        return max(0, events.current().step - 1) % self._known("batch_idx")

    def _known(self, name: str) -> int:
        if self.facts.steps_of_epoch is None:
            raise JobError(f"the module reads {name}, and its data has no length", "leave it out, or give a data set")
        return self.facts.steps_of_epoch

    def _refuse_recorded(self, name: str) -> None:
        if self.facts.recorded:
            raise PlanError(
                f"{self.facts.recorded}: {self.call.name if self.call else 'the module'} reads {name}",
                "the plan runs a recording of the step, in which it would stay the same",
                "plans without pipeline= and branch= run the step itself",
            )

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def callback_metrics(self) -> dict[str, float]:
        """Of the training, when it has ended: last values, means over the last epoch as ``name_epoch``, and the last
        evaluation."""
        if self.call is not None:
            raise _refused("callback_metrics")
        return self.held

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            raise _refused("model")
        return self._model

    lightning_module = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "facts" not in self.__dict__:
            raise AttributeError(name)
        facts: dict[str, Any] = {
            **vars(self.facts),
            "log_dir": self.facts.default_root_dir,
            "training": self.call is not None and self.call.name == "training_step",
            "validating": self.call is not None and "validation" in self.call.name,
            **dict.fromkeys(("sanity_checking", "testing", "predicting", "barebones", "fast_dev_run"), False),
        }
        if facts.get(name) is None and name != "progress_bar_callback":
            raise _refused(name)
        return facts.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._OWN:
            raise _refused(name)
        super().__setattr__(name, value)

    # What modules log

    def log(self, name: str, value: Any, *given: Any, reduce_fx: Any = "mean", **more: Any) -> None:
        call = self.call
        if call is None:
            return  # a block that is computed again in backward has logged it already
        if reduce_fx != "mean" and getattr(reduce_fx, "__name__", "") != "mean":
            raise JobError(f"self.log({name!r}, reduce_fx={reduce_fx!r})", "values are averaged as the loss is")
        if _at_the_end(call, name, value):
            return
        value = _of_batch(value)
        if isinstance(value, Mapping):
            raise JobError(f"self.log({name!r}) was given a dict", "self.log_dict logs several")
        call.values[name] = value.detach() if isinstance(value, Tensor) else value

    def log_dict(self, dictionary: Any, *given: Any, **more: Any) -> None:
        if self.call is not None and not _at_the_end(self.call, "*", dictionary):
            for name, value in _of_batch(dictionary).items():
                self.log(name, value, **more)


def _at_the_end(call: StepCall, name: str, value: Any) -> bool:
    """Whether it is a metric of an evaluation, whose value is known at the end: then its ``name`` is noted; "*": it
    has several values."""
    if not (isinstance(value, MetricCalls) and call.name == "validation_step" and value.path in call.metrics):
        return False
    call.logged.setdefault(value.path, []).append(name)
    return True


def _of_batch(value: Any) -> Any:
    value = value.batch_value() if isinstance(value, MetricCalls) else value
    return value.computed() if isinstance(value, BatchValue) else value


def _refused(name: str) -> JobError:
    instead = INSTEAD.get(name, "meshfit.fit has what a training of its own needs: step=, callbacks=, optimizer=")
    return JobError(f"the module uses self.trainer.{name}, which meshfit does not give it", instead)


def bases_of(value: Any) -> list[type]:
    """Lightning's classes that a module, a data module or a callback is made from: ``lightning`` and
    ``pytorch_lightning`` have each their own."""
    return [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] in LIBRARIES]


def base_of(value: Any) -> type | None:
    return next(iter(bases_of(value)), None)


def is_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and getattr(base_of(value), "__name__", "") == "LightningModule"


def defines(module: Any, hook: str) -> bool:
    """Whether a module has a hook of its own that does something."""
    own, base = getattr(type(module), hook, None), base_of(module)
    if own is None or own is getattr(base, hook, None):
        return False
    code = getattr(inspect.unwrap(own), "__code__", None)
    if code is None:
        return True
    does = [each for each in dis.get_instructions(code) if each.opname not in ("RESUME", "NOP", "RETURN_VALUE")]
    return not all(each.opname in ("LOAD_CONST", "RETURN_CONST") and each.argval is None for each in does)


def reads(function: Any, name: str) -> bool:
    """Whether a function uses its argument ``name``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    if name in code.co_cellvars:
        return True
    return any(
        each.opname.startswith("LOAD_FAST") and name in _names(each.argval) for each in dis.get_instructions(code)
    )


def _names(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)  # newer Pythons load two at once


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside parameters, buffers and modules: which objects, and how many things are in them."""
    own = {name: value for name, value in module.__dict__.items() if not name.startswith("_")}
    return {name: (id(value), len(value) if isinstance(value, list | dict | set) else 0) for name, value in own.items()}


def trainer_of(module: nn.Module) -> AttachedTrainer:
    """The one that goes with this copy of the module."""
    return module.__dict__["log"].__self__


@dataclass(frozen=True)
class ModuleStep:
    """``training_step`` or ``validation_step`` as meshfit's step: (loss, values), and outputs for metrics."""

    name: str
    outputs: bool = False
    keeps_nothing: bool = False
    """Refuse a step that changes the module, whose hook at the end of an epoch runs in another copy."""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        trainer = trainer_of(model)
        before = _attributes(model)
        with trainer.calling(model, self.name) as call:
            said = self._said(model, trainer, batch)
        changed = [name for name, was in _attributes(model).items() if name in before and was != before[name]]
        tensors = [name for name in changed if isinstance(model.__dict__[name], Tensor)]
        if tensors and trainer.facts.cut:
            raise JobError(
                f"{self.name} keeps a tensor in self.{tensors[0]}, and each device would have one of its own",
                f"self.register_buffer({tensors[0]!r}, ...) in __init__: buffers that a step writes are kept alike",
            )
        if changed and self.keeps_nothing:
            raise JobError(
                f"{self.name} keeps something in self.{changed[0]}, and on_validation_epoch_end would not find it",
                "a batch is cut over devices: self.log averages over all, a torchmetrics object sees all samples",
            )
        return self._result(said, call)

    def _said(self, model: Any, trainer: AttachedTrainer, batch: Any) -> Any:
        first = next(tree.tensors(batch), None)
        if first is not None:
            model.__dict__["_device"] = first.device  # what self.device is: parameters are moved one by one
        batch = model.on_after_batch_transfer(model.on_before_batch_transfer(batch, 0), 0)
        step: Callable[..., Any] = getattr(model, self.name)
        taken = [p for p in inspect.signature(step).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        more: list[Any] = []
        if len(taken) > 1 or any(p.kind is p.VAR_POSITIONAL for p in taken):
            index = taken[1].name if len(taken) > 1 else ""
            more = [self._index(trainer) if reads(step, index) else 0]
        return step(batch, *more)

    def _index(self, trainer: AttachedTrainer) -> int:
        if self.name == "training_step":
            return trainer.batch_index
        raise JobError(f"{self.name} reads batch_idx", "a batch of an evaluation is cut as the plan says: leave it out")

    def _result(self, said: Any, call: StepCall) -> Any:
        loss = said.get("loss") if isinstance(said, Mapping) else said
        if loss is None and self.name == "validation_step":
            loss = next((value for name, value in call.values.items() if "loss" in name.lower()), None)
        if loss is None:
            raise JobError(
                f"{self.name} returned no loss" + (", and logs none" if self.name != "training_step" else ""),
                "leave samples out in the data set, not in the step"
                if self.name == "training_step"
                else "return it, or self.log('val_loss', ...): it is what an evaluation is reported by",
            )
        if not self.outputs:
            return loss, call.values
        noted = {"\n".join([path, *call.logged.get(path, ())]): calls for path, calls in call.metrics.items()}
        return loss, call.values, noted
