"""Counts what makes the host wait for a GPU, by torch's sync debug mode, and where in the code it was called.

What the mode does not see: waits for events (``Event.synchronize``) and in collectives. Those are cuda*Synchronize in a
trace: ``benchmarks/syncs.py``.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SAID = "called a synchronizing CUDA operation"


@contextmanager
def counted(depth: int = 3) -> Iterator[Counter[str]]:
    """Within it, each synchronising operation counts, by the innermost ``depth`` lines of Python that led to it."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, *rest: object) -> None:
        if SAID in str(message):
            frames = traceback.extract_stack()[:-1]
            found[" < ".join(f"{_short(f.filename)}:{f.lineno}" for f in reversed(frames[-depth:]))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _short(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[parts.index("meshfit") :] if "meshfit" in parts else parts[-2:])
