"""How much a file of data may unfold to, as the environment says it: what is compressed may be small on disk and larger
than memory, by mistake or on purpose."""

import os
import re

from meshfit.errors import JobError

UNFOLDED, PIXELS = "MESHFIT_LARGEST_UNFOLDED", "MESHFIT_LARGEST_PICTURE"
RATIO, ALWAYS = 100, 64 * 2**20
"""A file may become so many times larger, and any file so many bytes: numbers seldom shrink to a tenth."""
PICTURE = 100_000_000
"""Pixels: as RGB, 300 MB."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def largest_unfolded(size: int) -> int:
    """Bytes that a compressed file of ``size`` bytes may become."""
    asked = os.environ.get(UNFOLDED)
    return max(ALWAYS, RATIO * size) if asked is None else _number(UNFOLDED, asked)


def largest_picture() -> int:
    """Pixels."""
    asked = os.environ.get(PIXELS)
    return PICTURE if asked is None else _number(PIXELS, asked)


def _number(name: str, text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if found is None:
        raise JobError(f"{name}={text!r} is no number", f"{name}=20GB, say")
    return int(float(found[1]) * UNITS[found[2]])
