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
    """Where they stand now; ``restore`` puts them back there."""

    def __init__(self, device: torch.device):
        self._device = device
        self._torch = self._states()
        self._others: tuple[Any, Any] = np.random.get_state(), random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch[0])
        if len(self._torch) > 1:
            set_state_of(self._device, self._torch[1])
        np.random.set_state(self._others[0])
        random.setstate(self._others[1])

    @property
    def moved(self) -> bool:
        """Whether torch's have been drawn from since."""
        return any(not torch.equal(a, b) for a, b in zip(self._torch, self._states(), strict=True))

    @property
    def moved_others(self) -> bool:
        """Whether NumPy's or Python's have been drawn from since."""
        _, keys, *at = np.random.get_state()
        _, was, *stood = self._others[0]
        return random.getstate() != self._others[1] or at != stood or not np.array_equal(keys, was)

    def _states(self) -> list[Tensor]:
        own = state_of(self._device)
        return [torch.get_rng_state()] if own is None else [torch.get_rng_state(), own]


def places() -> tuple[Any, ...]:
    """Where NumPy's and Python's stand: another value after any draw, also that of the second of two normal numbers."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    inner = [value.tobytes() if isinstance(value, np.ndarray) else value for value in numpy["state"].values()]
    return inner, numpy["has_gauss"], random.getstate()


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
    numpy, python = np.random.get_state(), random.getstate()
    own = {device: state for device in dict.fromkeys(devices) if (state := state_of(device)) is not None}
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        for device, state in own.items():
            set_state_of(device, state)
        np.random.set_state(numpy)
        random.setstate(python)


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
