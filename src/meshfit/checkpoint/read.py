"""Tensors on disk, read box by box: only the bytes that a box needs, each block checked against
its CRC-32 on the way where there is one, never a whole model at once. ``verify`` checks SHA-256, at a third of the
speed: what a disk or a wire does to a block, either finds."""

import hashlib
import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshfit.checkpoint.box import Box, inside, overlap, sizes, volume
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.manifest import Manifest, Stored, StoredBox
from meshfit.errors import Damaged

AT_ONCE = 32 * 2**20
"""Bytes of a tensor in memory on their way."""


class Tensors(ABC):
    """Tensors under names, on disk."""

    as_is = False
    """Whether names and values are those of a model in memory, in no other form of Hugging Face's."""

    def __init__(self, stored: Mapping[str, Stored], where: str):
        self.stored, self.where = stored, where

    @abstractmethod
    def rows(self, stored: Stored, part: StoredBox, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a part, counted row by row, as one row. Valid until the next call in the
        same thread, and not to be written to."""

    def fill(self, room: Tensor, box: Box, stored: Stored) -> None:
        """Put ``box`` of a tensor into ``room``."""
        held = 0
        for part in stored.parts:
            common = overlap(box, part.box)
            if common is not None and volume(common):
                held += volume(common)
                self._copy(room[inside(box, common)], common, stored, part)
        if held != volume(box):
            raise Damaged(f"{self.where} is damaged", "it lacks a part of a tensor")

    def _copy(self, room: Tensor, common: Box, stored: Stored, part: StoredBox) -> None:
        size, at = sizes(part.box), inside(part.box, common)
        while len(size) > 1 and size[0] == 1:  # a row is what is read at least: not more than one has to be
            size, at, room = size[1:], at[1:], room[0]
        if not size:
            room.copy_(self.rows(stored, part, 0, 1).view(()))
            return
        row = prod(size[1:])
        together = max(1, AT_ONCE // max(1, row * stored.dtype.itemsize))
        for start in range(at[0].start, at[0].stop, together):
            stop = min(start + together, at[0].stop)
            read = self.rows(stored, part, start * row, stop * row).view(stop - start, *size[1:])
            first = start - at[0].start
            room[first : first + stop - start].copy_(read[(slice(None), *at[1:])])


class OnDisk(Tensors):
    """In files, at offsets: a checkpoint of meshfit's, or safetensors files (without hashes)."""

    def __init__(
        self, files: Files, folder: str, stored: Mapping[str, Stored], hashes: Mapping[str, "Hashes"], where: str
    ):
        super().__init__(stored, where)
        self.files, self.folder, self.hashes = files, folder, hashes
        self._local = threading.local()

    @classmethod
    def of(cls, found: Manifest) -> "OnDisk":
        hashes = {
            file: Hashes(about["size"], found.block, about.get("crc32") or about["sha256"])
            for file, about in found.body["files"].items()
        }
        return cls(found.files, found.name, found.tensors, hashes, str(found))

    def rows(self, stored: Stored, part: StoredBox, start: int, stop: int) -> Tensor:
        item = stored.dtype.itemsize
        room = torch.empty((stop - start) * item, dtype=torch.uint8)
        self._into(part.file, part.offset + start * item, room)
        return room.view(stored.dtype)

    def _copy(self, room: Tensor, common: Box, stored: Stored, part: StoredBox) -> None:
        """As for all; but where the bytes on disk are in the order of ``room``, they are read straight into it."""
        at, size = inside(part.box, common), sizes(part.box)
        alike = all((s.start, s.stop) == (0, n) for s, n in zip(at[1:], size[1:], strict=True))
        if not alike or not room.is_contiguous() or room.device.type != "cpu" or room.dtype != stored.dtype:
            super()._copy(room, common, stored, part)
            return
        first = at[0].start * prod(size[1:]) * stored.dtype.itemsize if at else 0
        row = room.as_strided((room.numel(),), (1,))  # a dim of one may have any stride
        self._into(part.file, part.offset + first, row.view(torch.uint8))

    def _into(self, file: str, first: int, room: Tensor) -> None:
        """Fill ``room`` with a file's bytes from ``first`` on. Blocks that go in whole are read and checked there."""
        hashes, at, last = self.hashes.get(file), first, first + room.numel()
        view = memoryview(room.numpy())  # type: ignore[arg-type]
        while at < last:
            low, high = (at, last) if hashes is None else hashes.around(at)
            stop = min(high, last)
            if low == at and high <= last:
                self._fetch(file, low, view[at - first : stop - first])
            else:
                view[at - first : stop - first] = self._block(file, low, high)[at - low : stop - low]
            at = stop

    def _block(self, file: str, low: int, high: int) -> memoryview:
        """A block of a file. Each thread keeps its last one: two tensors may share it."""
        if getattr(self._local, "block", None) != (file, low):
            self._local.block, self._local.memory = None, memoryview(bytearray(high - low))
            self._fetch(file, low, self._local.memory)
            self._local.block = (file, low)
        return self._local.memory

    def _fetch(self, file: str, start: int, view: memoryview) -> None:
        try:
            got = self.files.read_into(os.path.join(self.folder, file), start, view)
        except OSError as error:
            raise Damaged(f"{self.where} cannot be read", f"{file}: {error}") from None
        if got != len(view):
            raise Damaged(f"{self.where} is damaged", f"{file} ends at byte {start + got}")
        if (hashes := self.hashes.get(file)) is not None:
            hashes.check(view, start, f"{file} of {self.where}")


@dataclass(frozen=True, slots=True)
class Hashes:
    """The CRC-32 (a number) or SHA-256 (text) of each block of a file."""

    size: int
    block: int
    digests: Sequence[int | str]

    def around(self, at: int) -> tuple[int, int]:
        """The block that holds byte ``at``."""
        start = at // self.block * self.block
        return start, min(start + self.block, self.size)

    def check(self, content: memoryview, start: int, name: str) -> None:
        """``content`` is the file from byte ``start`` on: whole blocks."""
        for at in range(0, len(content), self.block):
            wanted, now = self.digests[(start + at) // self.block], content[at : at + self.block]
            if (zlib.crc32(now) if isinstance(wanted, int) else hashlib.sha256(now).hexdigest()) != wanted:
                ends = f"{start + at} to {min(start + at + self.block, self.size)}"
                kind = "CRC-32" if isinstance(wanted, int) else "SHA-256"
                raise Damaged(f"{name} is damaged", f"bytes {ends} are not what was written: their {kind} differs")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box, and the memory it is to be put into."""

    key: str
    box: Box
    room: Tensor


def fill_all(tensors: Tensors, wanted: list[Wanted], threads: int = 1) -> None:
    """Read everything that is wanted, in the order of the files, so that no block is read twice."""

    def place(want: Wanted) -> tuple[str, int]:
        for part in tensors.stored[want.key].parts:
            if overlap(want.box, part.box) is not None:
                return part.file, part.offset
        return "", 0

    ordered = sorted(wanted, key=place)
    total = sum(want.room.numel() * want.room.dtype.itemsize for want in ordered)
    groups: list[list[Wanted]] = [[]]
    filled = 0
    for want in ordered:
        if filled > total / threads * len(groups):
            groups.append([])
        groups[-1].append(want)
        filled += want.room.numel() * want.room.dtype.itemsize

    def work(group: list[Wanted]) -> None:
        for want in group:
            tensors.fill(want.room, want.box, tensors.stored[want.key])

    if len(groups) == 1:
        work(groups[0])
        return
    with ThreadPoolExecutor(len(groups), thread_name_prefix="meshfit-load") as pool:
        for each in [pool.submit(work, group) for group in groups]:
            each.result()


def verify(found: Manifest, progress=lambda done: None) -> list[str]:  # type: ignore[no-untyped-def]
    """Read every byte of a checkpoint; what is wrong with it, file by file."""
    wrong = []
    memory = bytearray(found.block)
    there = set(found.files.names(found.name)) - {"manifest.json"}
    for file, about in found.body["files"].items():
        hashes = Hashes(about["size"], found.block, about["sha256"])
        there.discard(file)
        for start in range(0, about["size"], found.block):
            view = memoryview(memory)[: min(found.block, about["size"] - start)]
            try:
                got = found.files.read_into(os.path.join(found.name, file), start, view)
                if got != len(view):
                    raise Damaged(f"{file} is damaged", f"it ends at byte {start + got}")
                hashes.check(view, start, file)
            except (Damaged, OSError) as error:
                wrong.append("; ".join((error.headline, *error.facts)) if isinstance(error, Damaged) else str(error))
                break
            progress(len(view))
    return wrong + [f"{name} does not belong to it" for name in sorted(there)]
