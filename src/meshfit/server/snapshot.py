"""A server's state on disk: tensors as safetensors, facts as JSON, each snapshot whole or not there.

The tensors are written and synced first; the facts, which hold the tensors' hash, come last, and appear whole: a
snapshot is there when its facts are. The two newest are kept.
"""

import hashlib
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from meshfit.checkpoint.files import Files
from meshfit.errors import RankError

KEPT = 2


def write(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    files, name = Files(folder), f"step-{step:012d}"
    files.make()
    body = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    for before in (f"{name}.json", f"{name}.safetensors"):  # of a server that was killed
        files.remove(before)
    files.write(f"{name}.safetensors", [body])
    files.put(f"{name}.json", [json.dumps(facts | {"sha256": hashlib.sha256(body).hexdigest()}).encode()])
    for old in _steps(folder)[:-KEPT]:
        files.remove(f"step-{old:012d}.json")
        files.remove(f"step-{old:012d}.safetensors")


class SnapshotWriter:
    """Writes one snapshot at a time, while its owner goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.join()
        self._thread = threading.Thread(target=write, args=(folder, step, tensors, facts))
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


def newest(folder: Path, upto: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest snapshot that is whole, of step ``upto`` at most; None if there is none."""
    for step in reversed(_steps(folder)):
        if upto is not None and step > upto:
            continue
        with suppress(OSError, ValueError, KeyError):
            facts = json.loads((folder / f"step-{step:012d}.json").read_bytes())
            body = (folder / f"step-{step:012d}.safetensors").read_bytes()
            if hashlib.sha256(body).hexdigest() == facts["sha256"]:
                return load(body), facts
    return None


def put_down(folders: list[Path]) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """What servers have put down for one who asked."""
    found = []
    for folder in folders:
        if (each := newest(folder)) is None:
            raise RankError(f"what a model server keeps is not to be found whole in {folder}")
        found.append(each)
    return found


def common(folders: list[Path]) -> int:
    """The newest step of which all servers have a snapshot, to start them all from; 0: from the beginning."""
    return max(set.intersection(*(set(_steps(folder)) for folder in folders)), default=0)


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.json"))
