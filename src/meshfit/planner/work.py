"""One step of a training, as lists of what devices compute and say: what the cost model takes.

A description of a model fills it (``transformer.py``), as can a trace with the costs of the axes.
"""

from dataclasses import dataclass

from meshfit.anatomy.operations import Operation
from meshfit.planner.collectives import CollectiveCall


@dataclass(frozen=True)
class StageWork:
    """One stage's work on one microbatch."""

    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()
    again: tuple[Operation, ...] = ()
    """Of the forward, computed again in backward."""

    weights: float = 0.5
    """Share of backward that the gradients of weights take: what schedules that split backward put off."""

    calls: tuple[CollectiveCall, ...] = ()
    """Collectives of the microbatch, with their phase; those of ``again`` are in backward."""


@dataclass(frozen=True)
class StepWork:
    """What the ranks of one pipeline do in a step; of ranks that do the same, one."""

    stages: tuple[StageWork, ...]
    microbatches: int = 1
    schedule: str = "1f1b"
    ranks: int = 1
    """Of the pipeline. ``stages`` holds as many as there are chunks on all of them."""

    sent: float = 0.0
    """Bytes from a stage to the next, and of the gradient back."""

    stride: int = 1
    """Ranks from a stage to the next."""

    calls: tuple[CollectiveCall, ...] = ()
    """Collectives of the step: gradients, gathered weights."""

    update: tuple[Operation, ...] = ()
    """The optimizer's, on the rank that has most."""

    tokens: float = 0.0
    samples: float = 0.0
    model_flops: float = 0.0
    """Of all devices together, without what is computed again."""
