"""Two trainings compared quantity by quantity, and one device compared with itself.

A difference within the fixed limit of its quantity is rounding. Some trainings amplify rounding beyond it. So it is
measured how far one device is from itself when its weights are perturbed by a rounding error, or its samples summed in
another order; the limit is three times that, but at most ten times the fixed one.

Tensors are compared over the whole model, ||a - b|| / ||b||, and the first step's gradients one by one as well: there a
tensor may differ by ten times its own rounding. Where that is as much as its gradient, the gradient is rounding
(attention's key biases, a bias before a BatchNorm). An adaptive optimizer takes steps of full length from it, so such
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

QUANTITIES = ("loss", "gradient norm", "gradients", "each gradient", "weights", "buffers", "optimizer")
LIMITS = {
    "fp64": dict(zip(QUANTITIES, (1e-6, 1e-6, 1e-7, 1e-6, 1e-7, 1e-7, 1e-6), strict=True)),
    "fp32": dict(zip(QUANTITIES, (1e-5, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-3), strict=True)),
    "bf16": dict(zip(QUANTITIES, (1e-2, 5e-2, 1e-1, None, 1e-2, 2e-2, 5e-1), strict=True)),
}
"""Largest relative difference that counts as equal, by precision: the usual one of sums in another order."""
LIMITS["fp16"] = LIMITS["bf16-compute"] = LIMITS["bf16-true"] = LIMITS["fp8"] = LIMITS["bf16"]
RAISED = 10.0
"""A limit is raised at most so many times."""
MARGIN = 3.0
"""Times the measured rounding that a raised limit allows: another plan's rounding is not the same."""
BEYOND = 100.0
"""Times the measured rounding: such a difference is no rounding."""
OWN = 10.0
"""Times its own rounding that a tensor's gradient may differ by."""
TINY = 1e-5
"""A gradient this small beside the model's typical one may be rounding where one device has exactly zero."""


@dataclass(frozen=True)
class Quantity:
    """One quantity, compared."""

    name: str
    difference: float
    limit: float
    """Raised by the measured rounding, where the difference is beyond the fixed one."""
    first: str = ""
    """The first step, or tensor, beyond the limit."""
    rounding: float = 0.0
    """How far one device is from itself."""
    fixed: float = math.inf
    """The limit before it is raised."""

    @property
    def equal(self) -> bool:
        return self.difference <= self.limit  # False for NaN

    @property
    def beyond_rounding(self) -> bool:
        """Whether the difference is far larger than the measured rounding explains."""
        return not self.difference <= max(RAISED * self.fixed, BEYOND * self.rounding)


@dataclass(frozen=True)
class Comparison:
    """A plan compared with one device."""

    rows: list[Quantity]
    noise: list[str] = field(default_factory=list)
    """Tensors whose gradient is rounding."""
    blind: str = ""
    """Why the comparison proves little, though no quantity differs."""

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
    def worst(self) -> Quantity:
        return max(self.rows, key=lambda row: math.inf if math.isnan(row.difference) else row.difference / row.limit)


def compare(want: Trained, got: Trained, again: list[Trained], limits: Mapping[str, float | None]) -> Comparison:
    """``got`` against ``want``; ``again`` are other roundings of ``want``."""
    each_limit = limits["each gradient"]
    noise = _noise(want, got, again, 1.0 if each_limit is None else OWN)
    rows = []
    for name in QUANTITIES:
        limit = limits[name]
        if name == "each gradient":
            if limit is not None and want.gradients.keys() == got.gradients.keys():
                rows.append(_each(want, got, again, limit, noise))
            continue
        assert limit is not None
        kept = {"loss": "losses", "gradient norm": "norms"}.get(name, name)
        kept = "first_buffers" if name == "buffers" and noise else kept
        theirs, ours, others = getattr(want, kept), getattr(got, kept), [getattr(other, kept) for other in again]
        if isinstance(theirs, list):
            rows.append(_series(name, theirs, ours, others, limit))
        elif theirs or ours:
            skipped = noise if name in ("weights", "optimizer") else set()
            rows.append(_tensors(name, theirs, ours, others, limit, skipped, want.order))
    return Comparison(rows, sorted(noise), _blind(want, noise))


def _blind(want: Trained, noise: set[str]) -> str:
    """Why too little is left to compare: gradients that are rounding should be a small part of the whole."""
    if noise and _norm(want.gradients[name] for name in noise) > 0.1 * _norm(want.gradients.values()):
        return f"the gradients of {len(noise)} of {len(want.gradients)} tensors are rounding"
    return ""


def _noise(want: Trained, got: Trained, again: list[Trained], times: float) -> set[str]:
    """Tensors whose gradient on one device is not larger than rounding; and those whose gradient is exactly zero there
    and rounding under the plan."""
    own, found = _own_rounding(want, again), set()
    for name, gradient in want.gradients.items():
        size, ours = _norm([gradient]), got.gradients.get(name)
        zero_there = size == 0 and ours is not None and 0 < _norm([ours]) <= _tiny(want, name)
        if 0 < size <= times * own[name] or zero_there:
            found.add(name)
    return found


def _own_rounding(want: Trained, again: list[Trained]) -> dict[str, float]:
    """How far each tensor's gradient is from itself."""
    return {
        name: _largest(_distance(gradient, other.gradients.get(name)) for other in again)
        for name, gradient in want.gradients.items()
    }


def _tiny(want: Trained, name: str) -> float:
    count = sum(g.numel() for g in want.gradients.values()) or 1
    return TINY * _norm(want.gradients.values()) * (want.gradients[name].numel() / count) ** 0.5


def _each(want: Trained, got: Trained, again: list[Trained], limit: float, noise: set[str]) -> Quantity:
    """The largest difference of a tensor's gradient, relative to it; its own rounding allowed for."""
    own, worst, first = _own_rounding(want, again), 0.0, ""
    for name in named_in_order(list(want.gradients), want.order):
        allowed = max(_norm([want.gradients[name]]), OWN * own[name] / limit)
        if name in noise:
            allowed = max(allowed, _tiny(want, name) / limit)
        distance = _distance(want.gradients[name], got.gradients[name])
        share = distance / allowed if allowed else math.inf if distance else 0.0
        if not share <= limit and not first:
            first = name
        worst = share if not share <= worst else worst
    return Quantity("each gradient", worst, limit, first, fixed=limit)


def _series(name: str, want: list[float], got: list[float], again: list[list[float]], limit: float) -> Quantity:
    def relative(other: list[float]) -> list[float]:
        both = zip(other, want, strict=True)  # of a step that fp16 skips both are infinite
        return [0.0 if a == b else abs(a - b) / (abs(b) or 1.0) for a, b in both]

    differences = relative(got)
    rounding = _largest(d for other in again for d in relative(other))
    worst = max(differences, key=lambda d: (d != d, d))
    allowed = limit if worst <= limit else raised(limit, rounding)
    beyond = next((i for i, d in enumerate(differences, 1) if not d <= allowed), None)
    return Quantity(name, worst, allowed, f"step {beyond}" if beyond else "", rounding, limit)


def _tensors(
    name: str,
    want: dict[Any, Tensor],
    got: dict[Any, Tensor],
    again: list[dict[Any, Tensor]],
    limit: float,
    skipped: set[str],
    order: list[str],
) -> Quantity:
    if want.keys() != got.keys():
        missing = min(_label(key) for key in want.keys() ^ got.keys())
        return Quantity(name, math.inf, limit, f"{missing} is in one of them only", fixed=limit)
    want = {key: tensor for key, tensor in want.items() if _owner(key) not in skipped}
    size = _norm(want.values()) or 1.0
    distances = lambda other: {key: _distance(tensor, other.get(key)) for key, tensor in want.items()}
    apart = distances(got)
    total = math.hypot(*apart.values()) / size
    rounding = _largest(math.hypot(*distances(other).values()) / size for other in again)
    allowed = limit if total <= limit else raised(limit, rounding)
    first = ""
    if not total <= allowed and want:
        relative = {key: d / (_norm([want[key]]) or 1.0) for key, d in apart.items()}
        owners = list(named_in_order([_owner(key) for key in relative], order))
        beyond = [key for key, d in relative.items() if not d <= allowed]
        worst = max(relative, key=lambda key: relative[key])
        first = _label(min(beyond, key=lambda key: owners.index(_owner(key)), default=worst))
    return Quantity(name, total, allowed, first, rounding, limit)


def raised(limit: float, rounding: float) -> float:
    return min(RAISED * limit, max(limit, MARGIN * rounding))


def _owner(key: str | tuple[str, str]) -> str:
    """The parameter (or buffer) that a tensor belongs to."""
    return key if isinstance(key, str) else key[0]


def _label(key: str | tuple[str, str]) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _largest(measured: Iterable[float]) -> float:
    """Of what is finite."""
    return max((d for d in measured if math.isfinite(d)), default=0.0)


def _norm(tensors: Iterable[Tensor]) -> float:
    """Over all of them, of what is finite."""
    return sum(_wide(t).abs().square().nan_to_num(0.0, 0.0, 0.0).sum().item() for t in tensors) ** 0.5


def _distance(tensor: Tensor, other: Tensor | None) -> float:
    if other is None:
        return math.inf
    a, b = _wide(tensor), _wide(other)
    same = (a == b) | ((a != a) & (b != b))
    return (b - a).abs().masked_fill(same, 0.0).square().sum().item() ** 0.5


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
