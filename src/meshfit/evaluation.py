"""Losses and metrics over a data set, every sample once, under any plan.

Each rank works through its share of every batch, ranks without a sample skip it, and the sums and counts are
added up at the end in one collective: nothing is padded, nothing counted twice.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.data import tree
from meshfit.data.loader import Loader
from meshfit.data.order import share
from meshfit.errors import DataError
from meshfit.layout.batchnorm import counting
from meshfit.layout.place import Placed
from meshfit.layout.precision import Precision
from meshfit.objective import Objective, Over, call, check_scalar, split

Metric = Callable[[Any, Any], Any]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients; afterwards as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def measure(
    placed: Placed,
    loader: Loader,
    *,
    objective: Objective | None,
    over: Over,
    metrics: Mapping[str, Metric],
    precision: Precision,
) -> dict[str, float]:
    """Means over all samples of ``loader``, on every rank: the loss (if there is one) and each metric."""
    sums: dict[str, tuple[Any, Any]] = {"loss": (0.0, 0.0)} if objective is not None else {}
    sums |= dict.fromkeys(metrics, (0.0, 0.0))

    def add(name: str, total: Any, count: Any) -> None:
        sums[name] = (sums[name][0] + total, sums[name][1] + count)

    def run(model: nn.Module, content: Any) -> tuple[Any, Any, Any]:
        """(loss, outputs, targets), as far as they are needed."""
        if objective is None:
            inputs, targets = split(content)
            return None, call(model, inputs), targets
        return objective.outputs(model, content) if metrics else (objective(model, content), None, None)

    forward = placed.forwards(run, precision, loader.device)
    with evaluating(placed.model):
        for batch in loader.epoch(0):
            for part in batch.microbatches:
                if not part.samples and not placed.together:
                    continue
                with counting(part.samples > 0):
                    result = forward(part.content)
                if result is None or not part.samples:
                    continue
                loss, outputs, targets = result
                if objective is not None:
                    add("loss", *_weighed(loss, over, part.content, part.samples))
                for name, metric in metrics.items():
                    add(name, *_reduced(name, metric(outputs, targets), part.samples))
        forward.finish()
    summed = {"loss"} if over.kind == "sum" else set()
    return _mean_over_ranks(sums, summed, placed.mesh.samples, loader.device)


def _weighed(loss: Any, over: Over, content: Any, samples: int) -> tuple[Any, Any]:
    if isinstance(loss, tuple | list):
        return loss[0], loss[1]
    loss = check_scalar(loss)
    if over.kind == "targets":
        count = over.count(content)
        return torch.where(count > 0, loss, 0.0) * count, count
    return (loss, 0) if over.kind == "sum" else (loss * samples, samples)


def _reduced(name: str, value: Any, samples: int) -> tuple[Any, Any]:
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, list | np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) == samples:
        return value.double().sum(), samples
    if isinstance(value, Tensor) and value.numel() != 1:
        raise DataError(
            f"the metric {name!r} gave a tensor of shape {tuple(value.shape)} for {samples} samples",
            "return a mean, one number a sample, or (sum, count)",
        )
    return (value.double() if isinstance(value, Tensor) else value) * samples, samples


def _mean_over_ranks(
    sums: dict[str, tuple[Any, Any]], summed: set[str], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Totals over counts; those ``summed`` are left as totals. A mean over nothing is NaN."""
    flat = torch.tensor([float(value) for pair in sums.values() for value in pair], dtype=torch.float64)
    if group is not None:
        flat = flat.to(device)
        dist.all_reduce(flat, group=group)
    totals = zip(sums, flat.view(-1, 2).tolist(), strict=True)
    return {name: total if name in summed else total / count if count else nan for name, (total, count) in totals}


def outputs_of(placed: Placed, loader: Loader, precision: Precision) -> Iterator[tuple[int, Any]]:
    """(position of its first sample, outputs on the CPU) of every part that this rank runs."""
    forward = placed.forwards(lambda model, content: call(model, split(content)[0]), precision, loader.device)
    with evaluating(placed.model):
        seen = 0
        for batch in loader.epoch(0):
            at = seen + share(batch.size, loader.rank, loader.ranks).start
            for part in batch.microbatches:
                if not part.samples and not placed.together:
                    continue
                with counting(part.samples > 0):
                    outputs = forward(part.content)
                if part.samples and placed.mesh.has_results:
                    yield at, tree.map_tensors(_on_cpu, outputs)
                at += part.samples
            seen += batch.size
        forward.finish()


def _on_cpu(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu()
