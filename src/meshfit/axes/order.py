"""The axes, from the outside in. A new axis is a folder, and a line in this list."""

from meshfit.axes.axis import Axis
from meshfit.axes.branch.axis import BranchAxis
from meshfit.axes.compile.axis import CompileAxis
from meshfit.axes.context.axis import ContextAxis
from meshfit.axes.data.axis import DataAxis
from meshfit.axes.expert.axis import ExpertAxis
from meshfit.axes.head_loss.axis import HeadLossAxis
from meshfit.axes.offload.axis import ActivationsAxis
from meshfit.axes.pipeline.axis import PipelineAxis
from meshfit.axes.precision import PrecisionAxis
from meshfit.axes.recompute.axis import RecomputeAxis
from meshfit.axes.shard.axis import ShardAxis
from meshfit.axes.tensor.axis import TensorAxis

ORDER: tuple[Axis, ...] = (
    PrecisionAxis(),  # weights are narrowed while they are whole
    PipelineAxis(),  # a rank keeps the modules of its stages, and frees the rest
    BranchAxis(),  # of those it keeps its own branches, and what all branches share
    DataAxis(),  # what communicates with ranks that have other samples: BatchNorm, auxiliary losses, buffers
    ActivationsAxis(),  # around what gathers: weights that autograd saves are gathered again, not moved
    HeadLossAxis(),  # the head: inside what cuts its weight
    CompileAxis(),  # blocks: inside everything below, so that what is compiled is plain arithmetic on whole weights
    TensorAxis(),  # weights are cut by channels
    ExpertAxis(),  # of each mixture a rank keeps some experts, and tokens are sent to them
    ShardAxis(),  # what is left of each parameter is sharded, and gathered around the calls that use it
    RecomputeAxis(),  # around the gathering: what backward recomputes is gathered again, not kept
    ContextAxis(),  # around all of it: activations are split along the sequence
)
"""Each is applied to the model as those before left it."""
