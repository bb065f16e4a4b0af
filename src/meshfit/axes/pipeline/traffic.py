"""What stages of a pipeline send, and the collectives of other axes inside them: counted on one microbatch.

The model is laid out over groups that count instead of talking (shapes are right, numbers are not), and goes through
all stages forward, then backward, as the ranks of a pipeline would run it.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import study
from meshfit.anatomy.trace import Trace
from meshfit.axes import bf16_compute
from meshfit.axes.counted import listed
from meshfit.axes.pipeline.program import Programs, StageProgram
from meshfit.axes.pipeline.stages import FoundStages
from meshfit.axes.shard.units import Whole
from meshfit.comm.group import CountingGroup, Traffic
from meshfit.comm.transport import Layout, packed_size
from meshfit.cost import Cost, tallied
from meshfit.data import tree

Layer = Callable[[nn.Module], AbstractContextManager[Mapping[str, CountingGroup]]]
"""Lays a model out as on one rank, in place, over groups by axis."""


@dataclass(frozen=True)
class StageTraffic:
    """Of one microbatch, on one rank of the axes inside the stages."""

    crossing: tuple[tuple[Layout, ...], ...]
    """By stage: what it hands on."""

    collectives: tuple[tuple[tuple[str, Traffic], ...], ...]
    """By stage, forward and backward, each with its axis."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    """Of those axes."""

    def sent(self, stage: int, to: int) -> int:
        """Bytes from a stage to the one after it, or of gradients to the one before it."""
        if to > stage:
            return packed_size(self.crossing[stage])
        return packed_size(layout for layout in self.crossing[to] if layout.needs_grad)

    def cost(self, stages: Iterable[int], trace: Trace, *, microbatches: int) -> Cost:
        """Of the collectives of some stages of ``trace``."""
        found = (each for stage in stages for each in self.collectives[stage])
        return Cost(
            collectives=tallied(listed(each, trace, microbatches, axis, self.degrees[axis]) for axis, each in found)
        )


def count(
    found: FoundStages, model: nn.Module, objective: Callable[[nn.Module, Any], Any], content: Any, layer: Layer
) -> StageTraffic:
    """``model`` stays as it is; it is cut as ``found`` says."""
    twin = bf16_compute.as_computed(study(model)) if found.computes else study(model)
    cut = partial(StageProgram.like, found.split)
    program = Programs(twin, objective, cut, share=found.share, atoms=found.atoms).record(content, training=True)
    root, given, cpu = Whole(twin, objective), program.bind(tree.map_tensors(Tensor.cpu, content)), torch.device("cpu")
    collectives: list[list[tuple[str, Traffic]]] = [[] for _ in program.stages.ranges]
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    made: list[Tensor] = []
    result: Any = None
    with torch.random.fork_rng([]), torch.enable_grad(), layer(twin) as groups:

        def note(stage: int) -> None:
            for axis, group in groups.items():
                collectives[stage] += [(axis, each) for each in group.log]
                group.log.clear()

        for stage in range(len(program.stages.ranges)):
            needs = [layout.needs_grad for layout in program.layouts[stage - 1]] if stage else []
            fed = [t.detach().requires_grad_(need) for t, need in zip(made, needs, strict=True)]
            ran = program.run(stage, root, given, fed, cpu, groups)
            made, result = ran.made, ran.result
            kept.append((fed, made))
            note(stage)
        gradients: list[Tensor] = []
        loss = result[0] if isinstance(result, tuple | list) else result
        for stage, (fed, made) in reversed(list(enumerate(kept))):
            wanting = [t for t in made if t.requires_grad] if gradients else [loss]
            torch.autograd.backward(wanting, gradients or [torch.ones_like(loss)])
            gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in fed if t.requires_grad]
            note(stage)
    crossing = tuple(program.layouts[stage] for stage in range(len(kept)))
    return StageTraffic(crossing, tuple(map(tuple, collectives)), {axis: group.size for axis, group in groups.items()})
