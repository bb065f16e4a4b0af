"""Which checkpoints stay. One goes only while newer ones are complete, and its manifest goes first: what is half
removed is no checkpoint."""

import os

from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import Files


def prune(files: Files, *, keep: int) -> list[str]:
    """Remove all but the ``keep`` newest complete checkpoints, and what saves left that did not end. The names of what
    went. For whoever has the lock: no save is under way."""
    whole = [found.name for found in manifest.complete(files)]
    gone = whole[max(1, keep) :]
    for name in gone:
        _remove(files, name)
    return [*gone, *(sweep(files) if whole else ())]


def sweep(files: Files, *, now: str | None = None) -> list[str]:
    """Remove what saves left that did not end, but for ``now``. A checkpoint that is damaged stays as it is."""
    gone = [
        name
        for name in manifest.folders(files)
        if name != now and files.size(os.path.join(name, manifest.NAME)) < 0 and files.size(name) < 0
    ]
    for name in gone:
        _remove(files, name)
    return gone


def _remove(files: Files, name: str) -> None:
    files.remove(os.path.join(name, manifest.NAME))
    files.sync(name)
    files.remove_folder(name)
    files.sync()
