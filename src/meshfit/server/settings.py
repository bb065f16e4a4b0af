"""The settings of a server."""

from dataclasses import dataclass
from pathlib import Path


def gone_mark(folder: Path, worker: int) -> Path:
    """A file where the processes of a run meet: this worker, which was started with the servers, will not come."""
    return folder / f"gone{worker}"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server deals with its workers. ``staleness``, ``lost`` and ``compress`` are as in a plan."""

    workers: int
    """That must have come before the first step, or have left a ``gone_mark``; later ones may come and go."""
    meeting: Path | None = None
    """Where these marks are."""
    staleness: float = 0
    lost: str = "average"
    compress: str = "none"
    step: int = 0
    """Steps that were taken before it began, and the samples they saw."""
    samples: float = 0
    first: int = 0
    """Number of the first batch: of all workers together, or with staleness of one each."""
    applied: tuple[int, ...] = ()
    """Numbers of batches after it whose gradients were applied before it began."""
    total: int | None = None
    """Number of the batch after the last; None: as many as are asked for."""
    batch_size: int = 1
    """Samples for which the schedule goes on by one step."""
    patience: float = 600.0
    """Seconds after which a worker that is connected but not heard from counts as lost, where others wait for it."""
    every: int | None = None
    """Steps between snapshots."""
    folder: Path | None = None
    """For snapshots, of this server alone."""
    upto: int | None = None
    """Go on from no newer snapshot than that of this step: several servers must go on from the same one. When one of
    them dies all are started again, with ``snapshot.common``."""
    index: int = 0
    """Which server this is. The first keeps tickets, clocks and BatchNorm's statistics."""
