"""What ``fit`` returns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from meshfit.plan import Plan
from meshfit.step import Step

if TYPE_CHECKING:
    from meshfit.drive import Training


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished training."""

    model: nn.Module = field(repr=False)
    """The caller's model (or the one its function built), with the trained weights, where it was."""

    history: list[Step] = field(repr=False)
    """Every step, in order."""

    metrics: dict[str, float]
    """Of the last evaluation; the last step's loss where there was none."""

    best: dict[str, float] | None
    """Of the evaluation whose weights were kept, with ``best=``."""

    plan: Plan
    batch_size: int
    steps: int
    seconds: float
    phases: list[dict[str, float]] = field(repr=False)
    """By rank: seconds in data, forward_backward, exchange, update, evaluate."""

    notes: list[str] = field(repr=False)
    folder: Path | None = None

    @classmethod
    def of(cls, training: "Training", history: list[Step]) -> "Result":
        outcome, job = training.outcome, training.job
        assert outcome is not None
        evaluations = [step.valid for step in history if step.valid]
        metrics = evaluations[-1] if evaluations else {"loss": history[-1].loss} if history else {}
        best = None
        if job.best and evaluations:
            name, sign = job.best.lstrip("-"), -1 if job.best.startswith("-") else 1
            known = [measured for measured in evaluations if measured[name] == measured[name]]  # NaN is never best
            best = max(known or evaluations, key=lambda measured: sign * measured[name])
        return cls(
            model=training.model,
            history=history,
            metrics=metrics,
            best=best,
            plan=job.plan,  # type: ignore[arg-type]
            batch_size=job.batch_size,  # type: ignore[arg-type]
            steps=len(history),
            seconds=outcome.seconds,
            phases=outcome.phases,
            notes=[*training.said, *outcome.notes],
            folder=training.folder,
        )
