"""A job in fp64: model, optimizer state, loss and floating-point data cast to double. Integers stay as they are."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.copies import to_precision
from meshfit.data import tree
from meshfit.data.datasets import NO_KEY, SampleStream, open_source
from meshfit.data.draw import Key
from meshfit.data.source import DerivedSource, Source
from meshfit.job import Job
from meshfit.torch_private.modules import map_tensors_in_place

LOWER = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_double = partial(to_precision, dtype=torch.float64)


def doubled(job: Job) -> Job:
    """A copy of ``job`` in fp64. The plan must not name a lower precision."""
    model, optimizer, loss = copy.deepcopy((job.build(), job.optimizer, _cast_loss(job.loss)))
    map_tensors_in_place(model, _double)  # parameters stay the same objects, which an optimizer refers to
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, _double(value))
    if isinstance(optimizer, torch.optim.Optimizer):
        for state in optimizer.state.values():
            state.update({key: _double(value) for key, value in state.items() if isinstance(value, Tensor)})
    return replace(job, model=model, optimizer=optimizer, loss=loss, data=DoubleData(job.data))


def _double_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.floating | np.ndarray) and leaf.dtype.kind == "f":
        return np.asarray(leaf, np.float64)
    return _double(leaf) if isinstance(leaf, Tensor) else leaf


def _cast_loss(loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """With the tensors that a loss holds."""
    if isinstance(loss, partial):
        keywords = {key: _double(v) if isinstance(v, Tensor) else v for key, v in loss.keywords.items()}
        return partial(_cast_loss(loss.func) or loss.func, *loss.args, **keywords)
    return copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss


@dataclass(frozen=True)
class DoubleData:
    """A job's data with floats in fp64; opened in the process that reads it."""

    data: Any

    def __call__(self) -> Source | SampleStream:
        source = open_source(self.data)
        return DoubleStream(source) if isinstance(source, SampleStream) else DoubleSource(source)


class DoubleSource(DerivedSource):
    def finish(self, content: Any, ids: NDArray[np.int64], key: Key) -> Any:
        return tree.map_tensors(_double, super().finish(content, ids, key))


class DoubleStream(SampleStream):
    def __init__(self, stream: SampleStream):
        super().__init__(stream.start, stream.collator)

    def batches(self, size: int, key: Key = NO_KEY) -> Iterator[list[Any]]:
        for samples in super().batches(size, key):
            yield [tree.map_leaves(_double_leaf, sample) for sample in samples]


class LowerPrecision(TorchFunctionMode):
    """Notes activations of less than fp64, since a model may cast them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.found:
            made = result if isinstance(result, tuple | list) else (result,)
            self.found = any(isinstance(t, Tensor) and t.dtype in LOWER and t.requires_grad for t in made)
        return result
