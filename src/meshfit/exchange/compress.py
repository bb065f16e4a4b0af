"""Gradients in fewer bits on their way to the server, what is lost carried over to the next.

    fp16, bf16   half the bytes of fp32
    int8         a quarter: 8 bits an element, and a scale (fp32) for every 1024 of them

With error feedback: what rounding took from one gradient is added to the next, so that nothing is lost for good and
SGD converges as without. The memory of it is one gradient in each worker.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshfit.comm.flat import aligned
from meshfit.errors import PlanError, did_you_mean
from meshfit.exchange.parcel import Parcel

WORDS = ("none", "fp16", "bf16", "int8")
BLOCK = 1024
LARGEST = 65504.0  # that fp16 can hold


@dataclass(frozen=True)
class Codec:
    """The form in which a parcel of gradients travels: runs of fp32 and fp64 packed, all others as they are."""

    word: str
    parcel: Parcel

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise PlanError(f"compress={self.word} is not known", did_you_mean(self.word, WORDS))

    @property
    def bytes(self) -> int:
        """Of the packed form."""
        return self._places()[-1] if self.word != "none" else self.parcel.bytes

    def encode(self, flats: list[Tensor], out: Tensor) -> None:
        places = self._places()
        for flat, start, stop in zip(flats, places, places[1:], strict=False):
            self._pack(flat, out[start:stop])

    def decode(self, packed: Tensor) -> list[Tensor]:
        """The gradients, run by run, each in its own dtype. Without compression they are views of ``packed``."""
        if self.word == "none":
            return self.parcel.flats(packed)
        places = self._places()
        return [
            self._unpack(packed[start:stop], run.dtype, run.size)
            for run, start, stop in zip(self.parcel.runs, places, places[1:], strict=False)
        ]

    def _packs(self, dtype: torch.dtype) -> bool:
        return self.word != "none" and dtype in (torch.float32, torch.float64)

    def _places(self) -> list[int]:
        """Where each run begins, and where the last ends."""
        places = [0]
        for run in self.parcel.runs:
            size = run.bytes
            if self._packs(run.dtype):
                size = run.size * 2 if self.word != "int8" else run.size + -(-run.size // BLOCK) * 4
            places.append(places[-1] + aligned(size))
        return places

    def _pack(self, flat: Tensor, out: Tensor) -> None:
        if not self._packs(flat.dtype):
            out[: flat.nbytes].view(flat.dtype).copy_(flat)
        elif self.word == "bf16":
            out[: flat.numel() * 2].view(torch.bfloat16).copy_(flat)
        elif self.word == "fp16":
            held = torch.where(flat.isfinite(), flat.clamp(-LARGEST, LARGEST), flat)
            out[: flat.numel() * 2].view(torch.float16).copy_(held)
        else:
            scales, numbers = _int8(out, flat.numel())
            whole = flat.numel() // BLOCK * BLOCK
            for part, at, scale in (
                (flat[:whole].view(-1, BLOCK), numbers[:whole].view(-1, BLOCK), scales[: whole // BLOCK]),
                (flat[whole:].view(1, -1), numbers[whole:].view(1, -1), scales[whole // BLOCK :]),
            ):
                if part.numel():
                    scale.copy_(part.abs().amax(1) / 127)
                    steps = (part / torch.where(scale > 0, scale, 1.0).unsqueeze(1).to(part.dtype)).round_()
                    at.copy_(steps.nan_to_num_(0.0).clamp_(-127, 127))

    def _unpack(self, packed: Tensor, dtype: torch.dtype, size: int) -> Tensor:
        if not self._packs(dtype):
            return packed[: size * dtype.itemsize].view(dtype)
        if self.word != "int8":
            kind = torch.float16 if self.word == "fp16" else torch.bfloat16
            return packed[: size * 2].view(kind).to(dtype)
        scales, numbers = _int8(packed, size)
        out, whole = numbers.to(dtype), size // BLOCK * BLOCK
        out[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK].unsqueeze(1).to(dtype))
        if whole < size:
            out[whole:].mul_(scales[-1].to(dtype))
        return out


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


def _int8(packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The scales and the numbers of a packed run."""
    blocks = -(-size // BLOCK)
    return packed[: blocks * 4].view(torch.float32), packed[blocks * 4 : blocks * 4 + size].view(torch.int8)
