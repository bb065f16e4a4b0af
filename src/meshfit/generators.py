"""The random number generators of this process: torch's (of the CPU and of one device), NumPy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def state_of(device: torch.device) -> Tensor | None:
    """Of the generator of a GPU; None: the CPU's is the device's."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def set_state_of(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


class Generators:
    """Where they stand now, those of GPUs among ``devices`` too; ``restore`` puts them back there."""

    def __init__(self, *devices: torch.device):
        self._devices = [device for device in dict.fromkeys(devices) if device.type in ("cuda", "mps")]
        self._torch = self._states()
        self._numpy, self._python = _numpy_state(), random.getstate()

    def restore(self) -> None:
        cpu, *own = self._torch
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, own, strict=True):
            set_state_of(device, state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(state for device in self._devices if (state := state_of(device)) is not None)]

    @property
    def moved(self) -> bool:
        """Whether torch's have been drawn from since."""
        return any(not torch.equal(a, b) for a, b in zip(self._torch, self._states(), strict=True))

    @property
    def moved_others(self) -> bool:
        """Whether NumPy's or Python's have been drawn from since."""
        return places() != (_place(self._numpy), self._python)


def places() -> tuple[Any, ...]:
    """Where NumPy's and Python's stand: another value after any draw, also that of the second of two normal numbers."""
    return _place(_numpy_state()), random.getstate()


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return state


def _place(numpy: dict[str, Any]) -> tuple[Any, ...]:
    inner = [value.tobytes() if isinstance(value, np.ndarray) else value for value in numpy["state"].values()]
    return inner, numpy["has_gauss"]


def seed(number: int, device: torch.device) -> None:
    """torch's of the CPU and of ``device``, as ``torch.manual_seed`` would, which asks every kind of device."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)  # of the device that is current, which is this rank's


@contextmanager
def kept(*devices: torch.device) -> Iterator[None]:
    """Afterwards all of them stand where they stood, those of the GPUs among ``devices`` too."""
    before = Generators(*devices)
    try:
        yield
    finally:
        before.restore()


def as_tensor(device: torch.device) -> Tensor:
    """The states of torch's generators, to be sent to other ranks."""
    own = state_of(device)
    return torch.get_rng_state() if own is None else torch.cat([torch.get_rng_state(), own])


def from_tensor(state: Tensor, device: torch.device) -> None:
    """Put torch's generators where those of another rank stand."""
    state = state.cpu()
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    set_state_of(device, state[size:])
