"""Figures as people read them."""

from typing import Any


def number(value: Any) -> float:
    """From JSON, which has no NaN."""
    return float(value)


def amount(value: float) -> str:
    for unit, divisor in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * divisor:
            return f"{value / divisor:,.1f} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def arithmetic(flops: float) -> str:
    """A second."""
    unit, divisor = next(((u, d) for u, d in (("T", 1e12), ("G", 1e9)) if flops >= d), ("M", 1e6))
    return f"{flops / divisor:.3g} {unit}FLOP/s"


def seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.3g} min"
    return f"{value / 3600:.3g} h"
