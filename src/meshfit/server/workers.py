"""The workers that share a batch, as a group to gather over: by way of their first server, not to each other.

BatchNorm over the whole batch, and auxiliary losses of mixtures, need what all workers have in the middle of a forward.
A process group would break with the first worker that dies; this one is whoever shares the batch now, and when one is
gone all hear ``RepeatBatch``. Outside of a batch (an evaluation, a trial) a worker is alone.

    traffic   what is gathered, up once and down from every worker; in words, a third more
"""

import base64
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfit.comm.group import Group
from meshfit.events import current

if TYPE_CHECKING:
    from meshfit.server.worker import Worker

MOST = 3 << 17  # bytes of all workers that are gathered at a time: words have a limit, see wire.py


class Workers(Group):
    def __init__(self) -> None:
        self.worker: Worker | None = None
        """Who this is; None before it has met its servers."""

    @property
    def _at_work(self) -> bool:
        return self.worker is not None and self.worker.at_work

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.rank if self.worker is not None and self._at_work else 0

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.degree if self.worker is not None and self._at_work else 1

    def all_gather(self, x: Tensor) -> Tensor:
        """What each worker gives, of one shape, in their order: [workers, ...]."""
        if self.worker is None or self.size == 1:
            return x.unsqueeze(0)
        current().moved("meet", x.nbytes * (1 + self.size))
        body = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        most = max(8, MOST // self.size)
        heard = [bytearray() for _ in range(self.size)]
        for at in range(0, max(1, len(body)), most):
            said = self.worker.meet(base64.b64encode(body[at : at + most]).decode())
            for whole, part in zip(heard, said, strict=True):
                whole += base64.b64decode(part)
        every = torch.frombuffer(bytearray().join(heard), dtype=torch.uint8) if body else torch.empty(0)
        return every.view(x.dtype).view(self.size, *x.shape).to(x.device)
