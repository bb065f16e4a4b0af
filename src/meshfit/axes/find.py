"""What the axes of a plan act on in a model: found once, on one rank, from steps on a few samples, and sent to the
others, so that all have the same layout.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import Uncopied
from meshfit.anatomy.record import Recording, TraceError
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Axis
from meshfit.axes.buffers.watch import undisturbed
from meshfit.axes.order import ORDER
from meshfit.axes.pipeline.stages import Inner
from meshfit.axes.shard.units import traced
from meshfit.data import tree
from meshfit.errors import MeshfitError, PlanError
from meshfit.plan import Plan
from meshfit.python_state import PythonState
from meshfit.step import parted

Objective = Callable[[nn.Module, Any], Any]

TRANSFORMS = "torch.func.", "functorch transform"
"""What torch says of code that they do not take."""

TRIED = 13
"""Samples on which splits are tried. A prime, so a dim that is a multiple of it is the batch dim."""


@dataclass(frozen=True)
class Findings:
    """What was found, by axis."""

    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Study:
    """A model, and a step of it on a few samples, for the axes of a plan to look at."""

    plan: Plan
    model: nn.Module
    objective: Objective
    batch: Any
    device: str = "cuda"
    """The type of devices that costs are those of."""
    kept: Collection[str] = ()
    """Modules that must stay in one piece, whatever axes there are."""
    axes: Sequence[Axis] = ()
    notes: list[str] = field(default_factory=list)
    _found: dict[str, Any] = field(default_factory=dict)

    def found(self, word: str) -> Any:
        """What that axis acts on; None if the plan does not use it. An axis may ask for what another found."""
        if word not in self._found:
            (axis,) = (axis for axis in self.axes if axis.word == word)
            used = axis.on(self.plan, self.model, self.device)
            self._found[word] = axis.find(self) if used else None
        return self._found[word]

    def closed(self) -> tuple[str, ...]:
        """Paths of modules that must not be cut into stages or branches, since something acts where they are called."""
        acting = [axis for axis in self.axes if type(axis).closed is not Axis.closed]
        paths = [path for axis in acting if (found := self.found(axis.word)) is not None for path in axis.closed(found)]
        return tuple(dict.fromkeys((*paths, *self.kept)))

    @property
    def deal(self) -> Callable[[Recording], Inner] | None:
        """Who of the ranks that share a stage of a pipeline runs what; None where each stage has one rank."""
        dealing = [axis for axis in self.axes if type(axis).deal is not Axis.deal]
        used = [axis for axis in dealing if axis.on(self.plan, self.model, self.device)]
        return partial(used[0].deal, self.plan) if used else None

    @cached_property
    def trace(self) -> Trace | TraceError:
        """One step, recorded without arithmetic."""
        return traced(self.model, self.objective, self.batch, device=self.device, plan=self.plan)

    @cached_property
    def few(self) -> Any:
        """A few samples, for trials."""
        if tree.by_sample(self.batch) is not None:
            return tree.rows(self.batch, slice(0, TRIED), tree.size(self.batch))
        there = max((len(t) for t in tree.tensors(self.batch) if t.dim()), default=0)
        return tree.map_tensors(lambda t: t[:TRIED] if t.dim() and len(t) == there else t, self.batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a step, as one number for backward."""
        return as_number(self.objective(model, batch))

    def prove(self, objective: Objective) -> None:
        """Let the axes in use prove that they are exact for another form of the step."""
        for axis in (axis for axis in self.axes if type(axis).prove is not Axis.prove):
            if (found := self.found(axis.word)) is not None:
                axis.prove(self, lambda model, batch: as_number(objective(model, batch)), found)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around what tries copies of the model."""
        try:
            yield
        except Uncopied as error:
            raise PlanError(
                f"{self.plan}: the model cannot be copied, and splits are found by trials on copies",
                str(error),
                "data= and shard= take the model as it is",
            ) from error.__cause__
        except Exception as error:
            if isinstance(error, MeshfitError) or self.device == "cpu" or not self._fails_on_cpu():
                raise
            raise PlanError(
                f"{self.plan}: splits are found by trials on the CPU, on which a step of this model fails",
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                "data= and shard= take the model as it is",
            ) from error

    def _fails_on_cpu(self) -> bool:
        """Whether the model's own step does, unchanged: a kernel of GPUs alone, FlexAttention's backward."""
        try:
            with torch.enable_grad():
                self.loss(self.model, self.few).backward()
        except Exception:
            return True
        self.model.zero_grad(set_to_none=True)
        return False


def find(
    plan: Plan, model: nn.Module, objective: Objective, batch: Any, device: str = "cuda", kept: Collection[str] = ()
) -> Findings:
    """``model`` stays as it is; costs are those on ``device``. ``kept``: modules that must not be cut over stages."""
    study = Study(plan, model, objective, batch, device, kept, ORDER)
    if plan.tensor > 1 or plan.context > 1:
        _check_side_outputs(study)
    try:
        values = {axis.word: study.found(axis.word) for axis in ORDER}
    except Exception as error:
        if isinstance(error, MeshfitError) or not any(name in str(error) for name in TRANSFORMS):
            raise
        raise PlanError(
            f"{plan}: the model computes inside a transform of torch.func (grad, vmap, jvp, ...)",
            "what happens in there can neither be recorded nor cut over devices",
            "data= takes the model as it is; torch.autograd.grad(..., create_graph=True) can be sharded too",
        ) from error
    return Findings(
        {word: found.to_send() if hasattr(found, "to_send") else found for word, found in values.items()},
        tuple(study.notes),
    )


def _check_side_outputs(study: Study) -> None:
    """Refuse a step that reads activations which a forward leaves in the model: they may be parts, and gradients that
    enter there are not those that were proven."""
    model, state = study.model, PythonState(study.model)
    left: dict[str, Tensor] = {}
    detached = model.register_forward_hook(lambda module, given, made: tree.map_tensors(torch.detach, made))
    try:
        with undisturbed(model), torch.enable_grad():
            loss = study.loss(model, tree.map_tensors(torch.clone, study.few))
            left = {path: t for path, t in state.changed().items() if isinstance(t, Tensor) and t.requires_grad}
            if left and loss.requires_grad:
                reached = torch.autograd.grad(loss, [*left.values()], allow_unused=True)
                left = {path: t for (path, t), by in zip(left.items(), reached, strict=True) if by is not None}
            else:
                left = {}
    except Exception:  # trials will say what is wrong
        left = {}
    finally:
        detached.remove()
        state.restore()
    if left:
        word = "tensor" if study.plan.tensor > 1 else "context"
        raise PlanError(
            f"{study.plan}: the step reads {next(iter(left))}, which the forward leaves in the model",
            f"under {word}= it may be a part, and its gradient is lost or counted twice",
            "let the forward return it: outputs, features = model(x)",
            "data= and shard= take it as it is",
        )


def as_number(result: Any) -> Tensor:
    """The result of a step, as one number for backward."""
    result, _ = parted(result)
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor) and not result[0].dim():
        return result[0]  # a sum, and what it is over
    if isinstance(own := getattr(result, "loss", None), Tensor):  # of Hugging Face's models
        return own
    if isinstance(result, Tensor) and not result.dim():
        return result
    made = [t for t in tree.tensors(result) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in made]).sum() if made else torch.zeros(())
