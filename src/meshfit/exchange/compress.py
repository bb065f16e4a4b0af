"""Gradients in fewer bits on their way to the server, what is lost carried over to the next.

    fp16, bf16   half the bytes of fp32
    int8         a quarter: 8 bits an element, and a scale (fp32) for every 1024 of them

With error feedback: what rounding took from one gradient is added to the next, so that nothing is lost for good and
SGD converges as without. The memory of it is one gradient in each worker.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfit.comm.flat import aligned
from meshfit.exchange.parcel import Parcel

FORMS = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
BLOCK = 1024
LARGEST = 65504.0  # that fp16 can hold


@dataclass(frozen=True)
class Codec:
    """The form in which a parcel of gradients travels: runs of fp32 and fp64 packed, all others as they are."""

    word: str
    parcel: Parcel

    @property
    def bytes(self) -> int:
        """Of the packed form."""
        return self._places()[-1]

    def encode(self, flats: list[Tensor], out: Tensor) -> None:
        for flat, (start, stop) in zip(flats, pairwise(self._places()), strict=True):
            self._pack(flat, out[start:stop])

    def decode(self, packed: Tensor) -> list[Tensor]:
        """The gradients, run by run, each in its own dtype. Without compression they are views of ``packed``."""
        places = zip(self.parcel.runs, pairwise(self._places()), strict=True)
        return [self._unpack(packed[start:stop], run.dtype, run.size) for run, (start, stop) in places]

    def _form(self, dtype: torch.dtype) -> torch.dtype:
        """That elements of ``dtype`` travel in."""
        return FORMS.get(self.word, dtype) if dtype in (torch.float32, torch.float64) else dtype

    def _places(self) -> list[int]:
        """Where each run begins, and where the last ends."""
        places = [0]
        for run in self.parcel.runs:
            form = self._form(run.dtype)
            scales = 4 * _blocks(run.size) if form is torch.int8 is not run.dtype else 0
            places.append(places[-1] + aligned(run.size * form.itemsize + scales))
        return places

    def _pack(self, flat: Tensor, out: Tensor) -> None:
        form, size = self._form(flat.dtype), flat.numel()
        if form is torch.int8 is not flat.dtype:
            scales, numbers = _int8(out, size)
            blocks = F.pad(flat, (0, -size % BLOCK)).view(-1, BLOCK)
            scales.copy_(blocks.abs().amax(1) / 127)
            steps = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).round_()
            numbers.copy_(steps.nan_to_num_(0.0).clamp_(-127, 127).view(-1)[:size])
            return
        if form is torch.float16 is not flat.dtype:
            flat = torch.where(flat.isfinite(), flat.clamp(-LARGEST, LARGEST), flat)
        out[: size * form.itemsize].view(form).copy_(flat)

    def _unpack(self, packed: Tensor, dtype: torch.dtype, size: int) -> Tensor:
        form = self._form(dtype)
        if form is torch.int8 is not dtype:
            scales, numbers = _int8(packed, size)
            blocks = F.pad(numbers.to(dtype), (0, -size % BLOCK)).view(-1, BLOCK)
            return (blocks * scales.unsqueeze(1)).view(-1)[:size]
        return packed[: size * form.itemsize].view(form).to(dtype)


@dataclass
class Feedback:
    """What rounding has taken so far, in one worker. A gradient is packed once, then kept or taken back."""

    codec: Codec
    lost: list[Tensor] = field(default_factory=list)

    def pack(self, flats: list[Tensor], out: Tensor) -> None:
        if not self.lost:
            self.lost = [torch.zeros_like(flat) for flat in flats]
        for lost, flat in zip(self.lost, flats, strict=True):
            lost.add_(flat)
        self.codec.encode(self.lost, out)

    def kept(self, packed: Tensor) -> None:
        """The server has stepped with it."""
        for lost, sent in zip(self.lost, self.codec.decode(packed), strict=True):
            lost.sub_(sent)

    def taken_back(self, flats: list[Tensor]) -> None:
        """The gradient was not used: it will be made again, or was not finite."""
        for lost, flat in zip(self.lost, flats, strict=True):
            lost.sub_(flat).nan_to_num_(0.0, 0.0, 0.0)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _int8(packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The scales and the numbers of a packed run."""
    scales = _blocks(size) * 4
    return packed[:scales].view(torch.float32), packed[scales : scales + size].view(torch.int8)
