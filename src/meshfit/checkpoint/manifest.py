"""A checkpoint's manifest: what tensors there are, the file and offset of each box of them, the CRC-32 and
SHA-256 of every block of every file, and all that is small. It is written last: a folder without one is no checkpoint.

    0007-step-120/manifest.json       {"sha256": of the rest, "manifest": {...}}
    0007-step-120/rank0.safetensors   what rank 0 wrote: whole tensors, or boxes of them as "model/NAME@0:64,0:128"

Names of tensors: model/NAME, extra/NAME (buffers that are not part of the state dict), optimizer/KEY/NAME,
average/NAME, best/NAME, scale/KEY, random/rankN/KIND. A manifest that was changed by one bit is not read; nor is one
whose SHA-256 is right and whose values cannot be.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from meshfit.checkpoint.box import Box, volume
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.plain import dtype_named
from meshfit.errors import CheckpointError, Damaged, NoCheckpoint

FORMAT = "meshfit checkpoint 1"
NAME = "manifest.json"
BLOCK, LARGEST_BLOCK = 4 * 2**20, 1 << 32
FOLDER = re.compile(r"(\d{4,})-step-(\d+)")
INSIDE = "checkpoints"
"""Within a run's folder."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, on disk."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor on disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredBox, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """One complete checkpoint, as its manifest describes it."""

    files: Files
    name: str
    """Of its folder."""
    body: dict[str, Any]

    def __str__(self) -> str:
        return os.path.join(str(self.files), self.name)

    @property
    def step(self) -> int:
        return self.body["step"]

    @property
    def block(self) -> int:
        return self.body["block"]

    @property
    def nbytes(self) -> int:
        return sum(about["size"] for about in self.body["files"].values())

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        return {
            key: Stored(
                dtype_named(about["dtype"]),
                tuple(about["shape"]),
                tuple(StoredBox(file, at, tuple((a, b) for a, b in box)) for file, at, box in about["parts"]),
            )
            for key, about in self.body["tensors"].items()
        }

    def named(self, kind: str) -> dict[str, Stored]:
        """The tensors of one kind ("model", "average"), by their own names."""
        return {
            key.removeprefix(f"{kind}/"): stored for key, stored in self.tensors.items() if key.startswith(f"{kind}/")
        }


def render(body: dict[str, Any]) -> bytes:
    inner = json.dumps(body, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(inner.encode()).hexdigest()
    return f'{{"sha256":"{digest}","manifest":{inner}}}\n'.encode()


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The body of a manifest; refused unless every byte is as it was written."""
    try:
        body = json.loads(content)["manifest"]
        intact = isinstance(body, dict) and render(body) == content
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{where} is damaged", f"{NAME} is no manifest") from None
    if not intact:
        raise Damaged(f"{where} is damaged", f"{NAME} has another SHA-256 than when it was written")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{where} is of another format", f"{body.get('format')!r}; this version reads {FORMAT!r}")
    try:
        _check(body)
    except (CheckpointError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{where} is damaged", f"{NAME} says what cannot be: {type(error).__name__}: {error}") from None
    return body


def _check(body: dict[str, Any]) -> None:
    """Raise something if sizes, offsets, boxes or the kinds of values are not what a save writes."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)

    for name in ("block", "step", "samples", "world", "batch_size"):
        need(_is_count(body[name]), f"{name} is {str(body[name])[:40]!r}")
    need(0 < body["block"] <= LARGEST_BLOCK, f"block is {body['block']}")
    need(isinstance(body["plan"], str), "plan is no text")
    state = body["state"]
    for name, kind in {"optimizer": dict, "groups": list, "values": dict, "data": dict}.items():
        need(isinstance(state[name], kind), f"state.{name} is no {kind.__name__}")
    for name, held in (("optimizer", state["optimizer"]), ("scheduler", state.get("scheduler"))):
        need(held is None or isinstance(held["kind"], str), f"state.{name} has no kind")
    need("best" in state, "state.best is missing")
    for name, about in body["files"].items():
        need(_is_count(about["size"]), f"{name} has no size")
        blocks = -(-about["size"] // body["block"])
        for digests, kind in ((about["sha256"], str), (about.get("crc32", [0] * blocks), int)):
            right = len(digests) == blocks and all(isinstance(each, kind) for each in digests)
            need(right, f"{name} has {blocks} blocks, and not as many hashes")
    for key, about in body["tensors"].items():
        size, shape = dtype_named(about["dtype"]).itemsize, about["shape"]
        need(isinstance(shape, list) and all(map(_is_count, shape)), f"{key} has no shape")
        for file, offset, box in about["parts"]:
            ranges = zip(box, shape, strict=True)
            right = all(_is_count(a) and _is_count(b) and a <= b <= length for (a, b), length in ranges)
            need(right and _is_count(offset), f"a part of {key} is no box of {shape}")
            end = offset + prod(b - a for a, b in box) * size
            need(end <= body["files"][file]["size"], f"a part of {key} ends after the end of {file}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def check_complete(body: dict[str, Any]) -> None:
    """Every element of every tensor is there once; an error of ours if not, and no checkpoint."""
    for key, about in body["tensors"].items():
        held, full = sum(volume(tuple(map(tuple, box))) for _, _, box in about["parts"]), prod(about["shape"])
        if held != full:
            raise CheckpointError(f"the ranks wrote {held} of {full} elements of {key}", "the checkpoint is not kept")


# Folders of checkpoints


def folder_name(step: int, taken: Iterable[str]) -> str:
    """A new one for ``step``, after all others: none is ever written to twice."""
    return f"{max(map(order, taken), default=0) + 1:04d}-step-{step}"


def order(name: str) -> int:
    """The how-manieth save of a folder it is: later ones are newer, whatever their steps. 0: no save."""
    found = FOLDER.fullmatch(name)
    return int(found[1]) if found else 0


def folders(files: Files) -> list[str]:
    """Whatever may be a checkpoint, newest first."""
    return sorted((name for name in files.names() if FOLDER.fullmatch(name)), key=order, reverse=True)


def read(files: Files, name: str) -> Manifest:
    """The checkpoint ``name``, if it is complete: its manifest intact, every file there and as long as it was."""
    where, shown = os.path.join(name, NAME), os.path.join(str(files), name)
    try:
        if files.size(where) < 0:
            raise Damaged(f"{shown} is not complete", "it has no manifest: its save did not end")
        found = Manifest(files, name, parse(files.read(where), os.path.join(shown, NAME)))
        for file, about in found.body["files"].items():
            if (size := files.size(os.path.join(name, file))) != about["size"]:
                there = "is missing" if size < 0 else f"has {size} bytes"
                raise Damaged(f"{found} is damaged", f"{file} {there}; {about['size']} were written")
    except OSError as error:
        raise Damaged(f"{shown} cannot be read", str(error)) from None
    return found


def standing(files: Files, name: str) -> str:
    """Whether the checkpoint ``name``, if there was one, is still there, in words."""
    if not name:
        return ""
    try:
        read(files, name)
    except CheckpointError as error:
        return f"{name}, the one before, is gone or damaged: {'; '.join(error.facts)}"
    return f"{name}, the one before, is complete"


@dataclass(frozen=True, slots=True)
class Skipped:
    name: str
    why: str


def complete(files: Files, skipped: list[Skipped] | None = None) -> Iterable[Manifest]:
    """Complete checkpoints, newest first. What is none is told to ``skipped``."""
    for name in folders(files):
        try:
            yield read(files, name)
        except CheckpointError as error:
            if skipped is not None:
                skipped.append(Skipped(name, "; ".join(error.facts)))


def find(path: Any) -> tuple[Files, str | None]:
    """What a user's path means: one checkpoint, or (None) a folder that holds some, maybe a run's folder."""
    files = open_files(path)
    if files.size(NAME) >= 0 or FOLDER.fullmatch(files.above()[1]):
        return files.above()
    if not folders(files) and folders(inner := files.inside(INSIDE)):
        return inner, None
    return files, None


def newest(path: Any, skipped: list[Skipped] | None = None) -> Manifest:
    """The checkpoint at ``path``, or the newest complete one in it."""
    files, name = find(path)
    if name is not None:
        return read(files, name)
    skipped = [] if skipped is None else skipped
    for found in complete(files, skipped):
        return found
    raise NoCheckpoint(f"there is no checkpoint in {files}", *(f"{each.name}: {each.why}" for each in skipped[:5]))
