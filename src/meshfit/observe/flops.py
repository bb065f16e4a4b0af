"""How much arithmetic a training does, counted without computing."""

import io
import warnings
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING

import torch

from meshfit.anatomy.record import TraceError
from meshfit.data import tree
from meshfit.data.source import Stream, open_source

if TYPE_CHECKING:
    from meshfit.job import Job

SAMPLES = 4


def flops_a_sample(job: "Job", model: torch.nn.Module) -> float | None:
    """Of a forward and backward, counted on a recording that computes nothing; None where there is none to have."""
    from meshfit.layout.units import traced

    with suppress(Exception):  # a report without a line is better than none
        source = open_source(job.data)
        if isinstance(source, Stream):
            return None
        few = source.few(SAMPLES)
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():  # what the model says, it has said in training
            warnings.simplefilter("ignore")
            trace = traced(model, job.objective, few, device="cpu")
        if isinstance(trace, TraceError):
            return None
        samples = max(len(t) for t in tree.tensors(few) if t.dim())
        return (trace.cost.flops + trace.cost.flops_backward) / samples
    return None
