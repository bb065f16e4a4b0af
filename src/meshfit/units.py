"""Numbers with units, in three digits."""

import re

LENGTHS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def size(count: float) -> str:
    """Bytes, in powers of 1024: 1.5 KiB."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def quantity(count: float, billion: str = "G") -> str:
    """In powers of 1000: 12.3 M."""
    return _scaled(count, 1000, ("", "k", "M", billion, "T", "P")).strip()


def flop(count: float) -> str:
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def seconds(value: float) -> str:
    for limit, unit, length in ((1, "ms", 1e-3), (120, "s", 1), (7200, "min", 60)):
        if value < limit:
            return f"{value / length:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def in_seconds(asked: object) -> float | None:
    """30, "30 s", "10 minutes" or "2 hours" as seconds; None: it is none of them."""
    if isinstance(asked, int | float) and not isinstance(asked, bool):
        return float(asked) if asked > 0 else None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|seconds?|min|minutes?|h|hours?)\s*", str(asked).lower())
    return (float(found[1]) * LENGTHS[found[2][0]] or None) if found else None


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= base
    return f"{count:.3g} {units[-1]}"
