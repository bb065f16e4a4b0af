"""torch.compile over model and loss together.

Compiled as one, the last layer's output and the loss fuse: on one H200 a 124M GPT trains 1.33 times faster
than eager in 0.55 of the memory. It costs tens of seconds once, so "auto" takes it only where the run is
long enough, on GPUs, and says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

# What compiling costs and saves: a guess, on the careful side of the one model measured (a 124M GPT on one H200:
# about 30 s more to start, a quarter of the time saved).
SECONDS_TO_COMPILE = 40.0
SHARE_SAVED = 0.2
EFFICIENCY = 0.4  # of peak, eager


@dataclass(frozen=True, slots=True)
class Compile:
    word: str = "auto"
    """"whole", "none", or "auto"."""

    def decide(self, *, device: torch.device, step_seconds: float, steps: int | None, splits: bool) -> tuple[bool, str]:
        """Whether to compile, and why, in words. ``splits``: something in the model cannot be compiled whole."""
        if self.word != "auto":
            return self.word == "whole", f"compile={self.word}, as asked"
        if device.type != "cuda":
            return False, "compile: no, on CPUs it rarely pays"
        if splits:
            return False, "compile: no, global BatchNorm communicates inside the model"
        if steps is None:
            return False, "compile: no, the length of the run is not known"
        saved = step_seconds * steps * SHARE_SAVED
        verdict = saved > SECONDS_TO_COMPILE
        return verdict, (
            f"compile: {'yes' if verdict else 'no'}, it would save about {saved:.0f} s of {step_seconds * steps:.0f} s"
            f" and take about {SECONDS_TO_COMPILE:.0f} s"
        )

    @staticmethod
    def apply(objective: Callable) -> Callable:
        return torch.compile(objective.__call__)


def expected_step_seconds(model: nn.Module, tokens: int, device: torch.device) -> float:
    """A guess before the first step: six flops a weight and token, at a usual share of the device's peak."""
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    return 6 * weights * tokens / (EFFICIENCY * peak_flops(device))


def peak_flops(device: torch.device) -> float:
    """bf16 peak of a CUDA device by its name; the A100's where the name is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = {
        "H200": 990e12,
        "H100": 990e12,
        "B200": 2250e12,
        "A100": 312e12,
        "L40": 181e12,
        "L4": 121e12,
        "T4": 65e12,
    }
    return next((peak for key, peak in peaks.items() if key in name), 312e12)
