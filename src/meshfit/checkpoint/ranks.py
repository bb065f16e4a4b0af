"""The ranks of a run, as a checkpoint sees them: small values now and then, over a group of their own, so that nothing
is mixed up with the collectives of a training that goes on."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshfit.comm.objects import all_gather_object
from meshfit.errors import MeshfitError

R = TypeVar("R")


class Ranks:
    """All ranks make it together, and call each method together."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self._group = dist.new_group(backend="gloo") if size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        return [value] if self._group is None else all_gather_object(value, self._group)  # type: ignore[arg-type]

    def first(self, act: Callable[[], R]) -> R:
        """What ``act`` returns in the first rank, on all of them; a ``MeshfitError`` is raised on all."""
        found: Any = None
        if self.rank == 0:
            try:
                found = act()
            except MeshfitError as error:
                found = error
        found = self.gather(found)[0]
        if isinstance(found, MeshfitError):
            raise found
        return found

    def together(self, act: Callable[[], R]) -> R:
        """What ``act`` returns in this rank; a ``MeshfitError`` of any rank is raised on all."""
        found, error = None, None
        try:
            found = act()
        except MeshfitError as raised:
            error = raised
        for each in self.gather(error):
            if each is not None:
                raise each
        return found  # type: ignore[return-value]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)  # type: ignore[arg-type]
        self._group = None
