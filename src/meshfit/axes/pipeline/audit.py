"""Whether a recording does what the model does, tried once before anything is cut.

Recordings are made on meta tensors. Code that asks what device it is on takes another branch there, and says so only
when it is run again.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.copies import twin
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.cuts import storage_of
from meshfit.anatomy.record import Recording, TraceError, record
from meshfit.anatomy.record_program import Instruction, ValueRef, decode, references, tensors
from meshfit.anatomy.replay import Environment, bind, run
from meshfit.anatomy.trace import Event, Trace
from meshfit.axes import bf16_compute
from meshfit.axes.pipeline.cut import learnt
from meshfit.axes.shard.units import Whole
from meshfit.data import tree
from meshfit.errors import PlanError, in_short

LARGEST = 8 * 2**30
"""Bytes of parameters: beyond it the model is not run as a whole."""

NEAR = 1e-3


class Misfit(Exception):
    """A step cannot be run again as recorded: ``module`` is where it stands."""

    def __init__(self, module: str, error: TraceError):
        super().__init__(str(error))
        self.module, self.error = module, error


def audit(recording: Recording, whole: nn.Module, batch: Any, device: str) -> None:
    """Run ``whole`` and its recording on copies, in training mode, and compare; a ``Misfit`` if they differ. A model in
    host memory is tried on the GPU, where it takes moments; where that cannot be, on the CPU."""
    own = [*whole.parameters(), *whole.buffers(), *tree.tensors(batch)]
    if recording.trace.parameter_bytes > LARGEST or any(tensor.is_meta for tensor in own):
        return
    if device == "cuda" and torch.cuda.is_available() and not any(tensor.is_cuda for tensor in own):
        try:
            _compare(recording, whole, batch, torch.device("cuda", torch.cuda.current_device()))
            return
        except (RuntimeError, Misfit):  # out of memory, or a tensor that is no module's: the CPU can tell
            torch.cuda.empty_cache()
    _compare(recording, whole, batch, None)


def _compare(recording: Recording, whole: nn.Module, batch: Any, device: torch.device | None) -> None:
    """On ``device``; None: where the model is."""

    def copied() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model, content = twin(whole, meta=False), tree.map_tensors(torch.clone, batch)
        return (model, content) if device is None else (model.to(device), tree.to_device(content, device))

    own = [*whole.parameters(), *whole.buffers(), *tree.tensors(batch)]
    gpus = list({tensor.device for tensor in own if tensor.is_cuda} | ({device} if device is not None else set()))
    with torch.random.fork_rng(gpus), torch.no_grad():
        model, content = copied()
        try:
            wanted = model(content)
        except RuntimeError as error:  # a loss that calls torch.autograd.grad
            why = TraceError("the step does not run without autograd, which each stage has of its own", in_short(error))
            raise Misfit("", why) from error
        model, content = copied()
        env = Environment(model, bind(recording, (content,)))
        for step in recording.steps:
            try:
                run([step], env)
            except Exception as error:
                why = f"{step.name} at {step.line}: {in_short(error)}"
                raise Misfit(step.inside, TraceError("what was recorded cannot be run again", why)) from error
        found = decode(recording.outputs, env.resolve)
    for want, got in zip(tensors(wanted), tensors(found), strict=True):
        if not torch.allclose(want.double(), got.double(), rtol=NEAR, atol=NEAR, equal_nan=True):
            error = TraceError("run again as recorded, the model gives another result", f"{got} in place of {want}")
            raise Misfit("", error)


def faithful(
    model: nn.Module,
    objective: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    device: str,
    precision: str = "fp32",
    share: float,
    atoms: Iterable[str],
    refusal: Callable[[str, TraceError], PlanError],
) -> tuple[tuple[str, ...], Recording]:
    """A recording that does what the model does, with costs on ``device``, and the modules whose code it cannot run
    again: they are taken as a whole, as ``atoms`` are."""
    computes = precision == bf16_compute.WORD
    meter = partial(Meter, target=device, rounds="" if precision == "fp32" or computes else "each")
    rounded = [f"model.{name}" for name in bf16_compute.rounded(model)] if computes else []
    model = bf16_compute.as_computed(model) if computes else model
    taken = [f"model.{path}" if path else "model" for path in atoms]
    whole = Whole(model, objective)
    while True:
        try:
            recording = record(whole, (batch,), meter=meter, share=share, atoms=taken)
        except TraceError as error:
            raise refusal("the model cannot be cut, because it cannot be recorded", error) from error
        notes = recording.trace.notes
        looks = [f"{d.what} in {d.module or 'the model itself'}, {d.line}" for d in recording.trace.dynamic]
        whole_model = [note for note in notes if note.startswith("model taken as a whole")]
        if whole_model:
            error = TraceError(whole_model[0].removeprefix("model taken as a whole: "), *looks[:2])
            raise refusal("the model can be run only as a whole", error)
        if "real tensors" in notes:
            raise refusal("no rank could tell what the others do", _undecided(recording))
        try:
            audit(recording, whole, batch, device)
            recording = replace(recording, trace=bf16_compute.as_held(recording.trace, rounded))
            return tuple(path.removeprefix("model.") for path in taken), recording
        except Misfit as misfit:
            if misfit.module in ("", "model", *taken):
                raise refusal("the model cannot be run in parts", misfit.error) from misfit.error
            taken.append(misfit.module)


OF_VALUES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "where", "getitem")
"""Functions that may make as many rows as values say."""

WORDS = {
    "activations": "values of its own activations",
    "random": "random numbers",
    "buffers": "values of its buffers",
    "inputs": "values of its inputs",
}


OF_INPUTS = f"it decides by {WORDS['inputs']} what to do"
"""The last of all reasons: every rank can look at the inputs."""


def _undecided(recording: Recording) -> TraceError:
    """Why a model was recorded on real tensors: by what values it decides what to run, or how many rows."""
    trace, found = recording.trace, dict[str, list[str]]()
    for each in trace.dynamic:
        if each.depends_on in WORDS and not each.what.startswith("size of a tensor"):
            place = f"{each.what} in {each.module or 'the model itself'}, {each.line}"
            found.setdefault(f"it decides by {WORDS[each.depends_on]} what to do", []).append(place)
    activations = learnt(trace)
    for step, event in zip(recording.steps, trace.events, strict=True):
        chosen = _rows_by(step, event, trace)
        if chosen:
            by = "activations" if activations.intersection(storage_of(trace, v) for v in chosen) else "inputs"
            place = f"{event.name} in {event.inside or 'the model itself'}, {event.line}"
            found.setdefault(f"how many rows it takes depends on {WORDS[by]}", []).append(place)
    for headline in sorted(found, key=lambda text: ("activations" not in text, text == OF_INPUTS)):
        return TraceError(headline, *list(dict.fromkeys(found[headline]))[:2])
    why = [note.partition(": ")[2] for note in trace.notes if note.startswith("not on meta tensors: ")]
    return TraceError("it can be recorded on real tensors only, and a rank has no others' weights", *why)


def _rows_by(step: Instruction, event: Event, trace: Trace) -> tuple[int, ...]:
    """The values that say how many rows ``event`` makes; none if its sizes follow from those of its inputs."""
    if event.kind != "glue" or event.name not in OF_VALUES:
        return ()
    if event.name == "where":
        return event.reads if len(step.args) == 1 else ()
    if event.name == "getitem":
        return tuple(
            r.id
            for r in references(step.args[1:])
            if isinstance(r, ValueRef) and r.id in trace.values and trace.values[r.id].dtype in ("bool", "uint8")
        )
    return event.reads
