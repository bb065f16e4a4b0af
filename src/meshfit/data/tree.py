"""Batches and outputs are trees: tensors in tuples, lists, dicts and dataclasses. What is done to one
tensor is done to all of them, and the containers keep their types."""

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshfit.errors import DataError


class Ragged(list):
    """One value per sample that does not stack: words, bytes, images of different sizes. A leaf, not a container."""


class PerSample(list):
    """One value per sample, of any structure: images and boxes as detection models take them. A container."""


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


def digest(tree: Any, most: int = 64) -> int:
    """31 bits of its values: of a tensor, of its first ``most``."""
    found = 0
    for leaf in leaves(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            leaf = torch.from_numpy(np.array(leaf.ravel()[:most], order="C")) if leaf.dtype.kind in "biufc" else None
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
            values = leaf.detach().flatten()[:most].cpu().contiguous().view(torch.uint8)
            found = zlib.crc32(values.numpy().tobytes(), found)
        elif isinstance(leaf, bool | int | float | str | bytes):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found >> 1


def is_ragged(tree: Any) -> bool:
    return isinstance(tree, Ragged)


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] = is_ragged) -> Any:
    """``fn`` of every leaf of ``tree`` (and of the leaves of ``rest`` that stand in the same places)."""
    if is_leaf(tree):
        return fn(tree, *rest)
    if isinstance(tree, Mapping):
        new = {key: map_leaves(fn, value, *(r[key] for r in rest), is_leaf=is_leaf) for key, value in tree.items()}
        if type(tree) is dict:
            return new
        try:
            return type(tree)(**new)  # Hugging Face's outputs are dicts and dataclasses at once
        except TypeError:
            return type(tree)(new)  # type: ignore[call-arg]
    if isinstance(tree, tuple | list):
        items = [map_leaves(fn, *values, is_leaf=is_leaf) for values in zip(tree, *rest, strict=True)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)  # the first: a named tuple
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        inner = {n: [getattr(each, n) for each in (tree, *rest)] for n in names}
        return dataclasses.replace(tree, **{n: map_leaves(fn, *each, is_leaf=is_leaf) for n, each in inner.items()})
    return fn(tree, *rest)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """``model(inputs)``, ``model(*inputs)`` or ``model(**inputs)``, by what the inputs are."""
    if isinstance(inputs, Mapping):
        try:
            return model(**inputs)
        except TypeError as error:
            raise _other_fields(model, inputs) or error from None
    if isinstance(inputs, tuple | list) and not isinstance(inputs, PerSample):
        return model(*inputs)
    return model(inputs)


def _other_fields(model: Any, inputs: Mapping[str, Any]) -> DataError | None:
    """What is wrong with the names of a batch, if anything is."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(**inputs)
    except TypeError as why:
        return DataError(
            f"the model cannot be called with the fields of a batch: {why}",
            f"it is called with {', '.join(map(str, inputs))}",
            "leave others out of the samples, or call it in step=lambda model, batch: ... with those that it takes",
        )
    return None


def to_device(tree: Any, device: torch.device) -> Any:
    """``tree`` with its tensors on ``device``; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return tree
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)


def concatenate(trees: list[Any], *, ragged: bool = False) -> Any:
    """Trees of per-sample values joined along the first dim. Lists without tensors (words, say) are joined too; of
    anything else the first is taken. ``ragged``: tensors that differ in other dims become a list, one for each sample;
    else they are an error."""

    def joined(*parts: Any) -> Any:
        if any(map(is_ragged, parts)):
            return Ragged(item for part in parts for item in part)
        if isinstance(parts[0], list):
            return type(parts[0])(item for part in parts for item in part)
        if not isinstance(parts[0], torch.Tensor) or not parts[0].dim():
            return parts[0]
        if ragged and any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            return PerSample(row for part in parts for row in part)
        return torch.cat(parts)

    words = lambda tree: isinstance(tree, list) and not any(True for _ in tensors(tree))
    return map_leaves(joined, *trees, is_leaf=lambda tree: isinstance(tree, Ragged | PerSample) or words(tree))


def size(tree: Any) -> int:
    """Samples in a batch."""
    if (items := by_sample(tree)) is not None:
        return len(items)
    return next((len(x) for x in leaves(tree) if is_ragged(x) or (isinstance(x, torch.Tensor) and x.dim())), 0)


def by_sample(tree: Any) -> PerSample | None:
    """The first list of samples in a batch."""
    if isinstance(tree, PerSample):
        return tree
    inside = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return next((found for each in inside if (found := by_sample(each)) is not None), None)


def rows(tree: Any, index: slice | torch.Tensor, samples: int) -> Any:
    """Some of the samples of a batch of so many; what does not hold one row a sample stays as it is."""
    words = isinstance(tree, list) and len(tree) == samples and not any(True for _ in tensors(tree))
    if words or isinstance(tree, PerSample):
        return type(tree)(tree[index] if isinstance(index, slice) else [tree[i] for i in index.tolist()])
    if isinstance(tree, dict):
        return type(tree)({key: rows(value, index, samples) for key, value in tree.items()})
    if type(tree) in (tuple, list):
        return type(tree)(rows(value, index, samples) for value in tree)
    return map_tensors(lambda t: t[index] if t.dim() and len(t) == samples else t, tree)


def sample(tree: Any, i: int) -> Any:
    """The ``i``-th sample of a batch."""
    row = lambda leaf: leaf[i] if isinstance(leaf, Ragged | PerSample | torch.Tensor) else leaf
    return map_leaves(row, tree, is_leaf=lambda t: isinstance(t, Ragged | PerSample))


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same values."""
    one, other = list(leaves(a)), list(leaves(b))
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        floats = a.is_floating_point() or a.is_complex()
        return a.shape == b.shape and (torch.allclose(a, b, 0, 0, equal_nan=True) if floats else torch.equal(a, b))
    if isinstance(a, Ragged):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool(a == b) or a != a  # NaN is alike


def take(tree: Any, rows: Sequence[int] | NDArray[np.int64]) -> Any:
    """The samples ``rows`` of a batch, in that order."""

    def taken(leaf: Any) -> Any:
        if is_ragged(leaf):
            return Ragged(leaf[i] for i in rows)
        return leaf[torch.as_tensor(rows)] if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(taken, tree)


def stack(samples: list[Any]) -> Any:
    """A batch of samples, as torch collates them; what does not stack becomes ``Ragged``."""
    return map_leaves(lambda *leaves: _stacked(list(leaves)), *samples, is_leaf=lambda t: is_ragged(t) or _is_record(t))


def _is_record(tree: Any) -> bool:
    """A dataclass that is no dict: samples of it are not stacked field by field."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, Mapping)


def _stacked(samples: list[Any]) -> Any:
    first = samples[0]
    if isinstance(first, torch.Tensor):
        same = all(s.shape == first.shape and s.dtype == first.dtype for s in samples)
        return torch.stack(samples) if same else Ragged(samples)
    if isinstance(first, str | bytes):
        return Ragged(samples)
    if type(first).__module__.startswith("PIL."):
        samples = [np.array(s) for s in samples]
        samples = [s.transpose(2, 0, 1) if s.ndim == 3 else s[None] for s in samples]
    if isinstance(samples[0], np.ndarray):
        return _stacked([torch.as_tensor(np.ascontiguousarray(s)) for s in samples])
    if isinstance(first, bool | int | float | np.generic):
        return torch.as_tensor(np.array(samples))
    return Ragged(samples)


def refuse_frames(data: Any, name: str) -> None:
    """Of pandas or polars: which of torch's types a column becomes is for the caller to say."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else [data]
    frame = next((part for part in parts if type(part).__name__ in ("DataFrame", "Series")), None)
    if frame is not None:
        raise DataError(
            f"{name}= holds a {type(frame).__name__} of {type(frame).__module__.partition('.')[0]}",
            f"give arrays: {name}={{column: frame[column].to_numpy() for column in frame.columns}}",
            "or a file, of which ranks read what they need: meshfit.data.parquet(path), csv(path)",
        )
