"""Which devices a run may use: ``devices="auto"``, ``4``, ``"cpu:4"``, ``"cuda:0,2"``, ``"mps"``; ``"2..8"``: as many
of them as are there, which may change while it runs.

GPUs are numbered as this process sees them: CUDA_VISIBLE_DEVICES (numbers, UUIDs, one MIG instance) or
HIP_VISIBLE_DEVICES says which those are. AMD's are "cuda" too, as torch for ROCm calls them. MESHFIT_DEVICES, a number
or a file that holds one, is how many of a range may be used: a machine's owner can take some back and give them again,
and where there are no GPUs, CPU ranks can be counted by it.
"""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from meshfit.errors import PlanError
from meshfit.launch.system import MOST_RANKS


@dataclass(frozen=True, slots=True)
class Devices:
    """One kind of device, and which of them. Without ``indices``, as many CPU ranks as the plan names."""

    kind: str
    indices: tuple[int, ...] | None
    least: int = 0
    most: int = 0
    """Of a range; 0: the number is fixed."""

    @property
    def count(self) -> int | None:
        return None if self.indices is None else len(self.indices)

    def device(self, rank: int) -> torch.device:
        """Where local rank ``rank`` works."""
        if self.kind == "cpu" or self.indices is None:
            return torch.device("cpu")
        return torch.device(self.kind, self.indices[rank])

    def present(self, without: Collection[int] = ()) -> Self:
        """Those of a range that are there now, but for some."""
        there = min(self.most, torch.cuda.device_count() if self.kind == "cuda" else self.most)
        with suppress(ValueError, OSError):
            there = min(there, _allowed())
        return replace(self, indices=tuple(i for i in range(there) if i not in without))

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.most else f"{self.kind}:{self.count}"


ALLOWED = "MESHFIT_DEVICES"


def _allowed() -> int:
    """How many devices of a range may be used; ``ValueError``: nobody says."""
    said = os.environ.get(ALLOWED, "")
    return int(said if said.isdecimal() or not said else Path(said).read_text())


def _range(asked: str, gpus: int) -> Devices | None:
    found = re.fullmatch(r"(?:(cpu|cuda):)?(\d+)\.\.(\d+)", asked)
    if found is None:
        return None
    least, most = int(found[2]), int(found[3])
    if not 1 <= least <= most:
        raise PlanError(f"devices={asked!r} is no range", 'write "2..8", from the least to the most')
    devices = Devices(found[1] or ("cuda" if gpus else "cpu"), (), least, most).present()
    if len(devices.indices or ()) < least:
        raise PlanError(
            f"devices={asked!r} but there are {devices.count} here", f"{ALLOWED} may say fewer than there are"
        )
    return devices


def find(asked: str | int = "auto") -> Devices:
    """Turn what the user wrote into devices that are really here."""
    gpus = torch.cuda.device_count()  # counts without starting CUDA: ranks may still be forked
    if (some := _range(str(asked), gpus)) is not None:
        return some
    kind, _, which = str(asked).partition(":")
    if kind.isdecimal() and not which:
        kind, which = ("cuda" if gpus else "cpu"), kind
        if gpus and int(which) > gpus:
            ranks = f'devices="cpu:{asked}" starts CPU ranks'
            raise PlanError(f"devices={asked} but there are {gpus} GPUs here", ranks)
        indices = _counted(which, asked)
    elif kind == "auto" and not which:
        return Devices("cuda", tuple(range(gpus))) if gpus else Devices("cpu", None)
    elif kind == "cpu" and (not which or which.isdecimal()):
        indices = _counted(which, asked) if which else None
    elif str(asked) in ("mps", "mps:0"):
        if not torch.backends.mps.is_available():
            raise PlanError(f"devices={asked!r} but there is no GPU of Apple's here, or torch was built without it")
        indices = (0,)
    elif kind == "cuda" and all(part.isdecimal() for part in which.split(",") if which):
        indices = tuple(int(part) for part in which.split(",")) if which else tuple(range(gpus))
        if missing := [i for i in indices if i >= gpus]:
            raise PlanError(f"devices={asked!r} but there are {gpus} GPUs here", f"cuda:{missing[0]} does not exist")
        if len(set(indices)) < len(indices):
            raise PlanError(f"devices={asked!r} names a GPU twice")
    else:
        raise PlanError(f"devices={asked!r} is not understood", 'write "auto", 4, "cpu:4", "cuda:0,2", "2..8" or "mps"')
    if indices is not None and not indices:
        raise PlanError(f"devices={asked!r} leaves no device", f"there are {gpus} GPUs here")
    return Devices(kind, indices)


def _counted(text: str, asked: object) -> tuple[int, ...]:
    if len(text) > 9 or int(text) > MOST_RANKS:
        raise PlanError(f"devices={asked!r} are more ranks than a machine can run", f"{MOST_RANKS} at most")
    return tuple(range(int(text)))
