"""Two trainings beside each other, quantity by quantity, and one device beside itself.

A difference within the fixed limit of its quantity is rounding. Some trainings magnify rounding beyond it: then it is
measured how far one device is from itself when its weights are moved by a rounding, or its samples summed in another
order, and the limit is three times that, but at most ten times the fixed one.

Tensors are compared over the whole model, ||a - b|| / ||b||, and the first step's gradients one by one as well: there a
tensor may differ by ten times its own rounding. Where that is as much as its gradient, the gradient is rounding
(attention's key biases, a bias before a BatchNorm). An adaptive optimizer makes steps of full length of it, so such
tensors are left out, by name, of weights and optimizer state; and buffers, which follow them, are those of the first
step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfit.proof.training import Trained, named_in_order

# Largest relative difference that counts as equal, by precision: what rounding in another order usually comes to.
LIMITS = {
    "fp64": {
        "loss": 1e-6,
        "gradient norm": 1e-6,
        "gradients": 1e-7,
        "each gradient": 1e-6,
        "weights": 1e-7,
        "buffers": 1e-7,
        "optimizer": 1e-6,
    },
    "fp32": {
        "loss": 1e-5,
        "gradient norm": 1e-4,
        "gradients": 1e-4,
        "each gradient": 1e-4,
        "weights": 1e-4,
        "buffers": 1e-4,
        "optimizer": 1e-3,
    },
    "bf16": {
        "loss": 1e-2,
        "gradient norm": 5e-2,
        "gradients": 1e-1,
        "weights": 1e-2,
        "buffers": 2e-2,
        "optimizer": 5e-1,
    },
}
LIMITS["fp16"] = LIMITS["bf16"]
RAISED = 10.0
"""A limit is raised at most so many times."""
MARGIN = 3.0
"""Over the rounding that was measured: another plan's is not the same."""
BEYOND = 100.0
"""Times the rounding: such a difference is none."""
OWN = 10.0
"""Times its own rounding that a tensor's gradient may differ by."""
TINY = 1e-5
"""A gradient this small beside the model's typical one may be rounding where one device has exactly zero."""


@dataclass(frozen=True)
class Row:
    """One quantity, compared."""

    name: str
    difference: float
    limit: float
    """Raised by what was measured, where the difference is beyond the fixed one."""
    first: str = ""
    """Where it first goes beyond the limit: a step, or a tensor."""
    rounding: float = 0.0
    """How far one device is from itself."""
    fixed: float = math.inf
    """The limit without what was measured."""

    @property
    def equal(self) -> bool:
        return self.difference <= self.limit  # False for NaN

    @property
    def beyond_rounding(self) -> bool:
        """Whether nothing that was measured explains the difference, by far."""
        return not self.difference <= max(RAISED * self.fixed, BEYOND * self.rounding)


@dataclass(frozen=True)
class Compared:
    """A plan beside one device."""

    rows: list[Row]
    noise: list[str] = field(default_factory=list)
    """Tensors whose gradient is rounding."""
    blind: str = ""
    """Why little can be told, though no row differs."""

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows) and not self.blind

    @property
    def different(self) -> bool:
        return any(row.beyond_rounding for row in self.rows)

    @property
    def too_rough(self) -> bool:
        """Whether one device is farther from itself than any limit may be raised."""
        return any(MARGIN * row.rounding > RAISED * row.fixed for row in self.rows)

    @property
    def worst(self) -> Row:
        return max(
            self.rows, key=lambda row: row.difference / row.limit if row.difference == row.difference else math.inf
        )


def compare(want: Trained, got: Trained, again: list[Trained], limits: dict[str, float]) -> Compared:
    """``got`` beside ``want``; ``again`` are other roundings of ``want``."""
    noise = _noise(want, got, again, OWN if "each gradient" in limits else 1.0)
    rows = [
        _series("loss", want.losses, got.losses, [other.losses for other in again], limits["loss"]),
        _series("gradient norm", want.norms, got.norms, [other.norms for other in again], limits["gradient norm"]),
    ]
    for name in ("gradients", "weights", "buffers", "optimizer"):
        kept = "first_buffers" if name == "buffers" and noise else name
        theirs, ours = getattr(want, kept), getattr(got, kept)
        if theirs or ours:
            others = [getattr(other, kept) for other in again]
            skipped = noise if name in ("weights", "optimizer") else set()
            rows.append(_tensors(name, theirs, ours, others, limits[name], skipped, want.order))
        if name == "gradients" and "each gradient" in limits and theirs.keys() == ours.keys():
            rows.append(_each(want, got, again, limits["each gradient"], noise))
    return Compared(rows, sorted(noise), _blind(want, noise))


def _blind(want: Trained, noise: set[str]) -> str:
    """Why what is left out leaves too little: what is rounding is little of the gradient."""
    every = sum(_square(g) for g in want.gradients.values())
    left_out = sum(_square(want.gradients[name]) for name in noise)
    if noise and left_out > 0.01 * every:
        return f"the gradients of {len(noise)} of {len(want.gradients)} tensors are rounding"
    return ""


def _noise(want: Trained, got: Trained, again: list[Trained], times: float) -> set[str]:
    """Tensors whose gradient on one device is not larger than what rounding makes of it; and those of exactly zero
    there, where the plan has a rounding."""
    owns, found = _owns(want, again), set()
    for name, gradient in want.gradients.items():
        size, ours = _square(gradient) ** 0.5, got.gradients.get(name)
        if 0 < size <= times * owns[name] or (
            size == 0 and ours is not None and 0 < _square(ours) ** 0.5 <= _tiny(want, name)
        ):
            found.add(name)
    return found


def _owns(want: Trained, again: list[Trained]) -> dict[str, float]:
    """How far each tensor's gradient is from itself."""
    return {
        name: _largest(_apart(g, other.gradients.get(name)) for other in again) for name, g in want.gradients.items()
    }


def _tiny(want: Trained, name: str) -> float:
    count = sum(g.numel() for g in want.gradients.values()) or 1
    typical = (sum(_square(g) for g in want.gradients.values()) / count) ** 0.5
    return TINY * typical * want.gradients[name].numel() ** 0.5


def _each(want: Trained, got: Trained, again: list[Trained], limit: float, noise: set[str]) -> Row:
    """The tensor that differs most from itself, in shares of its gradient; its own rounding allowed for."""
    owns, worst, first = _owns(want, again), 0.0, ""
    for name in named_in_order(list(want.gradients), want.order):
        allowed = max(_square(want.gradients[name]) ** 0.5, OWN * owns[name] / limit)
        if name in noise:
            allowed = max(allowed, _tiny(want, name) / limit)
        apart = _apart(want.gradients[name], got.gradients[name])
        share = apart / allowed if allowed else math.inf if apart else 0.0
        if not share <= limit and not first:
            first = name
        worst = share if not share <= worst else worst
    return Row("each gradient", worst, limit, first, fixed=limit)


def _series(name: str, want: list[float], got: list[float], again: list[list[float]], limit: float) -> Row:
    def apart(other: list[float]) -> list[float]:
        both = zip(other, want, strict=True)  # of a step that fp16 skips both are infinite
        return [0.0 if a == b else abs(a - b) / (abs(b) or 1.0) for a, b in both]

    differences = apart(got)
    rounding = _largest(d for other in again for d in apart(other))
    worst = max(differences, key=lambda d: (d != d, d))
    allowed = limit if worst <= limit else raised(limit, rounding)
    beyond = next((i for i, d in enumerate(differences, 1) if not d <= allowed), None)
    return Row(name, worst, allowed, f"step {beyond}" if beyond else "", rounding, limit)


def _tensors(
    name: str,
    want: dict[Any, Tensor],
    got: dict[Any, Tensor],
    again: list[dict[Any, Tensor]],
    limit: float,
    skipped: Iterable[str],
    order: list[str],
) -> Row:
    if want.keys() != got.keys():
        missing = min(_label(key) for key in want.keys() ^ got.keys())
        return Row(name, math.inf, limit, f"{missing} is in one of them only", fixed=limit)
    leave = set(skipped)
    compared = {key: tensor for key, tensor in want.items() if _owner(key) not in leave}
    apart = {key: _apart(tensor, got[key]) for key, tensor in compared.items()}
    size = sum(_square(tensor) for tensor in compared.values()) ** 0.5 or 1.0
    rounding = _largest(_total(compared, other) / size for other in again)
    total = sum(d * d for d in apart.values()) ** 0.5 / size
    allowed = limit if total <= limit else raised(limit, rounding)
    first = ""
    if not total <= allowed and compared:
        own = {key: d / (_square(compared[key]) ** 0.5 or 1.0) for key, d in apart.items()}
        keys = {_label(key): key for key in own}
        place = {name: i for i, name in enumerate(named_in_order([_owner(key) for key in own], order))}
        there = sorted(keys, key=lambda label: place[_owner(keys[label])])
        first = next((at for at in there if not own[keys[at]] <= allowed), max(keys, key=lambda at: own[keys[at]]))
    return Row(name, total, allowed, first, rounding, limit)


def raised(limit: float, rounding: float) -> float:
    return min(RAISED * limit, max(limit, MARGIN * rounding))


def _owner(key: str | tuple[str, str]) -> str:
    """The parameter (or buffer) that a tensor belongs to."""
    return key if isinstance(key, str) else key[0]


def _label(key: str | tuple[str, str]) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _largest(measured: Iterable[float]) -> float:
    """What is not finite measures nothing."""
    return max((d for d in measured if math.isfinite(d)), default=0.0)


def _square(tensor: Tensor) -> float:
    """Of what is finite."""
    return tensor.to(_wide(tensor)).abs().square().nan_to_num(0.0, 0.0, 0.0).sum().item()


def _apart(tensor: Tensor, other: Tensor | None) -> float:
    if other is None:
        return math.inf
    a, b = tensor.to(_wide(tensor)), other.to(_wide(other))
    same = (a == b) | ((a != a) & (b != b))
    return (b - a).abs().masked_fill(same, 0.0).square().sum().item() ** 0.5


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _total(want: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> float:
    return sum(_apart(tensor, other.get(key)) ** 2 for key, tensor in want.items()) ** 0.5
