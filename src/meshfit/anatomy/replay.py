"""Run a recorded forward again, whole or a part of it.

The same calls in the same order on the model's own modules and parameters: outputs, gradients, buffers and random
numbers come out bit for bit as from the model's own forward, as long as the inputs have the recorded shapes and the
values that Python looked at are what they were (guards check that).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfit.anatomy.record_program import (
    AttributeRef,
    Device,
    Instruction,
    Mode,
    ModuleRef,
    Object,
    TraceError,
    ValueRef,
    build,
    decode,
    holds_nothing,
    made,
    tensors,
)
from meshfit.anatomy.trace import Trace
from meshfit.data import tree


@dataclass(frozen=True)
class Recording:
    """One forward: what it did, as plain data, and the program that does it again."""

    trace: Trace
    """Event ``i`` is what step ``i`` does."""

    steps: tuple[Instruction, ...]
    outputs: Any
    """What the model returned, with references in the place of tensors."""

    given: tuple[Any, ...]
    """Leaves of the inputs: (shape, dtype) of tensors, other things as they are."""


@dataclass(eq=False)
class Environment:
    """What a part of the program runs on."""

    model: nn.Module
    """Holds the modules and parameters that the part needs, at their paths."""

    values: dict[int, Tensor]
    device: torch.device | None = None
    """Stands for the device of the recording; None: the model's."""

    objects: dict[int, Any] = field(default_factory=dict)

    def resolve(self, reference: Any) -> Any:
        match reference:
            case ValueRef():
                return self.values[reference.id]
            case AttributeRef():
                return getattr(self.model.get_submodule(reference.path), reference.attribute)
            case ModuleRef():
                return self.model.get_submodule(reference.path)
            case Device():
                device = self.device or self.own_device()
                return device.type if reference.as_text else device
            case Object():
                if reference.number not in self.objects:
                    self.objects[reference.number] = build(reference, self.resolve)
                return self.objects[reference.number]
        raise AssertionError(reference)

    def own_device(self) -> torch.device:
        """Where the parameters are; of a model without any, where the values are."""
        found = next(self.model.parameters(), next(self.model.buffers(), next(iter(self.values.values()), None)))
        self.device = torch.device("cpu") if found is None else found.device
        return self.device


def replay(recording: Recording, model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)`` by the recorded program: same outputs, gradients, buffers and random numbers."""
    if model.training != recording.trace.training:
        recorded, now = ("training", "eval") if recording.trace.training else ("eval", "training")
        raise TraceError(f"recorded in {recorded} mode, replayed on a model in {now} mode", "record it again")
    env = Environment(model, bind(recording, inputs))
    replay_steps(recording.steps, env)
    return decode(recording.outputs, env.resolve)


def bind(recording: Recording, inputs: Any) -> dict[int, Tensor]:
    """The tensors of ``inputs`` as the values they are in the recording; refuses what it was not recorded for."""
    found = tuple(tree.leaves(inputs))
    now = tuple(map(fact, found))
    if now != recording.given:
        wrong = [f"{was} became {new}" for was, new in zip(recording.given, now, strict=False) if was != new]
        count = f"{len(recording.given)} leaves became {len(now)}" if len(recording.given) != len(now) else ""
        raise TraceError("the inputs are not like those recorded", count, *wrong[:4], "record again for these")
    return dict(zip(recording.trace.inputs, (leaf for leaf in found if isinstance(leaf, Tensor)), strict=True))


def fact(leaf: Any) -> Any:
    """What of an input is fixed by a recording."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def replay_steps(steps: Sequence[Instruction], env: Environment) -> None:
    """Run ``steps`` on the values in ``env``, those of an activation checkpoint under one. Afterwards it holds what
    later steps or the outputs need; the rest has been let go."""
    for region, group in groupby(steps, key=lambda step: step.checkpoint):
        if region is None or not torch.is_grad_enabled():
            run(list(group), env)
        else:
            _checkpointed(list(group), env)


def run(steps: list[Instruction], env: Environment) -> None:
    for step in steps:
        if step.mode is None:
            _run(step, env)
        else:
            with under(step.mode):
                _run(step, env)
        for id in step.frees:
            env.values.pop(id, None)


def _run(step: Instruction, env: Environment) -> None:
    args, kwargs = decode(step.args, env.resolve), decode(step.kwargs, env.resolve)
    if step.kind == "assign":
        setattr(env.model.get_submodule(step.target.path), step.target.attribute, args[0])
        return
    if step.kind == "guard":
        found = step.target(*args, **kwargs)
        if found != step.expected:
            raise TraceError(
                f"the forward would take another branch: {step.name} was {step.expected}, now {found}",
                f"in {step.inside or 'the model itself'}, {step.line}",
                "record again for such inputs, or take that module as a whole: atoms=...",
            )
        return
    flat = holds_nothing(args, kwargs)
    before = set() if flat else {id(tensor) for tensor in tensors((args, kwargs))}
    if step.kind == "module":  # past a __call__ of its own: what that does was recorded
        result = nn.Module.__call__(env.model.get_submodule(step.target), *args, **kwargs)
    else:
        result = step.target(*args, **kwargs)
    found = tensors(result) if flat else made(result, (args, kwargs), before)
    if len(found) != len(step.outs):
        raise TraceError(
            f"{step.name} made {len(found)} tensors, recorded: {len(step.outs)}",
            f"in {step.inside or 'the model itself'}, {step.line}",
            "it depends on something the recording does not hold; take its parent as a whole: atoms=...",
        )
    env.values.update((id, tensor) for id, tensor in zip(step.outs, found, strict=True) if id >= 0)
    env.values.update((id, env.resolve(held)) for held, id in step.attributes)


def _checkpointed(steps: list[Instruction], env: Environment) -> None:
    """Run ``steps`` keeping only what goes in; backward runs them again."""
    given = dict(env.values)

    def again() -> dict[int, Tensor]:
        inner = Environment(env.model, dict(given), env.device, env.objects)
        run(steps, inner)
        return inner.values

    result = checkpoint(again, use_reentrant=False)
    env.values.clear()
    env.values.update(result)


@contextlib.contextmanager
def under(mode: Mode) -> Iterator[None]:
    """The switches under which a step was recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(True) if mode.inference else torch.set_grad_enabled(mode.grad))
        for kind, enabled, dtype in mode.autocast:
            if kind == "cpu" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        yield
