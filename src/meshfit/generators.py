"""The random number generators of this process: torch's (of the CPU and of one device), NumPy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Generators:
    """Where they stand now; ``restore`` puts them back there."""

    def __init__(self, device: torch.device):
        self._gpu = device if device.type == "cuda" else None
        self._torch = self._states()
        self._others: tuple[Any, Any] = np.random.get_state(), random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch[0])
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._torch[1], self._gpu)
        np.random.set_state(self._others[0])
        random.setstate(self._others[1])

    @property
    def moved(self) -> bool:
        """Whether torch's have been drawn from since."""
        return any(not torch.equal(a, b) for a, b in zip(self._torch, self._states(), strict=True))

    @property
    def moved_others(self) -> bool:
        """Whether NumPy's or Python's have been drawn from since."""
        _, keys, at, *_ = np.random.get_state()
        _, was, stood, *_ = self._others[0]
        return random.getstate() != self._others[1] or at != stood or not np.array_equal(keys, was)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._gpu is not None:
            states.append(torch.cuda.get_rng_state(self._gpu))
        return states


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
    try:
        with torch.random.fork_rng([device for device in dict.fromkeys(devices) if device.type == "cuda"]):
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


def as_tensor(device: torch.device) -> Tensor:
    """The states of torch's generators, to be sent to other ranks."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def from_tensor(state: Tensor, device: torch.device) -> None:
    """Put torch's generators where those of another rank stand."""
    state = state.cpu()
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)
