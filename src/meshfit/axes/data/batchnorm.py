"""BatchNorm over the samples of all ranks, on any device: forward gathers each rank's mean, variance and
count in one collective; backward sums two vectors in another. Exactly the BatchNorm of the whole batch.

Within one rank it normalises each microbatch by itself, as one device does. torch's SyncBatchNorm does the
same on GPUs alone.

    traffic per BatchNorm and microbatch: all_gather of 2C+1 floats, all_reduce of 2C
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.forward import wrap
from meshfit.comm.group import Group
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.patches import replaced
from meshfit.torch_private.autograd import ThreadValue
from meshfit.torch_private.modules import BatchNorm

_counted = ThreadValue("counted", True)
counted, counting = _counted.get, _counted.set_to
"""Whether the samples in flight are part of the batch's statistics: not while a rank runs a stand-in. ``with
counting(False): ...``"""


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def untracked(model: nn.Module) -> list[BatchNorm]:
    """Those that take the statistics of their batch in eval mode too (``track_running_stats=False``)."""
    return [norm for norm in batch_norms(model) if norm.running_mean is None]


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """By name. Of model servers, the first keeps them."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.track_running_stats
        for name, buffer in module.named_buffers(recurse=False)
    }


def apply(model: nn.Module, group: Group) -> None:
    """Make every BatchNorm of ``model`` global over ``group``, in place.

    A module's own forward still runs (momentum, tracking, subclasses with an activation inside); only the
    ``F.batch_norm`` that it calls is another one. Wrapping the forward, not the step, keeps recomputation right.
    """
    for module in batch_norms(model):
        wrap(module, lambda forward: _globally(forward, group))


def cost(trace: Trace, ranks: int, microbatches: int, *, served: bool = False) -> Cost:
    """Of a step, on one of ``ranks``; ``served``: they meet through a model server."""
    widths = [b.shape[0] for name, b in trace.buffers.items() if name.endswith("running_mean")]
    wide = 8 if any(p.dtype == "float64" for p in trace.parameters.values()) else 4
    how = {"degree": ranks, "count": microbatches, "axis": "data", "dtype": {8: "float64", 4: "float32"}[wide]}
    calls = []
    for width in widths:
        gathered, summed = ranks * (2 * width + 1) * wide, 2 * width * wide
        if served:  # what is said goes up, what all have said comes down
            sizes = {"forward": (2 * width + 1) * wide, "backward": 2 * width * wide}
            calls += [CollectiveCall("meet", (1 + ranks) * size, phase=phase, **how) for phase, size in sizes.items()]
        else:
            calls.append(CollectiveCall("all_gather", gathered, phase="forward", **how))
            calls.append(CollectiveCall("all_reduce", summed, phase="backward", **how))
    return Cost(collectives=tallied(calls))


def _globally(forward: Any, group: Group) -> Any:
    def batch_norm(local, input, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if not training:
            return local(input, mean, var, weight, bias, training, momentum, eps)
        return _GlobalBatchNorm.apply(input, mean, var, weight, bias, momentum, eps, group)

    return _with(batch_norm, forward)


def without_batches(norm: BatchNorm) -> Any:
    """The forward of a subclass, in which ``F.batch_norm`` takes the statistics that it keeps; not where it regroups
    channels. What the subclass computes of a batch itself it computes."""

    def batch_norm(local, input, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if training and input.shape[1] == norm.num_features:
            mean = input.new_zeros(norm.num_features) if mean is None else mean
            var, training = input.new_ones(norm.num_features) if var is None else var, False
        return local(input, mean, var, weight, bias, training, momentum, eps)

    return _with(batch_norm, norm.forward)


def _with(batch_norm: Any, forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        with replaced(F, "batch_norm", lambda local: partial(batch_norm, local)):
            return forward(*args, **kwargs)

    return run


class _GlobalBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, running_mean, running_var, weight, bias, momentum, eps, group):
        axes = [0, *range(2, x.dim())]
        channels = x.shape[1]
        full = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        var, mean = torch.var_mean(full, axes, correction=0)
        count = full.numel() / channels * counted()
        mine = torch.cat([mean, var, mean.new_full((1,), count)])
        every = group.all_gather(mine)
        means, variances, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
        total = counts.sum()
        if count <= 1:  # else there are enough; so the host seldom asks the device
            if total == 1:  # of one value there is no variance: what torch says on one device
                raise ValueError(
                    "Expected more than 1 value per channel when training, got 1 from all devices together"
                )
            if total == 0:  # a microbatch that is empty on all ranks counts for nothing
                running_mean, running_var, total = None, None, total + 1
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean).square()) * counts).sum(0) / total
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (total / (total - 1))).to(running_var.dtype), momentum)
        inverse = (var + eps).rsqrt()
        ctx.save_for_backward(x, mean, inverse, weight, total)
        ctx.group, ctx.axes, ctx.counted = group, axes, counted()
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)  # one kernel, given statistics

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, mean, inverse, weight, total = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        dy = dy.float() if dy.dtype in (torch.float16, torch.bfloat16) else dy
        normal = (x - mean.view(shape)) * inverse.view(shape)
        d_bias, d_weight = dy.sum(ctx.axes), (dy * normal).sum(ctx.axes)
        sums = ctx.group.all_reduce_(torch.cat([d_bias, d_weight]))
        mean_dy, mean_dy_normal = (sums / total).view(2, *shape)
        dx = dy - (mean_dy + normal * mean_dy_normal) * ctx.counted
        scale = inverse if weight is None else inverse * weight
        dx = (dx * scale.view(shape)).to(x.dtype)
        return (
            dx,
            None,
            None,
            (None if weight is None else d_weight),
            (None if weight is None else d_bias),
            None,
            None,
            None,
        )
