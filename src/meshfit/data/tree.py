"""Batches and outputs are trees: tensors in tuples, lists, dicts and dataclasses. What is done to one
tensor is done to all of them, and the containers keep their types."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch


class Ragged(list):
    """One thing a sample that does not stack: words, bytes, images of different sizes. A leaf, not a container."""


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in ``tree`` that is not a container, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list) and not isinstance(tree, Ragged):
        for value in tree:
            yield from leaves(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """``fn`` of every leaf of ``tree`` (and of the leaves of ``rest`` that stand in the same places)."""
    if isinstance(tree, Mapping):
        new = {key: map_leaves(fn, value, *(r[key] for r in rest)) for key, value in tree.items()}
        return new if type(tree) is dict else _like(tree, new)
    if isinstance(tree, tuple | list) and not isinstance(tree, Ragged):
        items = [map_leaves(fn, *values) for values in zip(tree, *rest, strict=True)]
        if hasattr(tree, "_fields"):  # a named tuple
            return type(tree)(*items)
        return type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return dataclasses.replace(
            tree,
            **{name: map_leaves(fn, getattr(tree, name), *(getattr(r, name) for r in rest)) for name in names},
        )
    return fn(tree, *rest)


def _like(tree: Mapping, new: dict) -> Any:
    try:
        return type(tree)(**new)  # Hugging Face's outputs are dicts and dataclasses at once
    except TypeError:
        return type(tree)(new)  # type: ignore[call-arg]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """``model(inputs)``, ``model(*inputs)`` or ``model(**inputs)``, by what the inputs are."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def to_device(tree: Any, device: torch.device) -> Any:
    """``tree`` with its tensors on ``device``; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return tree
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)


def concatenate(trees: list[Any]) -> Any:
    """Trees of per-sample tensors joined along the first dim. Lists without tensors (words, say) are joined too; of
    anything else the first is taken."""
    first = trees[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(trees)
    if isinstance(first, list) and not any(True for _ in tensors(first)):
        return [item for tree in trees for item in tree]
    if isinstance(first, Mapping):
        new = {key: concatenate([tree[key] for tree in trees]) for key in first}
        return new if type(first) is dict else _like(first, new)
    if isinstance(first, tuple | list):
        items = [concatenate(list(parts)) for parts in zip(*trees, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{name: concatenate([getattr(t, name) for t in trees]) for name in names})
    return first


def size(tree: Any) -> int:
    """Samples in a batch."""
    return next((len(x) for x in leaves(tree) if isinstance(x, Ragged) or (isinstance(x, torch.Tensor) and x.dim())), 0)


def sample(tree: Any, i: int) -> Any:
    """The ``i``-th sample of a batch."""
    return map_leaves(lambda leaf: leaf[i] if isinstance(leaf, Ragged | torch.Tensor) else leaf, tree)


def stack(samples: list[Any]) -> Any:
    """A batch of samples, as torch collates them; what does not stack becomes ``Ragged``."""
    first = samples[0]
    if isinstance(first, Mapping):
        new = {key: stack([s[key] for s in samples]) for key in first}
        return new if type(first) is dict else _like(first, new)
    if isinstance(first, tuple | list) and not isinstance(first, Ragged):
        items = [stack(list(parts)) for parts in zip(*samples, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, torch.Tensor):
        same = all(s.shape == first.shape and s.dtype == first.dtype for s in samples)
        return torch.stack(samples) if same else Ragged(samples)
    if isinstance(first, str | bytes | memoryview):
        return Ragged(samples)
    if type(first).__module__.startswith("PIL."):
        first, samples = None, [np.array(s) for s in samples]
        samples = [s.transpose(2, 0, 1) if s.ndim == 3 else s[None] for s in samples]
    if first is None or isinstance(first, np.ndarray):
        return stack([torch.as_tensor(np.ascontiguousarray(s)) for s in samples])
    if isinstance(first, bool | int | float | np.generic):
        return torch.as_tensor(np.array(samples))
    return Ragged(samples)
