"""The key of a run that workers of other hosts may join: who knows it is let in.

It comes from MESHFIT_KEY, or from the file that MESHFIT_KEY_FILE names; else the first host draws one and prints it
once, and who joins is asked for it. It is on no command line, and in no file that meshfit writes.
"""

import getpass
import os
import secrets
import stat
import sys
from pathlib import Path

from meshfit.errors import JobError

NAME = "MESHFIT_KEY"
SHORTEST = 16  # characters


def given() -> bytes | None:
    """The key that the environment holds, if it does."""
    if text := os.environ.get(NAME):
        return _checked(text, NAME)
    if path := os.environ.get(f"{NAME}_FILE"):
        try:
            mode, text = Path(path).stat().st_mode, Path(path).read_text()
        except (OSError, ValueError) as error:
            raise JobError(f"the key cannot be read from {path}", str(error)) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise JobError(f"the key in {path} can be read by others", f"chmod 600 {path}")
        return _checked(text, path)
    return None


def read_from(path: str | None) -> None:
    """Have it read from ``path``, if one is named."""
    if path is not None:
        os.environ.pop(NAME, None)
        os.environ[f"{NAME}_FILE"] = path
        given()  # refused now, if it cannot be read


def drawn() -> bytes:
    return secrets.token_urlsafe(24).encode()


def asked(address: str) -> bytes:
    """The key of the run at ``address``: given, or typed in."""
    if (key := given()) is not None:
        return key
    if not sys.stdin.isatty():
        raise JobError(
            f"the run at {address} lets in who knows its key, and none was given",
            f"the first host has printed it: export {NAME}, or name a file that holds it",
        )
    return _checked(getpass.getpass(f"key of the run at {address}: "), "what was typed")


def _checked(text: str, where: str) -> bytes:
    if len(text.strip()) < SHORTEST:
        raise JobError(f"the key in {where} has {len(text.strip())} characters", f"{SHORTEST} at least")
    return text.strip().encode()
