"""From the steps of a recorder to a ``Recording``: events and values as plain data."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_forward import Recorder
from meshfit.anatomy.record_known import Origin, storage
from meshfit.anatomy.record_program import Instruction, ModuleRef, ValueRef, objects_in, references
from meshfit.anatomy.replay import Recording, fact
from meshfit.anatomy.trace import Dynamic, Event, EventCost, Parameter, Trace, Value
from meshfit.data import tree


def tied(model: nn.Module) -> dict[str, str]:
    """Parameters that are one tensor: each further name, and the name it is first known by."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return ties


def built(
    model: nn.Module,
    recorder: Recorder,
    outputs: Any,
    inputs: Any,
    *,
    training: bool,
    costs: dict[int, EventCost],
    dynamic: tuple[Dynamic, ...],
    notes: tuple[str, ...],
) -> Recording:
    steps, ties = recorder.steps, tied(model)
    wanted = tuple(dict.fromkeys(r.id for r in references(outputs) if isinstance(r, ValueRef)))
    trace = Trace(
        events=tuple(_event(model, index, step, ties, costs) for index, step in enumerate(steps)),
        values=_values(recorder, steps),
        inputs=tuple(recorder.inputs),
        outputs=wanted,
        parameters={name: _parameter(name, p) for name, p in model.named_parameters()},
        buffers={name: _parameter(name, b) for name, b in model.named_buffers()},
        ties=ties,
        training=training,
        dynamic=dynamic,
        notes=notes,
        kinds={path: type(module).__name__ for path, module in model.named_modules()},
    )
    set_frees(steps, wanted)
    return Recording(trace, tuple(steps), outputs, tuple(map(fact, tree.leaves(inputs))))


def _event(model: nn.Module, index: int, step: Instruction, ties: dict[str, str], costs: dict[int, EventCost]) -> Event:
    held = step.held
    parameters = [h.name for h in held if h.kind == "parameter"]
    buffers = [h.name for h in held if h.kind == "buffer"]
    if step.kind == "assign" and step.target.kind == "buffer":
        buffers.append(step.target.name)
    used = [r.path for r in references((step.args, step.kwargs)) if isinstance(r, ModuleRef)]  # modules as arguments
    for path in (step.target, *used) if step.kind == "module" else used:
        module, prefix = model.get_submodule(path), f"{path}." if path else ""
        parameters += [f"{prefix}{name}" for name, _ in module.named_parameters()]
        buffers += [f"{prefix}{name}" for name, _ in module.named_buffers()]
    return Event(
        index=index,
        kind="module" if step.kind == "module" else "glue",
        name=step.name if step.kind in ("module", "glue") else f"{step.kind} {step.name}",
        inside=step.inside,
        reads=step.reads,
        writes=step.writes,
        mutates=step.mutates,
        parameters=tuple(dict.fromkeys(ties.get(name, name) for name in parameters)),
        buffers=tuple(dict.fromkeys(buffers)),
        cost=costs.get(step.number, EventCost()) if step.kind in ("module", "glue") else EventCost(),
        line=step.line,
        changes=step.changes,
        within=step.within,
    )


def _values(recorder: Recorder, steps: list[Instruction]) -> dict[int, Value]:
    made_by, used_by = dict.fromkeys(recorder.inputs, -1), defaultdict(list)
    for index, step in enumerate(steps):
        for id in step.writes:
            made_by.setdefault(id, index)
        for id in step.reads:
            used_by[id].append(index)
    varying = _varying(recorder, steps)
    storages: dict[int, int] = {}
    return {
        id: Value(
            *(id, tuple(tensor.shape), _name(tensor.dtype), tensor.numel() * tensor.element_size()),
            made_by=made_by[id],
            used_by=tuple(used_by[id]),
            needs_grad=tensor.requires_grad,
            constant=id not in varying,
            storage=storages.setdefault(storage(tensor), len(storages)),
        )
        for id, tensor in enumerate(recorder.values)
        if id in made_by
    }


def _varying(recorder: Recorder, steps: list[Instruction]) -> set[int]:
    """Values that not every stage can compute for itself: from inputs, parameters or random numbers, from what is
    written in place, from objects passed on, from buffers that change."""
    varied = Origin.INPUT | Origin.PARAMETER | Origin.RANDOM | Origin.RAGGED
    varying = {id for id, source in enumerate(recorder.sources) if source & varied}
    written = {storage(recorder.values[id]) for step in steps for id in step.mutates}
    changed = {name for step in steps for name in step.changes}
    varying |= {id for id, tensor in enumerate(recorder.values) if storage(tensor) in written}
    for step in steps:
        whole = any(held.kind == "attribute" or held.name in changed for held in step.held) or step.changes
        if (
            whole
            or step.kind == "module"
            or any(thing.references for thing in objects_in((step.args, step.kwargs)))
            or varying & {*step.reads}
        ):
            varying.update(step.writes)
    return varying


def _parameter(name: str, tensor: Tensor) -> Parameter:
    size = tensor.numel() * tensor.element_size()
    return Parameter(name, tuple(tensor.shape), _name(tensor.dtype), size, tensor.requires_grad)


def _name(dtype: torch.dtype) -> str:
    """ "float32" of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def set_frees(steps: list[Instruction], wanted: tuple[int, ...]) -> None:
    """Tell each step which values nobody reads after it."""
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        last |= dict.fromkeys((*step.writes, *step.reads), index)
    frees = defaultdict(list)
    for id, index in last.items():
        if id not in wanted:
            frees[index].append(id)
    for index, step in enumerate(steps):
        step.frees = tuple(frees[index])
