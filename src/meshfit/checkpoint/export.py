"""Weights for others: one safetensors file, or Hugging Face's layout, under the model's own names. Read and written in
parts of some MiB, whatever the size of the model. Tied weights are there once; the file's metadata says which they are.
"""

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshfit.arguments import check_local
from meshfit.checkpoint.box import sizes, slabs, whole
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.manifest import Stored
from meshfit.checkpoint.outside import INDEX, open_weights
from meshfit.checkpoint.read import AT_ONCE, Tensors
from meshfit.checkpoint.tensorfile import header
from meshfit.errors import CheckpointError

SHARD = 5 * 10**9
"""Bytes of a file in Hugging Face's layout."""


def export(
    source: Path | str,
    target: Path | str,
    *,
    kind: str = "model",
    dtype: torch.dtype | None = None,
    shard: int = SHARD,
    told: Callable[[int], None] = lambda done: None,
) -> list[Path]:
    """Write the weights at ``source`` to ``target``: a file if it is called .safetensors, else a folder in Hugging
    Face's layout. ``dtype``: cast floating point to it. The files that were written; nothing is overwritten."""
    check_local("target", target)
    tensors, ties = open_weights(source, kind)
    target = Path(target)
    stored = tensors.stored
    metadata = {"format": "pt", **{name: kept for name, kept in ties.items() if kept in stored}}
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(tensors, list(stored), target, metadata, dtype, told)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    groups = shards({key: _size(each, dtype) for key, each in stored.items()}, shard)
    if len(groups) == 1:
        _write(tensors, groups[0], target / "model.safetensors", metadata, dtype, told)
        return [target / "model.safetensors"]
    written, index = [], {}
    for i, keys in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        here = {key: value for key, value in metadata.items() if key == "format" or value in keys}
        _write(tensors, keys, target / name, here, dtype, told)
        written.append(target / name)
        index |= dict.fromkeys(keys, name)
    total = sum(_size(each, dtype) for each in stored.values())
    content = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n"
    Files(target).put(INDEX, [content.encode()])
    return [*written, target / INDEX]


def shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in their order, ``limit`` bytes a group at most, and one of them at least."""
    groups: list[list[str]] = [[]]
    held = 0
    for key, size in sizes.items():
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += size
    return groups


def _as(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype


def _size(stored: Stored, dtype: torch.dtype | None) -> int:
    return prod(stored.shape) * _as(stored, dtype).itemsize


def _write(
    tensors: Tensors,
    keys: list[str],
    path: Path,
    metadata: dict[str, str],
    dtype: torch.dtype | None,
    told: Callable[[int], None],
) -> None:
    if path.exists():
        raise CheckpointError(f"{path} is there already", "nothing is overwritten: remove it, or give another name")
    ordered = sorted(keys, key=lambda key: -_as(tensors.stored[key], dtype).itemsize)
    begin, _ = header({key: (_as(tensors.stored[key], dtype), tensors.stored[key].shape) for key in ordered}, metadata)
    Files(path.parent).put(path.name, _bytes(tensors, ordered, begin, dtype, told))


def _bytes(
    tensors: Tensors, keys: list[str], begin: bytes, dtype: torch.dtype | None, told: Callable[[int], None]
) -> Iterator[memoryview]:
    yield memoryview(begin)
    for key in keys:
        stored = tensors.stored[key]
        for box in slabs(whole(stored.shape), AT_ONCE // stored.dtype.itemsize):
            room: Tensor = torch.empty(sizes(box), dtype=stored.dtype)
            if not room.numel():
                continue
            tensors.fill(room, box, stored)
            told(room.numel() * room.dtype.itemsize)
            ready = room.to(_as(stored, dtype)).reshape(-1).view(torch.uint8)
            yield memoryview(ready.numpy())  # type: ignore[arg-type]
