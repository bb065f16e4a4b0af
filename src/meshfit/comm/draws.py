"""Random numbers of the ranks of a group: the same on all of them, or each rank's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from meshfit.comm.group import Group, RankGroup


def draw_own(rank: int, device: torch.device | None) -> Callable[[], None]:
    """From here on random numbers are the rank's own, seeded by one draw from the common ones. Returns what goes on
    with those: call it when the own ones are done with."""
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) + rank
    gpu = device if device is not None and device.type == "cuda" else None
    kept, of_gpu = torch.get_rng_state(), None if gpu is None else torch.cuda.get_rng_state(gpu)
    torch.default_generator.manual_seed(seed)
    if gpu is not None:
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(seed)

    def common() -> None:
        torch.set_rng_state(kept)
        if gpu is not None and of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, gpu)

    return common


@contextmanager
def own_draws(group: Group, device: torch.device) -> Iterator[None]:
    """Random numbers of this rank alone; afterwards the common ones go on as if one had been drawn: what is recomputed
    draws the same again. Threads of one process have one stream, and keep it."""
    if not isinstance(group, RankGroup):
        yield
        return
    common = draw_own(group.rank, device)
    try:
        yield
    finally:
        common()


class Stream:
    """Random numbers of a group, the same on every rank; while a region is open those of the rank alone.

    The rank's own stream is seeded by a draw from the group's, which goes on where it stood when the last open region
    is left. Both states belong to the generators of the process: what is recomputed draws the same again.
    """

    def __init__(self, group: Group):
        self.group = group
        self._open: set[object] = set()
        self._common: Callable[[], None] | None = None

    @property
    def inside(self) -> bool:
        return bool(self._open)

    def own(self, region: object, device: torch.device | None) -> None:
        """From here on each rank draws its own numbers."""
        first = not self._open
        self._open.add(region)
        if first and isinstance(self.group, RankGroup):
            self._common = draw_own(self.group.rank, device)

    def common(self, region: object) -> None:
        """From here on all ranks draw the same numbers again, if no other region is open."""
        self._open.discard(region)
        if self._open or self._common is None:
            return
        common, self._common = self._common, None
        common()
