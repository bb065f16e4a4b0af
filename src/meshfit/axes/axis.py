"""The interface of an axis: one word of the plan, four verbs.

    refuse   models and plans that cannot be exact along this axis, before any process starts
    find     what it acts on in this model: once, on one rank, as plain data that is sent to the others
    apply    lay the model out along it, in place, on every rank
    cost     what a rank then runs and holds, and which collectives it calls

``ORDER`` (order.py) lists the axes from the outside in. ``find``, ``place`` and ``cost`` are loops over it.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.anatomy.record import Recording
    from meshfit.axes.find import Study
    from meshfit.axes.pipeline.stages import Inner
    from meshfit.axes.place import Placed
    from meshfit.axes.tensor.region import Cut
    from meshfit.plan_cost import Costing


class Splits(Enum):
    """What is split over the ranks of an axis. It decides which axes can be combined."""

    SAMPLES = "samples of the batch"
    SEQUENCE = "positions of every sequence"
    MODULES = "modules"
    OPERATIONS = "operations, by their channels"
    EXPERTS = "experts"
    PARAMETERS = "parameters at rest"


SUMMED = frozenset({Splits.SAMPLES, Splits.SEQUENCE})
"""Ranks that differ in these compute terms of the same gradients."""


class Axis:
    """One axis of the mesh, or another word of the plan that changes the layout of a model."""

    word: ClassVar[str]
    """In the plan, and of the folder."""
    splits: ClassVar[frozenset[Splits]] = frozenset()
    cost_needs_finding: ClassVar[bool] = False

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        """Whether the plan uses it, for this model, on devices of this type."""
        return getattr(plan, self.word) > 1

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        """Raise ``PlanError`` for what cannot be exact, with a plan that works."""

    def find(self, study: "Study") -> Any:
        """What it acts on in the model, which is left as it is. Plain data."""

    def closed(self, finding: Any) -> Iterable[str]:
        """Paths of modules at whose calls it acts: nothing may be cut inside them."""
        return ()

    def deal(self, plan: Plan, recording: "Recording") -> "Inner":
        """Which of its ranks runs which part of a recorded step that is cut into the stages of a pipeline."""
        raise NotImplementedError

    def prove(self, study: "Study", step: Callable[[nn.Module, Any], Tensor], finding: Any) -> None:
        """Prove it exact for another form of the step than it was found with, as another axis replays it."""

    def apply(self, placed: "Placed", finding: Any) -> "Applied | None":
        """Lay ``placed.model`` out, in place."""

    def cost(self, costing: "Costing", finding: Any) -> None:
        """Turn ``costing.trace`` into that of one rank, and add its cost."""


class Applied:
    """What an axis did to the model on this rank; by default, nothing to its parameters."""

    model: nn.Module
    """What this rank holds of it."""
    group: dist.ProcessGroup | None = None
    """The ranks of the axis."""
    rank: int = 0
    """Of this process among them."""
    spreads: bool = False
    """Whether no rank of the axis sees the gradients of the whole model."""
    meets: bool = False
    """Whether its ranks communicate in every forward, also those without a sample."""
    cuts: "Mapping[Tensor, Cut]" = MappingProxyType({})
    """Parameters and buffers of which this rank holds a part, and which part."""
    partial: tuple[str, ...] = ()
    """Parameters of the whole model of whose gradient several ranks of the axis hold a term."""

    @property
    def degree(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def is_cut(self, tensor: Tensor) -> bool:
        return tensor in self.cuts

    def weight(self, parameter: Tensor) -> float:
        """How much this rank's part counts in a sum over the axis in which every element counts once."""
        return 1 / self.degree

    def after_backward(self) -> None:
        """After the last backward of a step, before gradients are read: sum those of which several ranks of the axis
        hold a term; tell what was seen in the step."""

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """``tensor`` (the parameter, its gradient, a moment) put together from all ranks, which call it together."""
        return tensor

    def part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """This rank's part of a whole ``tensor`` that goes with ``parameter``."""
        return tensor

    def inside(self) -> AbstractContextManager[None]:
        """Entered around every forward and backward of the model."""
        return nullcontext()

    def during(self) -> AbstractContextManager[None]:
        """Entered around all forwards and backwards of a batch."""
        return nullcontext()

    def changed(self) -> None:
        """Weights were changed by other means than a step."""

    def undo(self) -> None:
        """Leave the model whole, with its own forwards. All ranks call it together."""
        self.close()

    def close(self) -> None:
        """Let go of what it made beside the model, whose parameters stay as they are. All ranks call it together."""
