"""The stages that one rank holds."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from meshfit.anatomy.copies import twin
from meshfit.anatomy.record import Recording
from meshfit.axes import bf16_compute
from meshfit.axes.partition import Partition
from meshfit.axes.pipeline.cut import hollow, part_of
from meshfit.axes.pipeline.program import Programs, StageProgram
from meshfit.axes.pipeline.stages import FoundStages, Pipeline
from meshfit.axes.shard.units import Whole
from meshfit.comm.transport import Transport
from meshfit.errors import PlanError
from meshfit.schedule.actions import rank_of
from meshfit.torch_private.modules import own_buffers


class Staged(Partition):
    """The stages of one rank."""

    transport: Transport
    """To the ranks of other stages."""

    def __init__(
        self, pipeline: Pipeline, found: FoundStages, rank: int, part: nn.Module, skeleton: nn.Module, whole: nn.Module
    ):
        super().__init__(part, skeleton, whole)
        self.pipeline, self.found, self.rank = pipeline, found, rank
        self.make: Callable[[Recording], StageProgram] = partial(StageProgram.like, found.split)
        """A program of a recording."""
        self.stages = pipeline.stages_of(rank)
        self.recording: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around whatever records the model."""

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        model: nn.Module,
        found: FoundStages,
        rank: int,
        group: dist.ProcessGroup | None = None,
        *,
        drop: bool = True,
    ) -> "Staged":
        """Keep the part of ``model`` that is ``rank``'s. With ``drop`` the rest of it is let go at once: those
        parameters have no elements any more."""
        split, own = found.split, pipeline.stages_of(rank)
        if split.stages != pipeline.stages:
            raise PlanError(f"the split has {split.stages} stages, the plan {pipeline.stages}")
        skeleton = twin(model, meta=True)
        for name in split.looked_at:  # what the model decides by must have its value there, too
            path, _, attribute = name.rpartition(".")
            own_buffers(skeleton.get_submodule(path))[attribute] = model.get_buffer(name)
        parameters = {name for stage in own for name in split.parameters[stage]}
        buffers = {name for stage in own for name in split.buffers[stage]}
        part = part_of(model, parameters, buffers)
        if drop:
            hollow(model, part)
        staged = cls(pipeline, found, rank, part, skeleton, model)
        staged.group = group
        return staged

    @property
    def last(self) -> bool:
        """Whether the loss is computed here."""
        return self.pipeline.stages - 1 in self.stages

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several ranks hold, by name, with those ranks: the first is the owner. In the same order
        on every rank. Where one rank holds them in two stages they are one tensor there."""
        trained = {name for names in self.found.split.parameters for name in names}
        return {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1 and name in trained}

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Of a buffer that a stage writes, there is but one."""
        found: dict[str, list[int]] = {}
        split = self.found.split
        for stage, names in enumerate(zip(split.parameters, split.buffers, strict=True)):
            rank = rank_of(self.pipeline.word, self.pipeline.degree, stage)
            for name in (*names[0], *names[1]):
                if rank not in found.setdefault(name, []):
                    found[name].append(rank)
        return {name: tuple(ranks) for name, ranks in found.items()}

    def programs(self, objective: Callable[[nn.Module, Any], Any]) -> Programs[StageProgram]:
        """What the stages run for ``objective(model, content)``: a training loss, or a prediction."""
        found, skeleton = self.found, self.skeleton
        skeleton = bf16_compute.as_computed(skeleton) if found.computes else skeleton
        how = {"share": found.share, "atoms": found.atoms, "recording": self.recording}
        return Programs(skeleton, objective, self.make, **how)

    def root(self, objective: Callable[[nn.Module, Any], Any]) -> nn.Module:
        return Whole(self.model, objective)

    def close(self) -> None:
        self.transport.close()
