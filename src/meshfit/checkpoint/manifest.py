"""A checkpoint's manifest: what tensors there are, in which file and where each box of them lies, the CRC-32 and
SHA-256 of every block of every file, and all that is small. It is written last: a folder without one is no checkpoint.

    0007-step-120/manifest.json       {"sha256": of the rest, "manifest": {...}}
    0007-step-120/rank0.safetensors   what rank 0 wrote: whole tensors, or boxes of them as "model/NAME@0:64,0:128"

Names of tensors: model/NAME, extra/NAME (buffers that are not part of the state dict), optimizer/KEY/NAME,
average/NAME, best/NAME, scale/KEY, random/rankN/KIND. A manifest that was changed by one bit is not read.
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
from meshfit.checkpoint.sound import wrong
from meshfit.errors import CheckpointError, Damaged

FORMAT = "meshfit checkpoint 1"
NAME = "manifest.json"
BLOCK = 4 * 2**20
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
    """One complete checkpoint, as its manifest tells it."""

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
    if (told := wrong(body)) is not None:
        raise Damaged(f"{where} is damaged", f"{NAME} says what cannot be: {told}")
    return body


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
    where = os.path.join(name, NAME)
    if files.size(where) < 0:
        raise Damaged(f"{os.path.join(str(files), name)} is not complete", "it has no manifest: its save did not end")
    found = Manifest(files, name, parse(files.read(where), os.path.join(str(files), where)))
    for file, about in found.body["files"].items():
        if (size := files.size(os.path.join(name, file))) != about["size"]:
            there = "is missing" if size < 0 else f"has {size} bytes"
            raise Damaged(f"{found} is damaged", f"{file} {there}; {about['size']} were written")
    return found


def standing(files: Files, name: str) -> str:
    """Whether the checkpoint ``name``, if there was one, is still there, in words."""
    if not name:
        return ""
    try:
        read(files, name)
    except (CheckpointError, OSError) as error:
        why = "; ".join(error.facts) if isinstance(error, CheckpointError) else str(error)
        return f"{name}, the one before, is gone or damaged: {why}"
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
        except (CheckpointError, OSError) as error:
            if skipped is not None:
                why = "; ".join(error.facts) if isinstance(error, CheckpointError) else str(error)
                skipped.append(Skipped(name, why))


def find(path: Any) -> tuple[Files, str | None]:
    """What a user's path means: one checkpoint, or (None) a folder that holds some, maybe a run's folder."""
    files = open_files(path)
    if files.size(NAME) >= 0 or FOLDER.fullmatch(os.path.basename(str(files).rstrip("/"))):
        above, _, name = str(files).rstrip("/").rpartition("/")
        return open_files(above or ("/" if str(files).startswith("/") else ".")), name
    if not folders(files) and folders(inner := open_files(os.path.join(str(files), INSIDE))):
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
    raise CheckpointError(f"there is no checkpoint in {files}", *(f"{each.name}: {each.why}" for each in skipped[:5]))
