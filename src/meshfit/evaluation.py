"""Losses and metrics over a data set, every sample once, under any plan.

Each rank works through its share of every batch, ranks without a sample skip it, and the sums and counts are
added up at the end in one collective: nothing is padded, nothing counted twice. What is no mean: see ``metrics.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isnan, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.buffers.watch import buffers_kept, modes_kept
from meshfit.axes.data.batchnorm import counting
from meshfit.axes.mesh import SHARES
from meshfit.axes.place import Placed
from meshfit.axes.precision import Precision
from meshfit.comm.group import RankGroup
from meshfit.comm.sample_streams import SampleStreams
from meshfit.data import tree
from meshfit.data.loader import Loader
from meshfit.data.order import share
from meshfit.errors import DataError
from meshfit.live import LIVE
from meshfit.loss.batch_loss import BatchLoss
from meshfit.loss.gather import gathering
from meshfit.loss.gather import over as rows_over
from meshfit.loss.logged import weighed
from meshfit.loss.objective import LossDenominator, Objective, call, check_scalar, split
from meshfit.metrics import Metrics, measures
from meshfit.passes.forward import PlacedForward
from meshfit.step import parted


@contextmanager
def evaluating(placed: Placed) -> Iterator[None]:
    """The model in eval mode, without gradients; afterwards as it was."""
    fast = torch.backends.mha.get_fastpath_enabled()
    if (
        not placed.plain
    ):  # torch's encoder layers then skip their submodules, which other ranks may hold, or parts of them
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), modes_kept(placed.model):
            placed.model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@LIVE.evaluation()
def measure(
    placed: Placed,
    loader: Loader,
    *,
    objective: Objective | None,
    over: LossDenominator,
    metrics: Mapping[str, Any],
    precision: Precision,
) -> dict[str, float]:
    """Over all samples of ``loader``, on every rank: the mean loss (if there is one) and each metric."""
    total, count = 0.0, 0.0
    logged: dict[str, tuple[Any, Any]] = {name: (0.0, 0.0) for name, _ in over.logged if name not in ("loss", *metrics)}
    measured = Metrics(metrics, placed.mesh.over("pipeline", *SHARES), loader.device, loader.rank)

    def returned(model: nn.Module, content: Any) -> tuple[Any, Any, Any]:
        inputs, targets = split(content)
        return None, call(model, inputs), targets

    def run(model: nn.Module, content: Any) -> tuple[Any, Any, Any]:
        """(loss, outputs, targets), as far as they are needed."""
        if objective is None:
            return returned(model, content)
        return objective.outputs(model, content) if metrics else (objective(model, content), None, None)

    shares = RankGroup.of(placed.mesh.shares)
    whole = None if shares is None else BatchLoss.of(objective, over, shares, loader.device)
    together = placed.together or whole is not None or over.gathers
    forward = PlacedForward(placed, run if whole is None else returned, precision, loader.device)
    with evaluating(placed), buffers_kept(placed.model) as restore:
        for batch in SampleStreams(placed.mesh.world).in_agreement(loader, loader.epoch(0)):
            LIVE.tick()
            (part,) = batch.microbatches
            result = None
            if part.samples or together:
                with counting(part.samples > 0), gathering(rows_over(shares) if over.gathers else None):
                    result = forward(part.content)
                restore()
            loss, outputs, targets = result or (None, None, None)
            if result is not None and whole is not None:
                with precision.arithmetic(loader.device):
                    loss = whole([(outputs, part.content, part.samples > 0)])
            if result is not None and part.samples and objective is not None:
                loss, values = parted(loss)
                more, weight = _weighed(loss, over, part.content, part.samples)
                total, count = total + more, count + weight
                for name, kind in ((name, kind) for name, kind in over.logged if name in logged):
                    by = part.samples if kind == "samples" or whole is not None else weight
                    more, weight_of = weighed(name, values[name], "loss" if whole is not None else kind, by)
                    logged[name] = logged[name][0] + more, logged[name][1] + weight_of
            measured.update(outputs, targets, part.samples if result is not None else 0, batch.size)
        forward.finish()
    sums = {} if objective is None else {"loss": (total, count), **logged}
    summed = {"loss"} if over.kind == "sum" else set()
    summed |= {name for name, kind in over.logged if kind == "sum" and whole is None}
    means = _mean_over_ranks(sums | measured.sums(), summed, placed.mesh.over("pipeline", *SHARES), loader.device)
    found = means | measured.values()
    return {key: value for name in ("loss", *logged, *metrics) for key, value in found.items() if measures(name, key)}


def _weighed(loss: Any, over: LossDenominator, content: Any, samples: int) -> tuple[Any, Any]:
    if isinstance(loss, tuple | list):
        return (loss[0], loss[1]) if over.kind != "batch" else (loss[0] / loss[1] * samples, samples)
    loss = check_scalar(loss)
    if over.kind == "targets":
        count = over.count(content)
        return torch.where(count > 0, loss, 0.0) * count, count
    return (loss, 0) if over.kind == "sum" else (loss * samples, samples)


def _mean_over_ranks(
    sums: dict[str, tuple[Any, Any]], summed: set[str], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Totals over counts; those ``summed`` are left as totals. A mean over nothing is NaN."""
    flat = torch.tensor([float(value) for pair in sums.values() for value in pair], dtype=torch.float64)
    if group is not None:
        flat = flat.to(device)
        dist.all_reduce(flat, group=group)
    totals = list(zip(sums, flat.view(-1, 2).tolist(), strict=True))
    if broken := [name for name, (_, count) in totals if isnan(count)]:
        raise DataError(
            f"the metric {broken[0]!r} is no mean over samples, though it was one on the first batch",
            "return (sum, count), or give an object with update, compute and reset (torchmetrics has many)",
        )
    return {name: total if name in summed else total / count if count else nan for name, (total, count) in totals}


def outputs_of(
    placed: Placed, loader: Loader, precision: Precision, inputs: Callable[[Any], Any]
) -> Iterator[tuple[int, Any]]:
    """(position of its first sample, outputs on the CPU) of every part that this rank runs; the model is called with
    the ``inputs`` of a batch."""
    forward = PlacedForward(placed, lambda model, content: call(model, inputs(content)), precision, loader.device)
    with LIVE.evaluation(), evaluating(placed), buffers_kept(placed.model) as restore:
        seen = 0
        for batch in loader.epoch(0):
            at = seen + share(batch.size, loader.rank, loader.ranks).start
            for part in batch.microbatches:
                if not part.samples and not placed.together:
                    continue
                with counting(part.samples > 0):
                    outputs = forward(part.content)
                restore()
                if part.samples and placed.mesh.has_results:
                    if type(outputs) is list and tree.by_sample(part.content) and len(outputs) == part.samples:
                        outputs = tree.PerSample(outputs)
                    yield at, tree.map_tensors(_on_cpu, outputs)
                at += part.samples
            seen += batch.size
        forward.finish()


def _on_cpu(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu()
