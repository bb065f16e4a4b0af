"""Statistics of a batch, added up over its parts: microbatches first, then ranks."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshfit.axes.buffers.trace import MAX, MEAN, MIN, BufferUpdate, Collected, replay
from meshfit.comm.group import Group


@dataclass
class Totals:
    like: Collected
    """One of the parts, one that counts if there is one: settings and dtypes are its."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Sums, and of means the sum over samples."""
    extremes: dict[int, Tensor] = field(default_factory=dict)
    numbers: dict[tuple[int, int], float] = field(default_factory=dict)
    samples: float = 0.0

    @property
    def update(self) -> BufferUpdate:
        return self.like.update

    def add(self, call: Collected, samples: int) -> None:
        """``samples=0``: a stand-in, which adds nothing."""
        if call.update is not self.update and call.update != self.update:
            raise ValueError("the parts of a batch were updated in different ways")
        if not self.samples:
            self.like = call
        for at, tensor in call.statistics.items():
            kind = self.update.statistics[at].kind
            if kind in (MAX, MIN):
                tensor = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
                if not samples:
                    tensor = torch.full_like(tensor, _nothing(tensor.dtype, kind))
                if at in self.extremes:
                    pick = torch.maximum if kind == MAX else torch.minimum
                    tensor = pick(self.extremes[at], tensor)
                self.extremes[at] = tensor
                continue
            wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
            if not samples:
                wide = torch.zeros_like(wide)  # not times 0: it may be NaN
            elif kind == MEAN:
                wide = wide * samples
            self.sums[at] = self.sums[at] + wide if at in self.sums else wide
        for at, number in call.numbers.items():
            self.numbers[at] = self.numbers.get(at, 0.0) + (number if samples else 0.0)
        self.samples += samples

    def over(self, group: Group) -> None:
        """Those of all ranks of ``group``. They call it together."""
        counts = torch.tensor([self.samples, *self.numbers.values()], dtype=torch.float64, device=group.host)
        counts = group.all_reduce_(counts)
        self.samples, *numbers = counts.tolist()
        self.numbers = dict(zip(self.numbers, numbers, strict=True))
        kinds: dict[torch.dtype, list[int]] = defaultdict(list)
        for at, tensor in self.sums.items():
            kinds[tensor.dtype].append(at)
        for places in kinds.values():
            flat = group.all_reduce_(torch.cat([self.sums[at].reshape(-1) for at in places]))
            parts = flat.split([self.sums[at].numel() for at in places])
            self.sums |= {at: part.view(self.sums[at].shape) for at, part in zip(places, parts, strict=True)}
        for at, tensor in self.extremes.items():
            every = group.all_gather(tensor.reshape(-1))
            best = every.amax(0) if self.update.statistics[at].kind == MAX else every.amin(0)
            self.extremes[at] = best.view(tensor.shape)

    def made(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of the whole batch; ``states`` are those of before, and are changed."""
        statistics = {at: self._whole(at, tensor) for at, tensor in (self.sums | self.extremes).items()}
        numbers = {at: type(self.like.numbers[at])(number) for at, number in self.numbers.items()}
        return replay(self.update, self.like.calls, statistics, numbers, states)

    def _whole(self, at: int, tensor: Tensor) -> Tensor:
        if self.update.statistics[at].kind == MEAN:
            tensor = tensor / self.samples
        return tensor.to(self.like.statistics[at].dtype)


def _nothing(dtype: torch.dtype, kind: str) -> float:
    if dtype.is_floating_point:
        return float("-inf") if kind == MAX else float("inf")
    return torch.iinfo(dtype).min if kind == MAX else torch.iinfo(dtype).max
