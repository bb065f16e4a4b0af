"""Whether a recording does what the model does, tried once before anything is cut.

Recordings are made on meta tensors. Code that asks what device it is on takes another branch there, and says so only
when it is run again.
"""

from typing import Any

import torch
from torch import nn

from meshfit.anatomy.record import Recording, TraceError
from meshfit.anatomy.record_atoms import twin
from meshfit.anatomy.record_program import decode, tensors
from meshfit.anatomy.replay import Environment, bind, run
from meshfit.data import tree

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
