"""The ranks of a run, as a checkpoint sees them: a few words now and then, over a group of their own, so that nothing
is mixed up with the collectives of a training that goes on."""

from typing import Any

import torch.distributed as dist

from meshfit.comm.objects import all_gather_object


class Ranks:
    """All ranks make it together."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self._group = dist.new_group(backend="gloo") if size > 1 else None

    def gather(self, word: Any) -> list[Any]:
        """What every rank says, by rank."""
        return [word] if self._group is None else all_gather_object(word, self._group)  # type: ignore[arg-type]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)  # type: ignore[arg-type]
        self._group = None
