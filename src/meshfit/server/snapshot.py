"""A server's state on disk: tensors as safetensors, facts as JSON, each snapshot whole or not there.

A snapshot is a folder of its own, named by its step. Files are written and synced under another name first; the facts,
which hold the tensors' hash, come last, and then the folder gets its name. The two newest are kept.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from meshfit.errors import RankError

KEPT = 2


def write(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    new, named = folder / f".step-{step:012d}", folder / f"step-{step:012d}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    body = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    _write(new / "tensors.safetensors", body)
    _write(new / "facts.json", json.dumps(facts | {"sha256": hashlib.sha256(body).hexdigest()}).encode())
    _sync(new)
    shutil.rmtree(named, ignore_errors=True)
    new.rename(named)
    _sync(folder)
    for old in sorted(folder.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path, upto: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest snapshot that is whole, of step ``upto`` at most; None if there is none."""
    for at in sorted(folder.glob("step-*"), reverse=True):
        if upto is not None and _step(at) > upto:
            continue
        with suppress(OSError, ValueError, KeyError):
            facts = json.loads((at / "facts.json").read_bytes())
            body = (at / "tensors.safetensors").read_bytes()
            if hashlib.sha256(body).hexdigest() == facts["sha256"]:
                return load(body), facts
    return None


def put_down(folders: list[Path]) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """What servers have put down for one who asked."""
    found = [(folder, newest(folder)) for folder in folders]
    for folder, each in found:
        if each is None:
            raise RankError(f"what a model server keeps is not to be found whole in {folder}")
    return [each for _, each in found if each is not None]


def common(folders: list[Path]) -> int:
    """The newest step of which all servers have a snapshot, to start them all from; 0: from the beginning."""
    steps = [{_step(at) for at in folder.glob("step-*")} for folder in folders]
    return max(set.intersection(*steps), default=0)


def _step(at: Path) -> int:
    return int(at.name.removeprefix("step-"))


def _write(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
