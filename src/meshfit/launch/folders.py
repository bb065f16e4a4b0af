"""Where meshfit keeps what it need not find out again."""

import os
from pathlib import Path

CACHE = "MESHFIT_CACHE"


def cache_folder() -> Path | None:
    """``MESHFIT_CACHE``, or ``meshfit`` in the user's cache folder. None: ``MESHFIT_CACHE=0`` says to keep nothing."""
    asked = os.environ.get(CACHE)
    if asked is not None:
        return None if asked in ("", "0") else Path(asked).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "meshfit" if os.path.isabs(home) else None
