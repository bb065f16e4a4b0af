"""What is inside a model: one recorded forward -> events, values, costs, cuts, branches, blocks, ties.

trace      one forward of a model, as a value
record     the same with the program to run it again, whole or in part (replay)
cost       flops, bytes and kept activations of each event
cuts, branches, blocks, axes   what a trace says about spreading the model
pairs      which weights can be split over devices, column then row
"""

from dataclasses import replace
from typing import Any

from torch import nn

from meshfit.anatomy.blocks import blocks
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.record import record
from meshfit.anatomy.trace import Trace


def trace(model: nn.Module, inputs: Any) -> Trace:
    """One forward of ``model`` on ``inputs`` (a tensor; a tuple for several arguments; a dict for keywords), with the
    cost of every event and the blocks that repeat. On meta tensors where that is possible: nothing is computed."""
    recorded = record(model, inputs, meter=Meter).trace
    return replace(recorded, blocks=blocks(recorded))
