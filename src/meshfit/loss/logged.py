"""Values that a step logs beside its loss: ``(loss, {"name": value})``.

Parts of a batch (microbatches, ranks) add to a value what they weigh in it, so that it comes out as one device would
have it. What a value is a mean over is found by the trial that finds it of the loss (trial.py): what the loss is a mean
over, or samples; or it is a sum. One that is none of these (a maximum, a standard deviation) is the mean of its parts.
A pair (sum, count) says so itself.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.buffers.watch import buffers_kept, modes_kept
from meshfit.axes.spec import whole_output
from meshfit.data import tree
from meshfit.errors import DataError
from meshfit.generators import Generators
from meshfit.loss.objective import Objective
from meshfit.step import parted


def weighed(name: str, value: Any, over: str, weight: Any) -> tuple[Any, Any]:
    """What a part of a batch adds to a logged value: (total, what it is over), over 0 for a sum. ``weight``: of the
    part, where the value is a mean."""
    if isinstance(value, tuple | list):
        total, count = (_one_number(name, each) for each in value)
        return total, count
    value = _one_number(name, value)
    if over == "sum":
        return value, 0.0
    if isinstance(weight, Tensor):  # a mean over nothing is NaN, and weighs nothing
        return torch.where(weight > 0, value, 0.0) * weight, weight
    return (value * weight if weight else 0.0), weight


def _one_number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, bool | int | float):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise DataError(f"the step returned {what} as {name!r}, to be logged", "return one number, or (sum, count)")


def as_numbers(logged: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    found = {}
    for name, value in whole_output(dict(logged)).items():
        total, count = weighed(name, value, "sum", 1.0)
        found[name] = float(total), float(count) if isinstance(value, tuple | list) else None
    return found


def value_names(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    device: torch.device,
    inside: Callable[[], AbstractContextManager[None]] | None = None,
) -> tuple[str, ...]:
    """What ``objective`` logs, by a forward of two samples: where batches are not cut, and nothing else is to be known.
    All ranks of a model that is laid out call it together."""
    there = tree.size(batch)
    batch = tree.to_device(tree.rows(batch, slice(0, min(2, there)), there), device)
    start = Generators(device)
    for train in (False, True):
        try:
            with buffers_kept(model), modes_kept(model) as modes, torch.no_grad(), (inside or nullcontext)():
                for module, mode in modes.items():
                    module.training = mode and train
                return tuple(parted(objective(model, tree.map_tensors(torch.clone, batch)))[1])
        except Exception:  # training will say what is wrong
            continue
        finally:
            start.restore()
    return ()
