"""Numbers between host and device, without a wait where none is needed.

``torch.tensor(numbers, device="cuda")``, ``.item()`` and ``.tolist()`` let the host wait for all that the device was
given before. Which waits there are in a step, and why: docs/waits.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Sequence[float | int | bool], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``numbers`` on ``device``: by way of pinned memory, so that the host goes on."""
    here = torch.tensor(numbers, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def together(numbers: Sequence[Tensor | float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """``numbers``, of which some are on ``device`` already, as one tensor there. ``x[i] = 1.0`` would be waited for."""
    there = {i: n for i, n in enumerate(numbers) if isinstance(n, Tensor) and not n.is_cpu}
    made = upload([0.0 if i in there else float(n) for i, n in enumerate(numbers)], device, dtype)
    for i, number in there.items():
        made[i] = number
    return made


NO_FLOAT64 = ("mps",)
"""Kinds of devices without it: Apple's."""


def wide(tensor: Tensor) -> Tensor:
    """In float64; in float32 on a device that has none."""
    return tensor.float() if tensor.device.type in NO_FLOAT64 else tensor.double()


class HostCopy:
    """A tensor on its way to the host, which waits when it asks for it: for the copy, not for what the device was given
    since."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Tensor):
        self._event: Any = None
        self._host = tensor.detach()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def tolist(self) -> list[Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
