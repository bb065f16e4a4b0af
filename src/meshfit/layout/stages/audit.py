"""Whether a recording does what the model does, tried once before anything is cut.

Recordings are made on meta tensors. Code that asks what device it is on takes another branch there, and says so only
when it is run again.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.record import Recording, TraceError, record
from meshfit.anatomy.record_atoms import twin
from meshfit.anatomy.record_program import decode, tensors
from meshfit.anatomy.replay import Environment, bind, run
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.layout.units import Whole

LARGEST = 8 * 2**30
"""Bytes of parameters: beyond it the model is not run as a whole."""

NEAR = 1e-3


class Misfit(Exception):
    """A step cannot be run again as recorded: ``module`` is where it stands."""

    def __init__(self, module: str, error: TraceError):
        super().__init__(str(error))
        self.module, self.error = module, error


def audit(recording: Recording, whole: nn.Module, batch: Any) -> None:
    """Run ``whole`` and its recording on copies, in training mode, and compare; a ``Misfit`` if they differ."""
    own = [*whole.parameters(), *whole.buffers(), *tree.tensors(batch)]
    if recording.trace.parameter_bytes > LARGEST or any(tensor.is_meta for tensor in own):
        return
    gpus = list({tensor.device for tensor in own if tensor.is_cuda})
    with torch.random.fork_rng(gpus), torch.no_grad():
        torch.manual_seed(0)
        wanted = twin(whole, meta=False)(tree.map_tensors(torch.clone, batch))
        torch.manual_seed(0)
        copy = twin(whole, meta=False)
        env = Environment(copy, bind(recording, (tree.map_tensors(torch.clone, batch),)))
        for step in recording.steps:
            try:
                run([step], env)
            except Exception as error:
                why = f"{step.name} at {step.line}: {type(error).__name__}: {str(error).splitlines()[0]}"
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
    meter: Any,
    share: float,
    atoms: Iterable[str],
    refusal: Callable[[str, TraceError], PlanError],
) -> tuple[tuple[str, ...], Recording]:
    """A recording that does what the model does, and the modules whose code it cannot run again: they are taken as a
    whole, as ``atoms`` are."""
    taken = [f"model.{path}" for path in atoms]
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
            error = TraceError("it decides by values of its own activations what to do", *looks[:2])
            raise refusal("no rank could tell what the others do", error)
        try:
            audit(recording, whole, batch)
            return tuple(path.removeprefix("model.") for path in taken), recording
        except Misfit as misfit:
            if misfit.module in ("", "model", *taken):
                raise refusal("the model cannot be run in parts", misfit.error) from misfit.error
            taken.append(misfit.module)
