"""What one rank runs of a microbatch: the trunk, its own branches, and the meetings with the other ranks."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.cuts import storage_of
from meshfit.anatomy.record_program import Step, decode
from meshfit.anatomy.replay import Environment, Recording, replay_steps
from meshfit.axes.branch.assign import Dealt, owners_like
from meshfit.axes.branch.flow import ALL, Flow, Phase, detached
from meshfit.axes.branch.ops import Layouts, Line, enter, join, tie
from meshfit.axes.pipeline.program import Recorded
from meshfit.comm.draws import Stream
from meshfit.events import current


@dataclass(frozen=True)
class Turn:
    """A phase, as one rank runs it."""

    trunk: list[Step]
    enters: list[tuple[int, bool]]
    """Values, and whether the rank's own work changes them in place."""
    keeps: list[int]
    """Of those, the ones that it reads as they are handed to it: not what it made itself."""
    own: list[Step]
    joins: list[list[tuple[int, bool]]]
    """By rank: values, and whether the trunk changes them in place."""
    drops: list[int]
    """Values of the trunk that nobody needs after this phase's enters."""


@dataclass(eq=False)
class Program(Recorded):
    """A recording, dealt out to ranks."""

    rank: int
    owner: list[int]
    phases: tuple[Phase, ...]
    layouts: dict[tuple[int, bool], Layouts] = field(default_factory=dict)
    """What is handed out after each phase, with gradients and without, once that is known."""

    @classmethod
    def like(cls, dealt: Dealt, rank: int, recording: Recording) -> "Program":
        flow = Flow(recording)
        owner = owners_like(dealt, flow)
        return cls(recording, rank, owner, flow.phases(owner, len(dealt.loads), late=dealt.late))

    def run(self, content: Any, root: nn.Module, line: Line, stream: Stream) -> Any:
        """What the objective returns. All ranks of the group call it together."""
        given = {id: t.clone() if id in self._changed_inputs else t for id, t in self.bind(content).items()}
        trunk, own = Environment(root, given, line.device), Environment(root, {}, line.device)
        token = torch.zeros((), device=line.device, requires_grad=torch.is_grad_enabled())
        for number, turn in enumerate(self.turns):
            replay_steps(turn.trunk, trunk)
            if not any(self.phases[number].own):
                continue
            ids = [id for id, _ in turn.enters]
            entering = [trunk.values[id].detach() if id in self._detached else trunk.values[id] for id in ids]
            token, values = enter(line, token, entering, [copy for _, copy in turn.enters])
            own.values.update((id, v) for id, v in zip(ids, values, strict=True) if id in turn.keeps)
            for id in turn.drops:
                trunk.values.pop(id, None)
            del entering, values
            with current().span("branch"):
                stream.own(self, line.device)
                replay_steps(turn.own, own)
                stream.common(self)
            with current().span("join"):
                token = self._join(number, turn, own, trunk, line, token)
        for id in set(self.recording.trace.outputs) & trunk.values.keys():
            if (value := trunk.values[id]).requires_grad and token.requires_grad:
                trunk.values[id] = tie(value, token)
        return decode(self.recording.outputs, trunk.resolve)

    def _join(self, number: int, turn: Turn, own: Environment, trunk: Environment, line: Line, token: Tensor) -> Tensor:
        mine = [own.values[id] for id, _ in turn.joins[self.rank]]
        key = number, torch.is_grad_enabled()
        if key not in self.layouts:
            self.layouts[key] = line.agree(mine)
        token, every = join(line, token, mine, self.layouts[key], [copy for some in turn.joins for _, copy in some])
        trunk.values.update(zip((id for some in turn.joins for id, _ in some), every, strict=True))
        return token

    @cached_property
    def _changed_inputs(self) -> set[int]:
        trace = self.recording.trace
        changed = {storage_of(trace, v) for event in trace.events for v in event.mutates}
        return {id for id in trace.inputs if storage_of(trace, id) in changed}

    @cached_property
    def _detached(self) -> set[int]:
        own = {event for event, rank in enumerate(self.owner) if rank != ALL}
        trace = self.recording.trace
        return {id for phase in self.phases for id in phase.enters if detached(trace, id, own)}

    @cached_property
    def turns(self) -> list[Turn]:
        trace, owner = self.recording.trace, self.owner
        changers: dict[int, set[int]] = {}
        for event in trace.events:
            for value in event.mutates:
                changers.setdefault(storage_of(trace, value), set()).add(owner[event.index])
        changed = lambda id, by_all: any((who == ALL) == by_all for who in changers.get(storage_of(trace, id), ()))
        of_trunk, of_own = self._last_uses()
        found = []
        for number, phase in enumerate(self.phases):
            mine = {id for event in phase.own[self.rank] for id in trace.events[event].writes}
            made = lambda id: (m := trace.values[id].made_by) >= 0 and owner[m] == self.rank
            found.append(
                Turn(
                    trunk=[self._step(event, of_trunk) for event in phase.trunk],
                    enters=[(id, changed(id, False)) for id in phase.enters],
                    keeps=[id for id in phase.enters if not made(id) and id not in mine and id in of_own],
                    own=[self._step(event, of_own) for event in phase.own[self.rank]],
                    joins=[[(id, changed(id, True)) for id in ids] for ids in phase.joins],
                    drops=[id for id in phase.enters if of_trunk.get(id) == ("enter", number)],
                )
            )
        return found

    def _step(self, event: int, last: dict[int, tuple[str, int]]) -> Step:
        """A step that frees what is not used after it in the order of this rank."""
        step = self.recording.steps[event]
        ids = dict.fromkeys((*step.outs, *(id for _, id in step.attributes), *step.reads))
        return replace(step, frees=tuple(id for id in ids if last.get(id) == ("step", event)))

    def _last_uses(self) -> tuple[dict[int, tuple[str, int]], dict[int, tuple[str, int]]]:
        """Where each value of the trunk, and of this rank's own work, is used last, or made if never used."""
        trunk: dict[int, tuple[str, int]] = {}
        own: dict[int, tuple[str, int]] = {}
        for number, phase in enumerate(self.phases):
            for events, last in ((phase.trunk, trunk), (phase.own[self.rank], own)):
                for event in events:
                    step = self.recording.steps[event]
                    for id in (*step.outs, *(id for _, id in step.attributes), *step.reads):
                        last[id] = ("step", event)
                if last is trunk:
                    trunk.update((id, ("enter", number)) for id in phase.enters)
            own.update((id, ("join", number)) for id in phase.joins[self.rank])
        trunk.update((id, ("end", 0)) for id in self.recording.trace.outputs)
        return trunk, own
