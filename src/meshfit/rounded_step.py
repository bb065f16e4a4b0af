"""Weights or optimizer states that are held in bf16 (``precision=bf16-true``, ``states=bf16``).

A step is computed in fp32 from what is held, chunk by chunk (axes/offload), and what comes out is rounded back to
bf16 stochastically: up or down, by a probability that makes the mean exact. Rounded to the nearest, a weight would stay
where it is when its update is less than a 512th of it, and so would Adam's second moment, whose update is a thousandth.

The random bits of an element follow from the seed, the step, the parameter's name and the element's place in the whole
tensor, and from nothing else. So copies of a weight stay the same on all ranks, every cut rounds as one device does,
and a resumed run as one that went on.

    memory    weights 2 bytes an element for 4, each state likewise; while a chunk steps, its weights and states in fp32
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.checkpoint.box import Box, sizes, slabs
from meshfit.checkpoint.pieces import ShardLayout

SLAB = 2**24
"""Elements that are rounded at a time: their random bits take 8 bytes each."""
WIDTH = 16
"""Bits that bf16 has less than fp32."""


class RoundedStep:
    """``layouts`` and ``names`` of every parameter, ``states``: the dtype of the optimizer's states, None: as it keeps
    them."""

    def __init__(
        self,
        layouts: Mapping[nn.Parameter, ShardLayout],
        names: Mapping[nn.Parameter, str],
        *,
        states: torch.dtype | None,
        seed: int,
        step: Callable[[], int],
    ):
        self.layouts, self.names, self.states, self.seed, self.step = layouts, names, states, seed, step

    @contextmanager
    def __call__(self, parameters: Sequence[nn.Parameter], state: MutableMapping[Tensor, Any]) -> Iterator[None]:
        """Within it ``parameters``, their gradients and what ``state`` holds of their shapes are in fp32."""
        held: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        moments: dict[nn.Parameter, dict[Any, Tensor]] = {}
        for p in parameters:
            if p.dtype == torch.bfloat16 and p.grad is not None:
                gradient, p.grad = p.grad, None
                held[p], p.data = (p.data, gradient), p.data.float()
                p.grad = gradient.float()
                moments[p] = self._widen(p, state)
            elif p.dtype == torch.float32 and p.grad is not None and self.states is not None:
                moments[p] = self._widen(p, state)
        try:
            yield
        finally:
            for p, kept in moments.items():
                self._narrow(p, held.get(p), kept, state)

    def _widen(self, p: nn.Parameter, state: MutableMapping[Tensor, Any]) -> dict[Any, Tensor]:
        """The moments of ``p`` in fp32; what was there."""
        own = state.get(p, {})
        kept = {key: value for key, value in own.items() if _is_moment(value, p) and value.dtype == torch.bfloat16}
        own.update({key: value.float() for key, value in kept.items()})
        return kept

    @torch.no_grad()
    def _narrow(
        self,
        p: nn.Parameter,
        held: tuple[Tensor, Tensor] | None,
        kept: dict[Any, Tensor],
        state: MutableMapping[Tensor, Any],
    ) -> None:
        """``p``, and its moments, rounded into what was there before."""
        pairs: list[tuple[Tensor, Tensor]] = []
        if held is not None:
            pairs.append((p.data, held[0]))
        own = state.get(p, {})
        for key, value in own.items() if self.states is not None else ():
            if _is_moment(value, p) and value.dtype == torch.float32:
                into = kept[key] if key in kept else torch.empty_like(value, dtype=self.states)
                own[key] = into
                pairs.append((value, into))
        if held is not None:
            p.grad = None
            p.data, p.grad = held
        self._round(p, pairs)

    def _round(self, p: nn.Parameter, pairs: list[tuple[Tensor, Tensor]]) -> None:
        layout, key = self.layouts[p], _key(self.seed, self.step(), self.names[p])
        for piece in layout.pieces:
            views = [(piece.of(wide), piece.of(narrow)) for wide, narrow in pairs]
            for box in slabs(piece.box, SLAB):
                cut = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, piece.box, strict=True))
                random = _random_bits(_places(box, layout.shape, p.device), key)
                for i, (wide, narrow) in enumerate(views):
                    bits = random if i == 0 else _mixed(random + i)
                    narrow[cut].copy_(stochastically_rounded(wide[cut], bits))


def stochastically_rounded(tensor: Tensor, bits: Tensor) -> Tensor:
    """fp32 numbers of which each is one of bf16, by random ``bits`` (int64, 16 of them used)."""
    noise = ((bits >> 40) & (2**WIDTH - 1)).to(torch.int32)
    found = (tensor.contiguous().view(torch.int32) + noise) & -(2**WIDTH)
    return found.view(torch.float32)


def _is_moment(value: Any, p: Tensor) -> bool:
    """Whether it is laid out as the parameter is; not a count of steps, nor what is quantised already."""
    return type(value) is Tensor and value.dim() > 0 and value.shape == p.shape


def _places(box: Box, shape: Sequence[int], device: torch.device) -> Tensor:
    """Of each element in ``box``: its place in a tensor of ``shape``, counted row by row."""
    found = torch.zeros(sizes(box), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(box):
        along = torch.arange(start, stop, device=device) * prod(shape[dim + 1 :])
        found += along.view(-1, *[1] * (len(box) - dim - 1))
    return found


def _key(seed: int, step: int, name: str) -> int:
    """Of the stream of random numbers of one parameter in one step."""
    key = seed
    for part in (step, zlib.crc32(name.encode())):
        key = _mix(key + part * GAMMA)
    return key


GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64."""


def _mix(number: int) -> int:
    number &= 2**64 - 1
    number = (number ^ (number >> 30)) * FIRST & (2**64 - 1)
    number = (number ^ (number >> 27)) * SECOND & (2**64 - 1)
    return number ^ (number >> 31)


def _random_bits(places: Tensor, key: int) -> Tensor:
    """64 random bits for each of ``places``, which are overwritten: SplitMix64, each output by itself."""
    return _mixed(places.mul_(_signed(GAMMA)).add_(_signed(key)))


def _mixed(bits: Tensor) -> Tensor:
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift of signed numbers repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
