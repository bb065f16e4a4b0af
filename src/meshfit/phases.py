"""A training step in phases: each has a loss of its own, and optimizers that step by its gradients.

    meshfit.fit(GAN(), images, plan="data=2",
        step={"critic": critic_loss, "generator": meshfit.every(5, generator_loss)},
        optimizer={
            "critic": lambda model: Adam(model.D.parameters()),
            "generator": lambda model: Adam(model.G.parameters()),
        })

Phases run in order, on the same batch, each with the weights that those before it have left. A phase gives gradients to
its own optimizers' parameters alone. A training without phases has one, without a name.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.errors import JobError, PlanError, did_you_mean
from meshfit.loss.objective import LossDenominator, Objective, check_scalar
from meshfit.optimizers import Optimizers
from meshfit.step import Reading, parted


@dataclass(frozen=True)
class Every:
    """A phase that runs in every ``steps``-th step alone."""

    steps: int
    function: Callable[..., Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.function(model, batch)


def every(steps: int, function: Callable[..., Any]) -> Every:
    """Let a phase run in every ``steps``-th step: ``step={"critic": f, "generator": meshfit.every(5, g)}``."""
    if not isinstance(steps, int) or steps < 1:
        raise JobError(f"every({steps!r}, ...) is not a whole number of steps above 0")
    if not callable(function):
        raise JobError(f"every({steps}, {function!r}): the second is not a function", "every(5, generator_loss), say")
    return Every(steps, function)


@dataclass(frozen=True)
class AskedPhase:
    """A phase as the user asked for it."""

    name: str
    """Empty where there is one."""
    objective: Objective
    optimizer: Any
    scheduler: Any = None
    every: int = 1


def phases_of(step: Any, loss: Any, optimizer: Any, scheduler: Any) -> tuple[AskedPhase, ...]:
    """Those of a job, checked."""
    if not isinstance(step, Mapping):
        for name, value in (("optimizer", optimizer), ("scheduler", scheduler)):
            if isinstance(value, Mapping):
                raise JobError(
                    f"{name}= is a dict, by phases, but step= is not",
                    'step={"critic": f, "generator": g} gives each its loss',
                )
        return (AskedPhase("", Objective(loss, step), optimizer, scheduler),)
    names = list(step)
    if not names or not all(isinstance(name, str) and name and "/" not in name for name in names):
        raise JobError(f"step= has phases {names}", "a phase needs a name, a text without /")
    for name, function in step.items():
        if not callable(function):
            raise JobError(f"step= holds {function!r} as {name!r}, which is not a function")
    optimizer = {} if optimizer is None else optimizer
    for word, value in (("optimizer", optimizer), ("scheduler", scheduler)):
        if value is not None and not isinstance(value, Mapping):
            raise JobError(f"step= has phases, but {word}= is one for all", f'{word}={{"{names[0]}": ...}} by phase')
        for other in value or ():
            if other not in names:
                raise JobError(f"{word}= has a phase {other!r}, step= has not", did_you_mean(other, names))
    if optimizer and (missing := [name for name in names if name not in optimizer]):
        raise JobError(f"the phase {missing[0]!r} has no optimizer", f'optimizer={{"{missing[0]}": ...}}')
    if all(isinstance(function, Every) and function.steps > 1 for function in step.values()):
        raise JobError("no phase runs in every step", "leave one of them without every(...)")
    return tuple(
        AskedPhase(
            name,
            Objective(None, function.function if isinstance(function, Every) else function),
            optimizer.get(name),
            (scheduler or {}).get(name),
            function.steps if isinstance(function, Every) else 1,
        )
        for name, function in step.items()
    )


@dataclass(frozen=True)
class SumOfPhases:
    """The losses of all phases as one step: what layouts are found with, and what an evaluation measures."""

    phases: tuple[AskedPhase, ...]

    @property
    def code(self) -> tuple[Any, ...]:
        """The user's own functions."""
        return tuple(each for phase in self.phases for each in phase.objective.code)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        losses: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for phase in self.phases:
            loss, logged = parted(phase.objective(model, batch))
            losses[phase.name] = check_scalar(loss[0]) / loss[1] if isinstance(loss, tuple | list) else loss
            values[phase.name] = losses[phase.name].detach()
            values |= {f"{phase.name}/{name}": value for name, value in logged.items()}
        return torch.stack([*losses.values()]).sum(), values


@dataclass
class TrainedPhase:
    """One in a run: what computes its loss, sums its gradients and steps."""

    asked: AskedPhase
    optimizers: Optimizers
    over: LossDenominator
    others: Sequence[nn.Parameter] = ()
    """Parameters that train in other phases."""
    frozen: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Those that its optimizers hold and that do not train, where ranks have agreed on whose gradients they sum."""
    schedule: Any = None
    exchange: Any = None
    update: Any = None
    guard: Any = None
    """Called before each update, until no gradient is missing: see gradients.py."""

    def due(self, step: int) -> bool:
        return step % self.asked.every == 0

    def check(self) -> None:
        """Refuse a parameter that has come to train."""
        if thawed := [name for name, p in self.frozen.items() if p.requires_grad]:
            raise PlanError(
                f"{thawed[0]} trains from this step on, and did not when the training began",
                "ranks agreed then on whose gradients they sum: its own would not be that of one device",
                "let it train from the start, in a group of the optimizer with lr=0 until then",
                "one device takes it as it is",
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it its own parameters alone get gradients."""
        for p in self.others:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self.others:
                p.requires_grad_(True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStep:
    """What a phase did in a step."""

    name: str
    loss: Tensor | float
    norm: Tensor | float
    taken: Tensor | bool
    stop: Tensor | float
    broken: Sequence[Tensor | float]
    values: Mapping[str, Tensor | float]
    lr: float

    @property
    def reading(self) -> Reading:
        return Reading(self.loss, self.norm, self.taken, self.stop, *self.broken, named=self.values)


def combined_reading(done: Sequence[PhaseStep]) -> Reading:
    """A step of several phases: the sum of their losses, the norm of all gradients; each loss by its phase's name."""
    values: dict[str, Tensor | float] = {}
    for one in done:
        values[one.name] = one.loss
        values |= {f"{one.name}/{name}": value for name, value in one.values.items()}
    loss, norms = sum(one.loss for one in done), [one.norm for one in done]
    on_device = any(isinstance(norm, Tensor) for norm in norms)
    norm = torch.stack([torch.as_tensor(n) for n in norms]).norm() if on_device else math.hypot(*norms)
    taken = done[0].taken
    for one in done[1:]:
        taken = taken & one.taken
    return Reading(loss, norm, taken, done[-1].stop, named=values)
