"""Weights that a model built on meta starts with, where files have them: each rank reads its own part, and no rank
makes, sends or holds the whole.

Files are those of ``load_weights`` in the function that builds the model (or ``weights=``); or the checkpoint that the
training resumes from, whose weights need not be loaded again then (load.py).
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.place import Placed
from meshfit.checkpoint import manifest
from meshfit.checkpoint.box import inside, sizes, whole
from meshfit.checkpoint.load import THREADS, agreed
from meshfit.checkpoint.pieces import layout_of
from meshfit.checkpoint.ranks import Ranks
from meshfit.checkpoint.read import OnDisk, Wanted, fill_all
from meshfit.checkpoint.weights import FromFile
from meshfit.deferred import Deferred, TensorSource
from meshfit.errors import CheckpointError, MeshfitError


class InitialWeights:
    """What of ``deferred`` comes from files. ``resume``: where the training goes on from, if it does. All ranks make it
    together."""

    def __init__(self, deferred: Deferred, resume: Any, rank: int, size: int):
        self._ranks = Ranks(rank, size)
        self._sources = deferred.sources
        self.checkpoint: str | None = None
        """Whose weights the parameters have."""
        self._saved = {} if resume is None else self._resumed(deferred, resume)
        self.read: Collection[Tensor] = ()
        """Parameters that have their values from a file."""

    def _resumed(self, deferred: Deferred, path: Any) -> dict[Tensor, TensorSource]:
        """Each parameter that is in the checkpoint as it is in the model; ``restore`` says what is not."""
        try:
            files, name = agreed(self._ranks, path, [])
            found = self._ranks.together(lambda: manifest.read(files, name))
        except MeshfitError:
            return {}
        tensors, self.checkpoint = OnDisk.of(found), str(found)
        of_model, known = found.named("model"), set(deferred.parameters)
        return {
            p: FromFile(tensors, f"model/{name}")
            for name, p in deferred.model.named_parameters()
            if p in known and name in of_model and (of_model[name].shape, of_model[name].dtype) == (p.shape, p.dtype)
        }

    def __call__(self, placed: Placed) -> Collection[Tensor]:
        """Put this rank's parts of the parameters in place; which parameters, the same on all ranks, which call it
        together."""
        sources = self._saved or self._sources
        try:
            self._ranks.together(lambda: read_parts(placed, sources))
        except CheckpointError:
            if sources is self._sources:
                raise
            sources = self._sources  # the checkpoint is damaged: ``restore`` finds another one
            self._ranks.together(lambda: read_parts(placed, sources))
        finally:
            self.close()
        if sources is self._sources:
            self.checkpoint = None
        self.read = sources.keys()
        return self.read

    def close(self) -> None:
        self._ranks.close()


@torch.no_grad()
def read_parts(placed: Placed, sources: Mapping[Any, TensorSource]) -> None:
    """What this rank holds of the parameters, straight from where it is."""
    wanted: dict[Any, list[Wanted]] = {}
    for p in placed.model.parameters():
        if (source := sources.get(p)) is None:
            continue
        layout = layout_of(placed, p)
        pieces = [piece for piece in layout.pieces if all(sizes(piece.box))]
        if isinstance(source, FromFile):
            each = [Wanted(source.key, piece.box, piece.of(p.detach())) for piece in pieces]
            wanted.setdefault(source.tensors, []).extend(each)
        elif pieces:
            made = torch.empty(layout.shape, dtype=p.dtype)
            source(made)
            for piece in pieces:
                piece.of(p.detach()).copy_(made[inside(whole(layout.shape), piece.box)])
    for tensors, each in wanted.items():
        fill_all(tensors, each, threads=THREADS)
