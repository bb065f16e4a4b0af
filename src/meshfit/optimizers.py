"""Several optimizers as one, and several schedules: groups in a row, state by the parameter, stepped together.

A single one is the simplest case, and looks to a checkpoint as it does by itself.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshfit.errors import JobError, did_you_mean


def measure_named(name: str, measured: Mapping[str, float]) -> float:
    if name not in measured:
        raise JobError(f"an evaluation gives no {name!r}", did_you_mean(name, list(measured)))
    return measured[name]


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step evaluates the loss itself, as LBFGS does."""
    asked = inspect.signature(type(optimizer).step).parameters.get("closure")
    return asked is not None and asked.default is asked.empty


class Optimizers:
    """``each`` steps parameters of its own. ``listed``: the user gave a list, so schedules are made of a list too."""

    def __init__(self, each: Sequence[Optimizer], *, listed: bool = False):
        self.each, self.listed = list(each), listed

    @classmethod
    def of(cls, given: "Optimizer | Optimizers") -> "Optimizers":
        return given if isinstance(given, Optimizers) else cls([given])

    @property
    def given(self) -> Any:
        """As the user gave it."""
        return self.each if self.listed else self.each[0]

    @property
    def name(self) -> str:
        return " + ".join(type(one).__name__ for one in self.each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.each for group in one.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def freeze_others(self, model: nn.Module) -> None:
        """Parameters that none of them steps get no gradient: none is computed or sent, and ``clip`` and the norm are
        over what is stepped."""
        stepped = set(self.parameters)
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p in stepped)

    @cached_property
    def state(self) -> "_States":
        return _States(self)


class _States(MutableMapping[Tensor, dict[str, Any]]):
    """What each optimizer keeps for its parameters."""

    def __init__(self, optimizers: Optimizers):
        self._optimizers = optimizers

    @cached_property
    def _owners(self) -> dict[Tensor, Optimizer]:
        return {p: one for one in self._optimizers.each for group in one.param_groups for p in group["params"]}

    def _holding(self, parameter: Tensor) -> dict[Tensor, Any]:
        for one in self._optimizers.each:
            if parameter in one.state:
                return one.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self._holding(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self._owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._holding(parameter)[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        for one in self._optimizers.each:
            yield from one.state

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers.each)


class Schedulers:
    """``each`` is stepped after every step; those that follow a metric, after every evaluation."""

    def __init__(self, each: Sequence[Any]):
        self.each = list(each)

    @property
    def following(self) -> list[ReduceLROnPlateau]:
        """Those that are told a metric."""
        return [one for one in self.each if isinstance(one, ReduceLROnPlateau)]

    @property
    def name(self) -> str:
        return " + ".join(type(one).__name__ for one in self.each)

    def step(self) -> None:
        for one in self.each:
            if not isinstance(one, ReduceLROnPlateau):
                one.step()

    def evaluated(self, measured: Mapping[str, float], followed: str) -> None:
        """Each is told the metric ``followed``, or that of its own attribute ``monitor``."""
        for one in self.following:
            one.step(measure_named(getattr(one, "monitor", followed), measured))

    def state_dict(self) -> dict[str, Any]:
        """Of one, its own; of several, theirs by their places."""
        if len(self.each) == 1:
            return self.each[0].state_dict()
        return {str(i): one.state_dict() for i, one in enumerate(self.each)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, one in enumerate(self.each):
            one.load_state_dict(state if len(self.each) == 1 else state[str(i)])


def made_optimizers(asked: Any, model: nn.Module) -> Optimizers:
    """What ``optimizer=``, of one phase, makes for ``model``."""
    made = _called(asked, model) if callable(asked) else asked
    listed = isinstance(made, list | tuple)
    each: list[Any] = [*made] if isinstance(made, list | tuple) else [made]
    mine = {id(p) for p in model.parameters()}
    for one in each or [made]:
        name = type(one).__name__
        if not hasattr(one, "param_groups"):
            raise JobError(f"optimizer= is a function that returned {what(one)}, not an optimizer")
        if not all(id(p) in mine for group in one.param_groups for p in group["params"]):
            raise JobError(
                "optimizer= holds parameters that are not the model's",
                "pass a function: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
                if not callable(asked)
                else "ranks, checkpoints and the result hold the model's alone: make them a part of the model, a loss "
                "with weights say, which step=lambda model, batch: model.loss(model(x), y) then calls",
            )
        if needs_closure(one) and len(each) > 1:
            raise JobError(
                f"{name} evaluates the loss several times a step, and cannot step together with another optimizer",
                'give it a phase of its own: step={"first": f, "then": g}',
            )
    return Optimizers(each, listed=listed)


def _called(asked: Callable, model: nn.Module) -> Any:
    """With the model where its argument is named so, or is used as one; else with the parameters."""
    if next(iter(_needed(asked)), None) == "model":
        return asked(model)
    parameters = list(model.parameters())
    try:
        return asked(parameters)
    except AttributeError as error:
        if error.obj is not parameters or not hasattr(model, error.name or ""):
            raise
    return asked(model)


def made_schedulers(asked: Any, optimizers: Optimizers, steps: int | None) -> Schedulers:
    """What ``scheduler=``, of one phase, makes for its optimizers."""
    if not isinstance(asked, list | tuple):
        return Schedulers(_schedulers(asked, optimizers.given, steps))
    if len(asked) != len(optimizers.each):
        raise JobError(
            f"scheduler= is a list of {len(asked)}, and there are {len(optimizers.each)} optimizers",
            "give one for each, or None, or a function of the optimizers",
        )
    both = zip(asked, optimizers.each, strict=True)
    return Schedulers([made for one, own in both if one is not None for made in _schedulers(one, own, steps)])


def _schedulers(asked: Callable, optimizer: Any, steps: int | None) -> list[Any]:
    needs = _needed(asked)
    if isinstance(asked, type) and len(needs) > 1:
        raise JobError(
            f"scheduler={asked.__name__} needs {', '.join(needs[1:])} too",
            f"scheduler=lambda optimizer: {asked.__name__}(optimizer, {needs[1]}=...)",
        )
    made = asked(optimizer, steps) if len(needs) > 1 else asked(optimizer)
    each = list(made) if isinstance(made, list | tuple) else [made]
    for one in each:
        if isinstance(one, type) or not hasattr(one, "step") or not hasattr(one, "state_dict"):
            raise JobError(f"scheduler= is a function that returned {what(one)}, not a scheduler")
    return each


def _needed(function: Callable) -> list[str]:
    """Names of the required arguments."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["params"]
    return [p.name for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def what(value: Any) -> str:
    return "None" if value is None else f"something of type {type(value).__name__}"
