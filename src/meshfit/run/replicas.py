"""A digest of what a rank holds, now and then: ranks that hold the same part of the model must hold the same bits.

A bit that flips in memory or in an arithmetic unit changes no loss enough to be seen, and NaN it hardly ever becomes.
But replicas are updated by the same gradients: where their weights or optimizer states differ, one of them is wrong.

The digest of a tensor is the sum of its 64-bit words, modulo 2^64: one pass over memory, and every single flipped bit
changes it. Which part a rank holds is told by the names and boxes of its tensors, as checkpoints know them. Buffers
are not part of it: a rank may have its own. launch/compare.py compares; nothing is sent.

    cost    4P to 16P bytes read for P parameters in fp32, every so many steps that it stays under 0.5 % of the time
"""

import time
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfit.checkpoint.state import Item, items_of
from meshfit.errors import in_short
from meshfit.live import LIVE, Digest
from meshfit.transfer import HostCopy

if TYPE_CHECKING:
    from meshfit.run.run import Run

SHARE = 0.005  # of the time
LEAST, MOST = 16, 1 << 20  # steps from digest to digest
MASK = 2**64


class ReplicaDigests:
    """Of one rank; ``every``: steps from one to the next, 0: none, None: as SHARE allows.

    Ranks need not agree on a number of steps: it is a power of two for each, so the steps of one are among those of the
    other."""

    def __init__(self, run: "Run", every: int | None):
        self.run, self._chosen = run, every is None
        plan = run.plan
        compares = run.world.size > 1 and not plan.server and plan.exchange == "allreduce"
        compares &= run.update.offload is None  # whose state would have to be read for it
        self.every = (LEAST if every is None else every) if compares else 0
        if every and not (compares and (plan.data > 1 or plan.context > 1)):
            run.notes.append(f"check_replicas: under {plan} no two ranks hold the same, and none can be compared")
        self._began: tuple[int, float] | None = None
        self._training = LIVE.begin()
        self._made = self._last = 0
        self._coming: list[tuple[int, tuple[int, int], int, HostCopy]] = []

    def after(self, step: int) -> None:
        """A step was taken."""
        if not self.every:
            return
        if self._began is None:
            self._began = step, time.perf_counter()
        while self._coming and self._coming[0][3].ready:
            self._tell(*self._coming.pop(0))
        if self._last and step % self.every:
            return
        began = time.perf_counter()
        self.take(step)
        if self._chosen:
            self._space_out(step, time.perf_counter() - began)

    def take(self, step: int) -> None:
        """The digest after ``step``, unless there is one already."""
        if not self.every or step == self._last:
            return
        self._last = step
        try:
            self._take(step)
        except Exception as error:  # a tensor of an unknown kind: who watches must not disturb
            self.every = 0
            self.run.notes.append(f"check_replicas: replicas are not compared: {in_short(error)}")

    def _take(self, step: int) -> None:
        items = [item for item in items_of(self.run) if not item.first]
        weights = [item for item in items if item.key.startswith("model/")]
        state = [item for item in items if item.key.startswith(("optimizer/", "average/"))]
        sums = [total(item.view) for item in (*weights, *state)]
        if sums:
            device = self.run.world.device
            together = torch.stack([each.to(device, non_blocking=True) for each in sums])
            self._coming.append((step, (self._part(weights), self._part(state)), len(weights), HostCopy(together)))
            if self._coming[0][3].ready:
                self._tell(*self._coming.pop(0))

    def _part(self, items: list[Item]) -> int:
        """The number of a part: of which tensors, and which boxes of them, of which training. 0: of none."""
        if not items:
            return 0
        held = [(item.key, item.shape, item.box) for item in items]
        return 1 + zlib.crc32(repr((self._training, held)).encode())

    def _tell(self, step: int, parts: tuple[int, int], weights: int, sums: HostCopy) -> None:
        values = sums.tolist()
        LIVE.digested(Digest(step, parts[0], mixed(values[:weights]), parts[1], mixed(values[weights:])), self._made)
        self._made += 1

    def _space_out(self, step: int, took: float) -> None:
        """Take more steps from digest to digest where one takes long beside them. The first few steps tell little."""
        assert self._began is not None
        first, at = self._began
        if step - first < LEAST // 2:
            return
        each = (time.perf_counter() - at) / (step - first)
        while took > SHARE * self.every * each and self.every < MOST:
            self.every *= 2


@torch.no_grad()
def total(tensor: Tensor) -> Tensor:
    """The sum of its words of 64 bits, modulo 2^64; what is left over is filled up with zeros."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    size = flat.numel() // 8 * 8
    head = flat[:size]
    try:
        words = head.view(torch.int64)
    except RuntimeError:  # it does not begin at a whole word
        words = head.clone().view(torch.int64)
    found = words.sum()
    if rest := flat.numel() - size:
        last = flat.new_zeros(8)
        last[:rest] = flat[size:]
        found = found + last.view(torch.int64)[0]
    return found


def mixed(sums: Iterable[int]) -> int:
    """One number of several, each of which counts by its place."""
    value = sum(each * (2 * i + 1) for i, each in enumerate(sums)) % MASK
    return value - MASK if value >= MASK // 2 else value
