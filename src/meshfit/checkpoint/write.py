"""One save: each rank writes the boxes it was chosen for into a file of its own and acknowledges it; then the first
rank, and only if all have, writes the manifest. Until then the folder is no checkpoint.

Acknowledgements are files too: a rank's list of what it wrote and the hashes of each block, with the save's own number
so that nothing left over from another save can be taken for one. They go into the manifest, and are removed before it.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from meshfit.checkpoint import manifest
from meshfit.checkpoint.box import Box, sizes, volume, whole
from meshfit.checkpoint.files import Files, refused
from meshfit.checkpoint.state import Item, fingerprint, merged
from meshfit.checkpoint.tensorfile import header
from meshfit.errors import CheckpointError
from meshfit.live import LIVE

PATIENCE = 1800.0
"""Seconds that the first rank waits for the others' acknowledgements."""

MUCH, THREADS = 16 * 2**20, 4
"""From so many bytes on, host memory is copied by so many threads: one does not use all of its bandwidth."""

HASHERS = 2
"""Threads that hash what is being written: SHA-256 takes longer than a disk that is fast."""

Described = tuple[str, str, tuple[int, ...], Box, bool, int]
"""Key, dtype, shape of the whole, box, whether the first must write it, bytes."""


def describe(items: list[Item]) -> list[Described]:
    return [(i.key, str(i.dtype).removeprefix("torch."), i.shape, i.box, i.first, i.nbytes) for i in items]


def assign(ranks: list[list[Described]]) -> list[list[int]]:
    """Which of its items each rank writes: every box once, and about as much for every rank."""
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = defaultdict(list)
    facts: dict[tuple[str, Box], tuple[bool, int]] = {}
    for rank, items in enumerate(ranks):
        for i, (key, _, _, box, first, size) in enumerate(items):
            holders[key, box].append((rank, i))
            facts.setdefault((key, box), (first, size))
    chosen: list[list[int]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    for at in sorted(holders, key=lambda at: (len(holders[at]) > 1, -facts[at][1])):  # those without a choice first
        first, size = facts[at]
        rank, i = holders[at][0] if first else min(holders[at], key=lambda held: (load[held[0]], held[0]))
        chosen[rank].append(i)
        load[rank] += size
    return [sorted(indices) for indices in chosen]


def _hashed(block: list[memoryview]) -> tuple[int, str]:
    crc, digest = 0, hashlib.sha256()
    for part in block:
        crc = zlib.crc32(part, crc)
        digest.update(part)
    LIVE.tick()
    return crc, digest.hexdigest()


@dataclass
class RankSave:
    """What one rank writes in one save: already in host memory, laid out as in the file."""

    files: Files
    folder: str
    number: str
    """Of the save: no two have the same."""

    rank: int
    ranks: int
    begin: bytes
    """The header of the file."""

    host: Tensor
    """All that follows it."""

    tensors: dict[str, Any]
    """For the manifest: dtype, shape, and [offset, box] of each part."""

    own: dict[str, Any] | None
    """The rank's own facts; None if another writes the same."""

    common: dict[str, Any] | None = None
    """The first rank's."""

    block: int = manifest.BLOCK
    kept: str = ""
    """The checkpoint before this one, for the message if this one fails."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"rank{self.rank}.safetensors"

    def write(self) -> None:
        """Have this rank's file and acknowledgement on disk; or no file, and word that it failed."""
        name, began, blocks = os.path.join(self.folder, self.file), time.perf_counter(), list(self._blocks())
        pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="meshfit-hash")
        try:
            found = pool.map(_hashed, blocks)  # beside the writing, which waits for the disk
            size = self.files.write(name, chain.from_iterable(blocks))
            hashes = dict(zip(("crc32", "sha256"), map(list, zip(*found, strict=True)), strict=True))
            said = {"number": self.number, "file": {"size": size, **hashes}, "tensors": self.tensors, "own": self.own}
            self.files.put(os.path.join(self.folder, f"rank{self.rank}.json"), [json.dumps(said).encode()])
        except BaseException as error:
            self._fail(name, error)
            if isinstance(error, OSError):
                needed, before = len(self.begin) + self.host.numel(), manifest.standing(self.files, self.kept)
                raise refused(error, self.files, name, needed, before) from error
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self.seconds["write"] = time.perf_counter() - began

    def _blocks(self) -> Iterator[list[memoryview]]:
        """The file's bytes, cut where blocks end: the header goes on into the tensors."""
        begin, host = memoryview(self.begin), memoryview(self.host.numpy())  # type: ignore[arg-type]
        for start in range(0, len(begin) + len(host), self.block):
            end = start + self.block
            parts = (begin[start:end], host[max(0, start - len(begin)) : max(0, end - len(begin))])
            yield [part for part in parts if len(part)]

    def _fail(self, name: str, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # the room it took comes first: on a full disk nothing else can be said
            self.files.remove(name)
        with contextlib.suppress(OSError):
            said = f"{type(error).__name__}: {error}"
            self.files.write(os.path.join(self.folder, f"rank{self.rank}.failed"), [said.encode()])

    def complete(self, patience: float = PATIENCE) -> manifest.Manifest:
        """Wait for all ranks, and make it a checkpoint. On the first rank."""
        assert self.common is not None
        began = time.perf_counter()
        try:
            said = self._acknowledged(patience)
            body = self._body(said)
            for rank in range(self.ranks):
                self.files.remove(os.path.join(self.folder, f"rank{rank}.json"))
            self.files.put(os.path.join(self.folder, manifest.NAME), [manifest.render(body)])
            self.files.sync()
        except BaseException as error:
            with contextlib.suppress(OSError):
                if self.files.size(os.path.join(self.folder, manifest.NAME)) < 0:
                    self.files.remove_folder(self.folder)
            if isinstance(error, OSError):
                raise refused(error, self.files, self.folder, 0, manifest.standing(self.files, self.kept)) from error
            raise
        self.seconds["complete"] = time.perf_counter() - began
        return manifest.Manifest(self.files, self.folder, body)

    def _acknowledged(self, patience: float) -> list[dict[str, Any]]:
        until, pause = time.monotonic() + patience, 0.002
        others = threading.Event()  # whoever watches this rank reads that it waits
        said: dict[int, dict[str, Any]] = {}
        while True:
            there = set(self.files.names(self.folder))
            for rank in range(self.ranks):
                if f"rank{rank}.failed" in there:
                    raise self._unwritten(f"rank {rank}: {self._read(f'rank{rank}.failed')}")
                if rank not in said and f"rank{rank}.json" in there:
                    said[rank] = json.loads(self._read(f"rank{rank}.json"))
                    if said[rank]["number"] != self.number:
                        raise CheckpointError(f"rank {rank} acknowledged another save into {self.folder}")
            if len(said) == self.ranks:
                return [said[rank] for rank in range(self.ranks)]
            if self.rank not in said:  # its own part was written before it waits for the others'
                raise self._unwritten("what was written of it is gone")
            if time.monotonic() > until:
                missing = ", ".join(str(rank) for rank in range(self.ranks) if rank not in said)
                text = f"rank {missing} did not write its part of {self.folder}"
                raise CheckpointError(text, f"waited {patience:.0f} s")
            others.wait(pause)
            pause = min(0.1, pause * 1.5)

    def _read(self, name: str) -> str:
        return self.files.read(os.path.join(self.folder, name)).decode()

    def _unwritten(self, why: str) -> CheckpointError:
        text = f"the checkpoint {os.path.join(str(self.files), self.folder)} could not be written"
        return CheckpointError(text, why, manifest.standing(self.files, self.kept))

    def _body(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for rank, one in enumerate(said):
            for key, (dtype, shape, parts) in one["tensors"].items():
                about = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "parts": []})
                if (about["dtype"], about["shape"]) != (dtype, shape):
                    raise CheckpointError(
                        f"ranks differ in {key}", f"{about['dtype']} {about['shape']}, {dtype} {shape}"
                    )
                about["parts"] += [[f"rank{rank}.safetensors", at, box] for at, box in parts]
        common = dict(self.common or {})
        state = common.pop("state", {})
        own = merged([one["own"] for one in said if one["own"] is not None])
        body = {
            "format": manifest.FORMAT,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **common,
            "fingerprint": {"model": fingerprint(tensors), "data": own["data"].get("fingerprint")},
            "block": self.block,
            "files": {f"rank{rank}.safetensors": one["file"] for rank, one in enumerate(said)},
            "state": {**state, **own},
            "tensors": tensors,
        }
        manifest.check_complete(body)
        return body


def copied(items: list[Item], host: Tensor | None, *, pinned: bool) -> tuple[bytes, Tensor, dict[str, Any], Tensor]:
    """``items`` in host memory, laid out as in a file: its header, the bytes after it, where everything is, and the
    memory, to be given again as ``host`` next time."""
    items = sorted(items, key=lambda item: -item.dtype.itemsize)  # so each is aligned
    names = [item.key if item.box == whole(item.shape) else f"{item.key}@{_said(item.box)}" for item in items]
    begin, at = header(
        {name: (item.dtype, sizes(item.box)) for name, item in zip(names, items, strict=True)},
        {"format": "pt", "by": manifest.FORMAT},
    )
    total = sum(volume(item.box) * item.dtype.itemsize for item in items)
    if host is None or host.numel() < total:
        host = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    tensors: dict[str, Any] = {}
    devices = set()
    copies: list[tuple[Tensor, Tensor]] = []
    for name, item in zip(names, items, strict=True):
        start = at[name] - len(begin)
        if item.nbytes:
            room = host[start : start + item.nbytes].view(item.dtype).view(sizes(item.box))
            copies.append((room, item.view))
            devices.add(item.view.device)
        about = tensors.setdefault(item.key, [str(item.dtype).removeprefix("torch."), list(item.shape), []])
        about[2].append([at[name], [list(ends) for ends in item.box]])
    if total >= MUCH and all(device.type == "cpu" for device in devices):
        with ThreadPoolExecutor(THREADS, thread_name_prefix="meshfit-copy") as pool:
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), copies))
    else:
        for room, view in copies:
            room.copy_(view, non_blocking=True)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
    return begin, host[:total], tensors, host


def _said(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in box)
