"""Which devices a run may use: ``devices="auto"``, ``4``, ``"cpu:4"``, ``"cuda:0,2"``, ``"mps"``.

GPUs are numbered as this process sees them: CUDA_VISIBLE_DEVICES (numbers, UUIDs, one MIG instance) or
HIP_VISIBLE_DEVICES says which those are. AMD's are "cuda" too, as torch for ROCm calls them.
"""

from dataclasses import dataclass

import torch

from meshfit.errors import PlanError


@dataclass(frozen=True, slots=True)
class Devices:
    """One kind of device, and which of them. Without ``indices``, as many CPU ranks as the plan names."""

    kind: str
    indices: tuple[int, ...] | None

    @property
    def count(self) -> int | None:
        return None if self.indices is None else len(self.indices)

    def device(self, rank: int) -> torch.device:
        """Where local rank ``rank`` works."""
        if self.kind == "cpu" or self.indices is None:
            return torch.device("cpu")
        return torch.device(self.kind, self.indices[rank])


def find(asked: str | int = "auto") -> Devices:
    """Turn what the user wrote into devices that are really here."""
    gpus = torch.cuda.device_count()  # counts without starting CUDA: ranks may still be forked
    kind, _, which = str(asked).partition(":")
    if kind.isdecimal() and not which:
        kind, which = ("cuda" if gpus else "cpu"), kind
        if gpus and int(which) > gpus:
            ranks = f'devices="cpu:{asked}" starts CPU ranks'
            raise PlanError(f"devices={asked} but there are {gpus} GPUs here", ranks)
        indices = tuple(range(int(which)))
    elif kind == "auto" and not which:
        return Devices("cuda", tuple(range(gpus))) if gpus else Devices("cpu", None)
    elif kind == "cpu" and (not which or which.isdecimal()):
        indices = tuple(range(int(which))) if which else None
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
        raise PlanError(f"devices={asked!r} is not understood", 'write "auto", 4, "cpu:4", "cuda:0,2" or "mps"')
    if indices is not None and not indices:
        raise PlanError(f"devices={asked!r} leaves no device", f"there are {gpus} GPUs here")
    return Devices(kind, indices)
