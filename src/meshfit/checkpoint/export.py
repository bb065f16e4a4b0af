"""Weights into safetensors files: one, or several and an index, as Hugging Face has them. Written as they come, in
parts or tensor by tensor, whatever the size of the model. Tied weights are there once; a file's metadata names them.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.arguments import check_text
from meshfit.checkpoint.box import sizes, slabs, whole
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.outside import AS_IS, INDEX, open_weights
from meshfit.checkpoint.read import AT_ONCE
from meshfit.checkpoint.tensorfile import header
from meshfit.errors import CheckpointError

SHARD = 5 * 10**9
"""Bytes of a file in Hugging Face's layout."""

Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors to be written: dtype and shape, by name."""


def export(
    source: Path | str,
    target: Path | str,
    *,
    kind: str = "model",
    dtype: torch.dtype | None = None,
    shard: int = SHARD,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Path | str]:
    """Write the weights at ``source`` to ``target``: a file if it is called .safetensors, else a folder in Hugging
    Face's layout. ``dtype``: cast floating point to it. The files that were written; nothing is overwritten."""
    tensors, ties = open_weights(source, kind)

    def chunks(key: str) -> Iterator[Tensor]:
        stored = tensors.stored[key]
        for box in slabs(whole(stored.shape), AT_ONCE // stored.dtype.itemsize):
            room: Tensor = torch.empty(sizes(box), dtype=stored.dtype)
            tensors.fill(room, box, stored)
            progress(room.numel() * room.dtype.itemsize)
            yield room

    described = {key: (each.dtype, each.shape) for key, each in tensors.stored.items()}
    return write(target, described, chunks, ties=ties, as_is=tensors.as_is, dtype=dtype, shard=shard)


def write(
    target: Path | str,
    described: Described,
    chunks: Callable[[str], Iterable[Tensor]],
    *,
    ties: Mapping[str, str] | None = None,
    as_is: bool = False,
    dtype: torch.dtype | None = None,
    shard: int = SHARD,
    stem: str = "model",
    overwrite: bool = False,
    here: bool = True,
) -> list[Path | str]:
    """Write tensors, each given by ``chunks`` in parts along its first dim. Where ranks put them together all call this
    with the same ones, and one of them writes ``here``: if it cannot, the others still come to the end."""
    cast = {name: (_as(kind, dtype), shape) for name, (kind, shape) in described.items()}
    check_text("target", target)
    folder, name = open_files(target), ""
    one = folder.above()[1].endswith(".safetensors")
    if one:
        folder, name = folder.above()
    sizes_of = {name: prod(shape) * kind.itemsize for name, (kind, shape) in cast.items()}
    groups = [list(cast)] if one else shards(sizes_of, shard)
    files = [name if one else f"{stem}.safetensors"]
    if len(groups) > 1:
        files = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for names in groups:
        names.sort(key=lambda name: -cast[name][0].itemsize)  # so each is aligned
    streams = [(part.to(_as(part.dtype, dtype)) for name in names for part in chunks(name)) for names in groups]
    try:
        if here:
            if not overwrite:
                _refuse_taken(folder, [*files, INDEX])
            for file, names, stream in zip(files, groups, streams, strict=True):
                metadata = {"format": "pt"} | ({AS_IS: "as is"} if as_is else {})
                metadata |= {name: kept for name, kept in (ties or {}).items() if kept in names}
                begin, _ = header({name: cast[name] for name in names}, metadata)
                folder.put(file, _bytes(begin, stream))
    finally:
        if dist.is_initialized():  # whoever writes needs the parts of all ranks, which all go through all of them
            deque(chain.from_iterable(streams), maxlen=0)
    if here and len(groups) > 1:
        index = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        content = {"metadata": {"total_size": sum(sizes_of.values())}, "weight_map": index}
        files = [*files, f"{stem}.safetensors.index.json"]
        folder.put(files[-1], [(json.dumps(content, indent=2) + "\n").encode()])
    return [folder.where(file) for file in files]


def _refuse_taken(folder: Files, files: list[str]) -> None:
    folder.make()
    taken = next((folder.where(file) for file in files if folder.size(file) >= 0), None)
    if taken is not None:
        raise CheckpointError(f"{taken} is there already", "nothing is overwritten: remove it, or give another name")


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


def _as(kind: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and kind.is_floating_point else kind


def _bytes(begin: bytes, tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    yield memoryview(begin)
    for tensor in tensors:
        if tensor.numel():
            row = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            yield memoryview(row.numpy())  # type: ignore[arg-type]
