"""How long operations take: ``Timing`` knows one device. A trace or a description of a model lists them
(``anatomy.operations``).

A product runs in waves of tiles, one tile a unit: 129 tiles on 128 units take two waves, half of them idle. Each tile
pays for filling its pipeline, as much as ``fill`` more elements of k. The library takes the tile (or splits k) so that
the product is done soonest. Products whose rows are no multiple of 16 bytes cannot use the tensor cores' wide loads.
CPUs pack what they multiply (``packs``), and nothing hides that.
"""

from collections.abc import Iterable
from functools import cached_property
from math import ceil

from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, Streaming
from meshfit.planner.accelerators import Accelerator

TILES = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.5, 0.25))
"""Of the device's largest tile: height and width."""

TILE_SHARE = (1.0, 0.95, 0.85, 0.7)
"""The rate of a unit with such a tile: smaller ones read more bytes for each operation."""

ODD_ROWS = {8: 0.75, 4: 0.45, 2: 0.3, 1: 0.2}
"""The share of the rate where the inner dimensions are a multiple of no more than so many elements of 16 bits; 64 and
more: all of it. (NVIDIA, Matrix Multiplication Background: alignment; the logs of BLOOM show 94 and 120 TFLOP/s for
widths of 14,400 and 13,824.)"""

KERNELS = {
    "flash1": {8: (0.40, 0.34), 9: (0.20, 0.17), 10: (0.10, 0.08)},
    "flash2": {8: (0.60, 0.54), 9: (0.375, 0.33), 10: (0.20, 0.17)},
    "cudnn": {8: (0.60, 0.54), 9: (0.61, 0.50), 10: (0.55, 0.42)},
}
"""Share of the peak of bf16 that attention reaches on long sequences and heads 128 wide, forward and backward, by
generation of device. flash1: FlashAttention's paper for A100, an estimate for later ones; flash2: 190 of 312 TFLOP/s on
A100, 370 of 989 on H100 (the papers of FlashAttention-2 and -3), an estimate for Blackwell; cudnn: 600 of 989 on H100
(FlashAttention-3's paper), on B200 SimuMax's table (which counts the masked half, too)."""

KERNELS["torch"] = {8: KERNELS["flash2"][8], 9: KERNELS["cudnn"][9], 10: KERNELS["cudnn"][10]}
"""What torch takes for 16 bits: cuDNN's from Hopper on (seen with torch 2.11 on an H200)."""


class Timing:
    """Seconds of operations on one device."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._known: dict[Operation, float] = {}

    def __call__(self, operation: Operation) -> float:
        if operation not in self._known:
            self._known[operation] = self._seconds(operation)
        return self._known[operation]

    def total(self, operations: Iterable[Operation]) -> float:
        return sum(map(self, operations))

    def _seconds(self, operation: Operation) -> float:
        if isinstance(operation, Streaming):
            return operation.bytes / self._streamed + operation.kernels * self.accelerator.launch
        if isinstance(operation, FusedAttention):
            return self._attention(operation)
        return self._product(operation)

    @cached_property
    def _streamed(self) -> float:
        return self.accelerator.bandwidth * self.accelerator.streamed

    @cached_property
    def generation(self) -> int:
        """8 for Ampere and before, 9 for Hopper, 10 for Blackwell: by the precisions that the device has."""
        rates = self.accelerator.rates
        return 10 if "fp4" in rates else 9 if "fp8" in rates else 8

    def _product(self, p: MatrixProduct) -> float:
        device = self.accelerator
        unit = device.best(p.precision) / device.units * _aligned(p)
        best = float("inf")
        for (high, wide), share in zip(TILES, TILE_SHARE, strict=True):
            height, width = max(16, int(device.tile[0] * high)), max(16, int(device.tile[1] * wide))
            tiles = ceil(p.m / height) * ceil(p.n / width) * p.batch
            for split in (1, 2, 4):
                if split > 1 and (tiles >= device.units or p.k // split < 512):
                    break
                waves = ceil(tiles * split / device.units)
                each = 2.0 * height * width * (p.k / split + device.fill) / (unit * share)
                again = (split - 1) * 4.0 * p.m * p.n * p.batch / self._streamed
                best = min(best, waves * each + again)
        best = max(best, p.flops / p.count / device.sustained(p.precision))
        moved = p.bytes / p.count / self._streamed
        if device.packs:
            return p.count * (best + device.packs * moved + device.launch)
        added = 4.0 * p.m * p.n * p.batch / self._streamed if p.accumulate else 0.0  # half of it hides
        return p.count * (max(best + added, moved) + device.launch)

    def _attention(self, a: FusedAttention) -> float:
        device = self.accelerator
        forward, backward = KERNELS[a.kernel][self.generation]
        share = backward if a.backward else forward
        narrow = 1.0 if a.kernel == "flash1" else min(1.0, 0.7 + 0.3 * a.width / 128)
        peak = device.rate("bf16") * min(
            1.0, device.reached.get("bf16", 0.75) / USUAL_REACHED.get(self.generation, 0.75)
        )
        rate = peak * share * narrow
        block = 128 if self.generation < 10 else 256
        tasks = a.batch * a.heads * ceil(a.length / block)
        each = a.flops / a.count / tasks / (rate / device.units)
        longest = each * (2.0 if a.causal and a.length > block else 1.0)
        seconds = max(tasks * each / device.units + 0.5 * longest, longest, a.bytes / a.count / self._streamed)
        return a.count * (seconds + device.launch)


USUAL_REACHED = {8: 0.80, 9: 0.70, 10: 0.50}
"""Of the devices on which the kernels were measured: one with less power is slower in the same proportion."""


def _aligned(p: MatrixProduct) -> float:
    inner = 64
    while inner > 1 and any(length % inner for length in (p.n, p.k)):
        inner //= 2
    return 1.0 if inner >= 64 else min(1.0, ODD_ROWS[min(8, inner)] + (0.1 if inner > 8 else 0.0))
