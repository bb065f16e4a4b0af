"""What ``configure_optimizers`` returned, in its usual shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshfit.errors import JobError
from meshfit.lightning.attached import TrainerFacts, trainer_of


@dataclass(frozen=True)
class Configured:
    optimizers: list[Any]
    schedules: list[dict[str, Any]] = field(default_factory=list)
    """With scheduler, interval, frequency and monitor."""


class EverySteps:
    """A schedule that goes on once in so many steps."""

    def __init__(self, scheduler: Any, steps: int):
        self.scheduler, self.steps, self.count = scheduler, steps, 0

    def step(self) -> None:
        self.count += 1
        if self.count % self.steps == 0:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.scheduler.load_state_dict(state["scheduler"])


def configured(module: Any) -> Configured:
    """What the module asks for; called in each process that trains, with its copy of the module."""
    trainer = trainer_of(module)
    trainer.outside(0, 0, module)
    with trainer.calling(module, "configure_optimizers"):
        said = module.configure_optimizers()
    found = _read(said)
    if len(found.optimizers) > 1 and module.automatic_optimization:
        raise JobError(
            "configure_optimizers returned several optimizers",
            "with automatic optimization Lightning takes one; torch.optim has parameter groups",
            "meshfit.fit(optimizer=[...]) steps several together, or by phases",
        )
    return found


def optimizer_of(model: Any) -> Any:
    found = configured(model)
    (made,) = found.optimizers
    made.__dict__["_configured"] = _schedulers(found, trainer_of(model).facts)
    return made


def scheduler_of(optimizer: Any) -> Any:
    return optimizer.__dict__["_configured"]


def _read(said: Any) -> Configured:
    if isinstance(said, Optimizer):
        return Configured([said])
    if isinstance(said, Mapping):
        return _of_dicts([said])
    if isinstance(said, list | tuple) and said and all(isinstance(each, Mapping) for each in said):
        return _of_dicts(list(said))
    if isinstance(said, list | tuple) and len(said) == 2 and isinstance(said[0], list | tuple):
        optimizers, schedules = said
        listed = schedules if isinstance(schedules, list | tuple) else [schedules]
        return Configured(list(optimizers), [_schedule(each, None) for each in listed])
    if isinstance(said, list | tuple) and said and all(isinstance(each, Optimizer) for each in said):
        return Configured(list(said))
    raise JobError(
        f"configure_optimizers returned {type(said).__name__ if said is not None else None}",
        'an optimizer, ([optimizer], [scheduler]), or {"optimizer": ..., "lr_scheduler": ...}',
    )


def _of_dicts(said: list[Mapping[str, Any]]) -> Configured:
    schedules = [_schedule(each["lr_scheduler"], each.get("monitor")) for each in said if each.get("lr_scheduler")]
    return Configured([each["optimizer"] for each in said], schedules)


def _schedule(said: Any, monitor: str | None) -> dict[str, Any]:
    usual = {"interval": "epoch", "frequency": 1, "monitor": monitor, "strict": True, "name": None}
    given = {"scheduler": said} if not isinstance(said, Mapping) else dict(said)
    if unknown := [key for key in given if key not in (*usual, "scheduler", "reduce_on_plateau")]:
        raise JobError(f"the schedule of configure_optimizers has {unknown[0]!r}", f"it may have {', '.join(usual)}")
    return {**usual, **given}


def _schedulers(found: Configured, facts: TrainerFacts) -> list[Any]:
    made, steps = [], facts.steps_of_epoch
    for each in found.schedules:
        scheduler, every = each["scheduler"], each["frequency"]
        if isinstance(scheduler, ReduceLROnPlateau):
            if each["monitor"] is None:
                raise JobError("ReduceLROnPlateau has no monitor", '{"scheduler": ..., "monitor": "val_loss"}')
            if each["interval"] != "epoch" or every != 1:
                raise JobError(
                    f"ReduceLROnPlateau with interval={each['interval']!r}, frequency={every}",
                    "it is told of every evaluation: check_val_every_n_epoch= says how often there is one",
                )
            scheduler.__dict__["monitor"] = each["monitor"]
            made.append(scheduler)
            continue
        if each["interval"] == "epoch":
            if steps is None:
                raise JobError("a schedule by epochs, of data without a length", '"interval": "step"')
            every *= steps
        elif every != 1 and (steps is None or steps % every or facts.accumulate_grad_batches > 1):
            raise JobError(f"a schedule every {every} steps, and an epoch is no multiple of them", '"frequency": 1')
        made.append(scheduler if every == 1 else EverySteps(scheduler, every))
    return made
