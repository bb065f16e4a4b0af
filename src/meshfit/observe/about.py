"""What a run was made of, for its folder and for trackers."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from meshfit.job import Job
from meshfit.version import VERSION

GIT_SECONDS = 2.0


def about(job: Job) -> dict[str, Any]:
    facts = {
        "plan": str(job.plan),
        "batch_size": job.batch_size,
        "seed": job.seed,
        "meshfit": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return facts | ({"commit": commit} if (commit := _commit()) else {})


def _commit() -> str:
    """Of the repository in which the program lies; "+" if files of it were changed since. Empty: there is none."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    try:
        commit, changed = (_git(folder, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + "+" * bool(changed)


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()
