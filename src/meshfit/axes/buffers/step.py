"""Buffers that a forward writes, in training: each step updates them once, from the whole batch.

with buffers.forward(microbatch, samples):     a forward; it starts from the values of the step's beginning
    ...
buffers.combine()                              after the last forward: over microbatches and ranks
buffers.commit()                               the step is taken; or drop()
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.buffers.find import BufferWriter, Written
from meshfit.axes.buffers.totals import Totals
from meshfit.axes.buffers.trace import Collect, Differs, look_away
from meshfit.axes.buffers.watch import named_state
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.forward import wrap
from meshfit.comm.group import Group
from meshfit.errors import JobError
from meshfit.torch_private.kernels import foreach_add, foreach_copy_
from meshfit.torch_private.modules import own_buffers, own_parameters


@dataclass(eq=False, slots=True)
class _Buffer:
    """A buffer, or a parameter that is not trained."""

    name: str
    module: nn.Module
    own: str
    tensor: Tensor
    """What is in its place between forwards, with the values of the step's beginning."""

    start: Tensor
    """Those values; of a buffer the same object."""

    @property
    def now(self) -> Tensor:
        found = own_parameters(self.module).get(self.own, own_buffers(self.module).get(self.own))
        assert found is not None
        return found

    @property
    def is_parameter(self) -> bool:
        return self.own in own_parameters(self.module)

    def begin(self) -> None:
        """A step begins."""
        self.tensor = self.start = self.now
        if self.is_parameter:
            self.start = self.tensor.detach().clone()

    def enter(self, values: Tensor | None) -> None:
        """A forward begins, with ``values`` or those of the step's beginning. It has a buffer to itself: what autograd
        keeps of it is not changed by the next. A parameter is known to others as an object, and stays it."""
        if self.is_parameter:
            self.tensor.data.copy_(self.start if values is None else values)
        else:
            own_buffers(self.module)[self.own] = self.start.detach().clone() if values is None else values

    def leave(self) -> Tensor:
        """What the forward has made of it."""
        made = self.now
        if self.is_parameter:
            made = made.detach().clone()
            own_parameters(self.module)[self.own] = self.tensor  # type: ignore[assignment]
            self.tensor.data.copy_(self.start)
        else:
            own_buffers(self.module)[self.own] = self.tensor
        return made


class Buffers:
    """Of one rank's part of a model; ``group``: the ranks that share a batch. ``kept`` ones need no care where a batch
    goes through in one microbatch."""

    def __init__(
        self,
        model: nn.Module | None = None,
        written: Written | None = None,
        group: Group | None = None,
        *,
        microbatches: int = 1,
    ):
        model, written = nn.Module() if model is None else model, written or Written()
        self.model = model
        named = named_state(model)
        self.group = group
        self.writers = [w for w in written.writers if all(name in named for name in w.states)]
        wanted = [*(written.kept if microbatches > 1 else ()), *(n for w in self.writers for n in w.states)]
        self.states: list[_Buffer] = []
        for name in wanted:
            if name in named:
                path, _, own = name.rpartition(".")
                self.states.append(_Buffer(name, model.get_submodule(path), own, named[name], named[name]))
        self._carried: dict[int, dict[str, Tensor]] = {}
        """By microbatch: buffers as its forwards have left them."""
        self._totals: dict[str, Totals] = {}
        self._samples: int | None = None
        """Of the microbatch in whose forward we are."""
        self._made: dict[str, Tensor] = {}
        self._begun = False
        for writer in self.writers:
            module = model.get_submodule(writer.path)
            wrap(module, lambda forward, module=module, w=writer: self._collected(forward, module, w))

    def __bool__(self) -> bool:
        return bool(self.states)

    @contextmanager
    def forward(self, microbatch: int, samples: int | None) -> Iterator[None]:
        """A forward of a microbatch; with ``samples=0`` it adds nothing, with None it is one that does not count."""
        if not self.states:
            yield
            return
        if not self._begun:
            self._begun = True
            for state in self.states:
                state.begin()
        carried = self._carried.get(microbatch, {})
        for state in self.states:
            state.enter(carried.get(state.name))
        self._samples = samples
        try:
            yield
        finally:
            self._samples = None
            self._carried[microbatch] = {state.name: state.leave() for state in self.states}

    def _collected(self, forward: Callable[..., Any], module: nn.Module, writer: BufferWriter) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._samples is None or not module.training:
                return forward(*args, **kwargs)
            mine = [state for state in self.states if state.name in writer.states]
            with Collect(writer.updates, {state.name: state.now for state in mine}).watching() as collect:
                result = forward(*args, **kwargs)
            try:
                done = collect.done({state.name: state.now for state in mine})
            except Differs:
                raise _differs(writer) from None
            totals = self._totals.setdefault(writer.path, Totals(done))
            totals.add(done, self._samples)
            return result

        return torch.compiler.disable(run)

    def combine(self) -> None:
        """After the step's last forward; all ranks of the group call it together."""
        if not self.states:
            return
        first = self._carried.get(min(self._carried), {}) if self._carried else {}
        self._made = {name: tensor.detach() for name, tensor in first.items()}
        for writer in self.writers:
            totals = self._totals.pop(writer.path, None)
            if totals is None:
                raise JobError(
                    f"{writer.path or 'the model'}, which updates {', '.join(writer.states)}, was not called in a step",
                    "buffers=local in the plan lets every rank keep its own",
                )
            if self.group is not None:
                totals.over(self.group)
            mine = [state for state in self.states if state.name in writer.states]
            try:
                self._made |= totals.made({state.name: state.start.detach().clone() for state in mine})
            except Differs:
                raise _differs(writer) from None
        self._carried.clear()

    @torch.no_grad()
    def commit(self) -> None:
        """Have the buffers as the step leaves them."""
        for state in self.states:
            if state.name in self._made:
                state.tensor.data.copy_(self._made[state.name])
        self.drop()

    def drop(self) -> None:
        """The step is not taken: they stay as they were."""
        self._made, self._totals, self._begun = {}, {}, False
        self._carried.clear()


def _differs(writer: BufferWriter) -> JobError:
    return JobError(
        f"{writer.path or 'the model'} updates {', '.join(writer.states)} in another way than when tried",
        "what it does depends on the samples, on their shapes, on how many there are, or on the steps taken",
        "if by how many samples there are (a last batch of few?), another batch_size= may do",
        "buffers=local in the plan lets every rank keep its own",
    )


def look_away_from(buffers: Buffers) -> None:
    """Call when all else that acts inside modules is put around them: what it does is not the writers' doing."""
    paths = dict(buffers.model.named_modules())
    for path in {path for writer in buffers.writers for path in writer.opaque}:
        if path in paths:
            wrap(paths[path], look_away)


class Statistics:
    """Running statistics, and other buffers that a forward writes, as they were before a step, for a step that is then
    not taken."""

    def __init__(self, model: nn.Module, others: Collection[str] = ()):
        buffers = [buffer for norm in batch_norms(model) for buffer in norm.buffers()]
        buffers += [buffer for name, buffer in model.named_buffers() if name in others]
        kinds = {buffer.dtype for buffer in buffers}
        self._buffers = [[buffer for buffer in buffers if buffer.dtype is kind] for kind in kinds]

    def snapshot(self) -> list[list[Tensor]]:
        return [list(foreach_add(same, 0)) for same in self._buffers]

    def restore(self, snapshot: list[list[Tensor]]) -> None:
        for same, kept in zip(self._buffers, snapshot, strict=True):
            foreach_copy_(same, kept)
