"""What the loss of each phase is a mean over: found by trying it on a few samples, the same on all ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn

from meshfit.axes.expert.balance import is_apart
from meshfit.comm.first import from_first_rank
from meshfit.comm.objects import broadcast_object
from meshfit.data.loader import Loader
from meshfit.errors import JobError, PlanError
from meshfit.loss import batch_loss
from meshfit.loss.logged import value_names
from meshfit.loss.objective import LossDenominator, Objective
from meshfit.loss.probe import find_denominator

if TYPE_CHECKING:
    from meshfit.run.run import Run

Tried = Callable[[], nn.Module]
"""The model with values, to try a loss on."""

Inside = Callable[[], AbstractContextManager[None]]
"""Goes around a forward of a model that is laid out; one that is not is still whole, and may be in host memory."""


def find_denominators(run: "Run", tried: Tried, inside: Inside | None = None) -> list[LossDenominator]:
    """Of each phase; and of evaluations, where they have a loss of their own."""
    found = [_agreed(run, phase.objective, run.loader, tried, inside) for phase in run.job.phases]
    if run.valid is None:
        return found
    if run.job.valid_step is not None:
        found.append(_agreed(run, run.job.valid_objective, run.valid, tried, inside))
    elif len(found) > 1:
        found.append(_agreed(run, run.job.objective, run.loader, tried, inside))
    step_alone = run.job.valid_objective.step is not None and found[-1].outputs is False
    if run.job.metrics and run.plan.partitions_modules and step_alone:
        step = "step=" if run.job.valid_step is None else "valid_step="
        raise PlanError(
            f"{run.plan}: metrics= are of outputs that {step} does not return",
            "elsewhere the model is called once more for them; pipeline= and branch= run a recording of the step",
            f"let {step} return (loss, {{}}, outputs)",
            f"{run.plan.without('pipeline', 'branch')} works as it is",
        )
    return found


def _agreed(run: "Run", objective: Objective, loader: Loader, tried: Tried, inside: Inside | None) -> LossDenominator:
    """Of one loss; not asked where the whole batch always goes through at once."""
    if not _asked(run) and (run.alone or not objective.may_log):
        return LossDenominator(kind="samples")
    found = lambda: _found(run, objective, loader, tried, inside)
    python = run.python_state()
    try:
        if run.deferred is not None and inside is None:  # the first rank alone has values
            over = from_first_rank(found, run.mesh.world)
        else:
            over = found()
    except Exception:
        if run.splits:
            raise
        return LossDenominator(kind="samples")  # whole batches: training will say what is wrong
    finally:
        python.restore()
    if run.splits:
        batch_loss.check(run.plan, over, objective)
    if over.writes and (run.plan.server or run.plan.microbatches > 1):
        raise PlanError(
            f"{run.plan}: the forward writes {over.writes}, a weight that is trained",
            "servers would not see it"
            if run.plan.server
            else "it would once for every microbatch, and not once a step",
            "a register_step_post_hook of the optimizer, or torch.nn.utils.parametrize, does so under every plan",
            "data= with one microbatch takes it as it is",
        )
    if over.counters and run.plan.partitions_modules:
        raise PlanError(
            f"{run.plan}: each call of the loss changes {over.counters[0]}, a number that is kept in Python",
            "pipeline= and branch= run a recording of the step, in which it stays what it was",
            f"{run.plan.without('pipeline', 'branch')} works",
            "so does a buffer of the model (register_buffer) that counts",
        )
    if run.mesh.world is not None:
        said = broadcast_object(over.kind)
        if said != over.kind:  # else they would wait for each other in vain
            raise JobError(
                f"ranks do not agree what the loss is a mean over: {said} on the first, {over.kind} here",
                "is it the same function of the same numbers on each? (sum, count) as its result says what it is",
            )
    return over


def _asked(run: "Run") -> bool:
    """Whether a loss must be averaged with others: of parts of a batch, or of batches of an evaluation."""
    return run.splits or run.valid is not None


def _found(run: "Run", objective: Objective, loader: Loader, tried: Tried, inside: Inside | None) -> LossDenominator:
    few, model, device = loader.source.few(), tried(), run.world.device
    if not _asked(run):
        on = device if inside is not None else next(model.parameters()).device
        names = value_names(objective, model, few, on, inside)
        return LossDenominator(kind="samples", logged=tuple((name, "loss") for name in names))
    return find_denominator(
        objective,
        model,
        few,
        device,
        inside,
        auxiliary=is_apart(run.plan),
        precision=run.precision,
        microbatch=run.loader.batch_size // run.plan.shares // run.plan.microbatches,
    )
