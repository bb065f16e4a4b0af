"""What one rank runs of a microbatch: the trunk, its own branches, and the meetings with the other ranks."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from meshfit.anatomy.cuts import storage_of
from meshfit.anatomy.record_program import Instruction, decode
from meshfit.anatomy.replay import Environment, Recording, replay_steps, run
from meshfit.axes.branch.assign import Dealt, owners_like
from meshfit.axes.branch.flow import ALL, Flow, Phase, detached
from meshfit.axes.branch.ops import Layouts, Line, enter, join, tie
from meshfit.axes.branch.order import reordered, side_by_side
from meshfit.axes.pipeline import program as pipeline
from meshfit.axes.pipeline.cut import Split, stages_like
from meshfit.axes.pipeline.program import Ran
from meshfit.comm.draws import Stream
from meshfit.events import current


@dataclass(frozen=True)
class RankPhase:
    """A phase, as one rank runs it."""

    trunk: list[Instruction]
    enters: list[tuple[int, bool]]
    """Values, and whether the rank's own work changes them in place."""
    keeps: list[int]
    """Of those, the ones that it reads as they are handed to it: not what it made itself."""
    own: list[Instruction]
    joins: list[list[tuple[int, bool]]]
    """By rank: values, and whether the trunk changes them in place."""
    drops: list[int]
    """Values of the trunk that nobody needs after this phase's enters."""


@dataclass(eq=False)
class BranchProgram(pipeline.StageProgram):
    """A recording, dealt out to the ranks of a branch group, in each stage of a pipeline or in one."""

    line: Line = field(kw_only=True)
    stream: Stream = field(kw_only=True)
    owner: list[int] = field(kw_only=True)
    phases: tuple[tuple[Phase, ...], ...] = field(kw_only=True)
    """By stage."""
    held: tuple[dict[int, int], ...] = field(kw_only=True)
    """By stage: of what it is handed, what one rank alone has, and that rank."""
    joined: dict[tuple[int, int, bool], Layouts] = field(default_factory=dict)
    """What is handed out in each stage, after each phase, with gradients and without, once that is known."""

    @classmethod
    def dealt(cls, dealt: Dealt, split: Split | None, line: Line, stream: Stream, recording: Recording) -> Self:
        """``recording`` dealt out like ``dealt``, and cut as ``split`` is."""
        flow = Flow(recording)
        owner = owners_like(dealt, flow)
        if split is not None:
            order = side_by_side(flow, dealt.when)
            flow, owner = Flow(reordered(recording, order)), [owner[event] for event in order]
        stages = flow.whole if split is None else stages_like(split, flow.trace)
        found = flow.phases(owner, len(dealt.loads), stages, late=dealt.late)
        return cls(flow.recording, stages, line=line, stream=stream, owner=owner, phases=found.phases, held=found.held)

    @property
    def rank(self) -> int:
        return self.line.ranks.rank

    def crossing(self, stage: int) -> tuple[int, ...]:
        """Values that this rank hands on after ``stage``: to the same rank of the next."""
        held = self.held[stage + 1]
        return tuple(id for id in super().crossing(stage) if held.get(id, self.rank) == self.rank)

    def _run(
        self, stage: int, root: nn.Module, given: dict[int, Tensor], received: list[Tensor], device: torch.device
    ) -> Ran:
        """All ranks of the group call it together. The result is on all of them."""
        line, fed = self.line, self.fed(stage, given, received)
        alone = {id for id in fed if self.held[stage].get(id) == self.rank}
        trunk = Environment(root, {id: t for id, t in fed.items() if id not in alone}, device)
        own = Environment(root, {id: fed[id] for id in alone}, device)
        token = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        run([self.recording.steps[i] for i in self.stages.recomputed[stage]], trunk)
        turns, detached = self._turns[stage]
        for number, turn in enumerate(turns):
            replay_steps(turn.trunk, trunk)
            if not any(self.phases[stage][number].own) and not any(turn.joins):
                continue
            ids = [id for id, _ in turn.enters]
            entering = [trunk.values[id].detach() if id in detached else trunk.values[id] for id in ids]
            token, values = enter(line, token, entering, [copy for _, copy in turn.enters])
            own.values.update((id, v) for id, v in zip(ids, values, strict=True) if id in turn.keeps)
            for id in turn.drops:
                trunk.values.pop(id, None)
            del entering, values
            with current().span("branch"):
                self.stream.own(self, device)
                replay_steps(turn.own, own)
                self.stream.common(self)
            with current().span("join"):
                token = self._join(stage, number, turn, own, trunk, token)
        if stage < len(self.stages.ranges) - 1:
            held = self.held[stage + 1]
            made = [(own if id in held else trunk).values[id] for id in self.crossing(stage)]
            return Ran(made, roots=[token] if token.grad_fn is not None else [])
        for id in set(self.recording.trace.outputs) & trunk.values.keys():
            if (value := trunk.values[id]).requires_grad and token.requires_grad:
                trunk.values[id] = tie(line, value, token)
        return Ran([], decode(self.recording.outputs, trunk.resolve))

    def _join(
        self, stage: int, number: int, turn: RankPhase, own: Environment, trunk: Environment, token: Tensor
    ) -> Tensor:
        mine = [own.values[id] for id, _ in turn.joins[self.rank]]
        key = stage, number, torch.is_grad_enabled()
        if key not in self.joined:
            self.joined[key] = self.line.agree(mine)
        copies = [copy for some in turn.joins for _, copy in some]
        token, every = join(self.line, token, mine, self.joined[key], copies)
        trunk.values.update(zip((id for some in turn.joins for id, _ in some), every, strict=True))
        return token

    @cached_property
    def _turns(self) -> list[tuple[list[RankPhase], set[int]]]:
        """By stage: what this rank does, and the values that enter but are only detached there."""
        trace, owner, found = self.recording.trace, self.owner, []
        changers: dict[int, set[int]] = {}
        for event in trace.events:
            for value in event.mutates:
                changers.setdefault(storage_of(trace, value), set()).add(owner[event.index])
        changed = lambda id, by_all: any((who == ALL) == by_all for who in changers.get(storage_of(trace, id), ()))
        for stage, phases in enumerate(self.phases):
            of_trunk, of_own = self._last_uses(stage)
            turns, events, held = [], self.stages.ranges[stage], self.held[stage]
            makers = {id: trace.values[id].made_by for phase in phases for id in phase.enters}
            mine = {id for id, m in makers.items() if (owner[m] if m in events else held.get(id, ALL)) == self.rank}
            for number, phase in enumerate(phases):
                turns.append(
                    RankPhase(
                        trunk=[self._step(event, of_trunk) for event in phase.trunk],
                        enters=[(id, changed(id, False)) for id in phase.enters],
                        keeps=[id for id in phase.enters if id in of_own and id not in mine],
                        own=[self._step(event, of_own) for event in phase.own[self.rank]],
                        joins=[[(id, changed(id, True)) for id in ids] for ids in phase.joins],
                        drops=[id for id in phase.enters if of_trunk.get(id) == ("enter", number)],
                    )
                )
            own = {event for event in events if owner[event] != ALL}
            found.append((turns, {id for phase in phases for id in phase.enters if detached(trace, id, own)}))
        return found

    def _step(self, event: int, last: dict[int, tuple[str, int]]) -> Instruction:
        """A step that frees what is not used after it in the order of this rank."""
        step = self.recording.steps[event]
        ids = dict.fromkeys((*step.outs, *(id for _, id in step.attributes), *step.reads))
        return replace(step, frees=tuple(id for id in ids if last.get(id) == ("step", event)))

    def _last_uses(self, stage: int) -> tuple[dict[int, tuple[str, int]], dict[int, tuple[str, int]]]:
        """Where each value of the trunk, and of this rank's own work, is used last, or made if never used."""
        trunk: dict[int, tuple[str, int]] = {}
        own: dict[int, tuple[str, int]] = {}
        for number, phase in enumerate(self.phases[stage]):
            for events, last in ((phase.trunk, trunk), (phase.own[self.rank], own)):
                for event in events:
                    step = self.recording.steps[event]
                    for id in (*step.outs, *(id for _, id in step.attributes), *step.reads):
                        last[id] = ("step", event)
                if last is trunk:
                    trunk.update((id, ("enter", number)) for id in phase.enters)
            own.update((id, ("join", number)) for id in phase.joins[self.rank])
        final = stage == len(self.stages.ranges) - 1
        for id in self.recording.trace.outputs if final else self.crossing(stage):
            trunk[id] = own[id] = ("end", 0)
        return trunk, own
