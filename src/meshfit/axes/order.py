"""The axes, from the outside in. A new one is a folder, and a line here."""

from meshfit.axes.axis import Axis
from meshfit.axes.branch.axis import BranchAxis
from meshfit.axes.compile import CompileAxis
from meshfit.axes.context.axis import ContextAxis
from meshfit.axes.data.axis import DataAxis
from meshfit.axes.expert.axis import ExpertAxis
from meshfit.axes.pipeline.axis import PipelineAxis
from meshfit.axes.recompute.axis import RecomputeAxis
from meshfit.axes.shard.axis import ShardAxis
from meshfit.axes.tensor.axis import TensorAxis

ORDER: tuple[Axis, ...] = (
    PipelineAxis(),  # a rank keeps the modules of its stages, and lets go of the rest
    BranchAxis(),  # of those, the ones of its own branches, and what all run alike
    DataAxis(),  # what talks to the ranks with other samples: BatchNorm, auxiliary losses, buffers
    CompileAxis(),  # blocks: inside everything below, so that what is compiled is plain arithmetic on whole weights
    TensorAxis(),  # weights are cut by channels
    ExpertAxis(),  # of each mixture a rank keeps some experts, and rows travel between ranks
    ShardAxis(),  # what is left of each parameter is cut as rows of memory, and gathered around the calls that use it
    RecomputeAxis(),  # around the gathering: what is computed again in backward is gathered again, not kept
    ContextAxis(),  # around what is left: from where sequences begin, activations are cut
)
"""Each is applied to the model as those before left it."""
