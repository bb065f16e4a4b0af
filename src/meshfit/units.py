"""Numbers with units, in three digits."""


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


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= base
    return f"{count:.3g} {units[-1]}"
