"""What was found out about a model before, kept on disk: tensor plans, and the planner's traces and findings.

It lies in the user's cache folder, under a digest of all that it was found from: the modules with their plain
attributes, parameters and buffers, the operations of a step (``tensor/program.py``), what was asked, torch and the code
that finds it. What cannot be read is found again; the folder may be deleted at any time.
"""

import contextlib
import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.tensor.kinds import is_constant
from meshfit.axes.tensor.program import Program, contents_of
from meshfit.launch.folders import cache_folder
from meshfit.torch_private.modules import own_buffers, own_parameters

MOST = 256
"""Files that are kept of a kind; the oldest go first."""

PLAIN = (
    "meshfit.anatomy.operations",
    "meshfit.anatomy.trace",
    "meshfit.axes.context.plan",
    "meshfit.axes.context.span",
    "meshfit.axes.tensor.region",
    "meshfit.comm.group",
)
"""Modules whose classes are values: what is kept is made of those, of containers and of sizes."""

V = TypeVar("V")


def kept_path(kind: str, model: nn.Module, program: Program | None, *asked: object) -> Path | None:
    """Where that is kept which was found of ``model``, whose step is ``program``; None: nowhere."""
    folder = cache_folder()
    if folder is None or program is None:
        return None
    words = " ".join(map(str, (torch.__version__, _own_code(), *asked, program.shaped)))
    digest = hashlib.sha256(words.encode())
    for said in _structure(model):
        digest.update(said)
    return folder / kind / f"{digest.hexdigest()[:40]}.pickle"


def _structure(model: nn.Module) -> Iterator[bytes]:
    """All that a plan could depend on beside what is computed."""
    for path, module in model.named_modules():
        kind = type(module)
        yield f"{path} {kind.__module__}.{kind.__qualname__} {_plain(module)}".encode()
        for value in vars(module).values():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type):
                yield _plain(value).encode()
        for name, p in own_parameters(module).items():
            yield f"{name} {None if p is None else (tuple(p.shape), p.dtype, p.requires_grad)}".encode()
        for name, buffer in own_buffers(module).items():
            yield f"{name} {None if buffer is None else (tuple(buffer.shape), buffer.dtype)}".encode()
            yield b"" if buffer is None or buffer.is_meta else contents_of(buffer)
    yield str(sorted(tied(model).items())).encode()


def _plain(thing: Any) -> str:
    own = ((name, str(value)) for name, value in vars(thing).items() if is_constant(value))
    return str(sorted(pair for pair in own if not pair[0].endswith("_hash")))  # another in every process: transformers


@cache
def _own_code() -> str:
    """A digest of the planner: what another one found may not be what this one would."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in ("anatomy", "axes", "comm"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_kept(path: Path | None, kind: type[V]) -> V | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            found = _PlainReader(file).load()
        return found if isinstance(found, kind) else None
    except Exception:  # not there, cut off, of another time: whatever it is, it can be found again
        return None


class _PlainReader(pickle.Unpickler):
    """Reads values, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if module in PLAIN or (module, name) == ("torch", "Size"):
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in what is kept")


def write_kept(path: Path | None, found: object) -> None:
    """Whole or not at all. A cache that cannot be written is no reason to stop."""
    if path is None:
        return
    with contextlib.suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                pickle.dump(found, file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        every = sorted(path.parent.glob("*.pickle"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in every[MOST:]:
            old.unlink(missing_ok=True)
