"""Do all ranks issue their collectives in one order, and does everything complete if each operation blocks its ranks?

NCCL runs what a rank issues on a communicator in the order of issue, and promises nothing about the progress of one
communicator while another waits. So what must hold is what ``check`` asks of the logs of all ranks:

    each communicator sees the same operations, sizes and dtypes on all its ranks, in the same order
    if every operation blocks its rank until all ranks of the operation have come to it, every rank comes to its end

``Recorder`` writes such a log in a rank while it trains; for schedules of pipelines it is made without any rank.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Operation:
    """What one rank issued."""

    communicator: str
    kind: str
    """Of a message, "send": both ends log it alike."""
    ranks: tuple[int, ...]
    """That take part; of a message the sender, then the receiver."""
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.elements} {self.dtype} on {self.communicator} by {self.ranks}"


def check(logs: Sequence[Sequence[Operation]]) -> list[str]:
    """What is wrong with the logs of all ranks, by rank; nothing if all is well."""
    return _differences(logs) or _blocked(logs)


def _differences(logs: Sequence[Sequence[Operation]]) -> list[str]:
    seen: dict[tuple[str, tuple[int, ...]], dict[int, list[Operation]]] = defaultdict(dict)
    for rank, log in enumerate(logs):
        for operation in log:
            # Messages of several pairs may be on one communicator: each pair has an order of its own
            members = tuple(sorted(operation.ranks))
            seen[operation.communicator, members].setdefault(rank, []).append(operation)
    wrong = []
    for (communicator, members), by in seen.items():
        for rank in members:
            mine, theirs = by.get(rank, []), by[min(by)]
            for i in range(max(len(mine), len(theirs))):
                one, other = (str(log[i]) if i < len(log) else "nothing" for log in (mine, theirs))
                if one != other:
                    wrong.append(f"{communicator}, number {i}: rank {rank} {one}; rank {min(by)} {other}")
                    break
    return wrong


def _blocked(logs: Sequence[Sequence[Operation]]) -> list[str]:
    """Every operation blocks each of its ranks until all of them have come to it."""
    at = [0] * len(logs)
    count: list[Mapping[Any, int]] = [defaultdict(int) for _ in logs]

    def stands_at(rank: int) -> tuple[Operation, int] | None:
        if at[rank] == len(logs[rank]):
            return None
        operation = logs[rank][at[rank]]
        return operation, count[rank][operation.communicator, operation.ranks]

    moving = True
    while moving:
        moving = False
        for rank in range(len(logs)):
            while (here := stands_at(rank)) is not None and all(stands_at(r) == here for r in here[0].ranks):
                for r in here[0].ranks:
                    at[r] += 1
                    count[r][here[0].communicator, here[0].ranks] += 1  # type: ignore[index]
                moving = True
    return [f"rank {rank} waits for ever in {logs[rank][i]}" for rank, i in enumerate(at) if i < len(logs[rank])]


METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "send",
}
"""Of process groups, and what each does."""


class Recorder:
    """Logs what this rank issues while it is entered. Not a dispatch mode: those change what autograd does."""

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self._real: dict[str, Any] = {}

    def __enter__(self) -> "Recorder":
        for method in METHODS:
            if method in vars(dist.ProcessGroup):
                self._real[method] = vars(dist.ProcessGroup)[method]
                setattr(dist.ProcessGroup, method, self._noted(method))
        return self

    def __exit__(self, *error: object) -> None:
        for method, real in self._real.items():
            setattr(dist.ProcessGroup, method, real)

    def _noted(self, method: str) -> Any:
        real = getattr(dist.ProcessGroup, method)

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._note(method, group, args)
            return real(group, *args, **kwargs)

        return call

    def _note(self, method: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        ranks, kind = tuple(dist.get_process_group_ranks(group)), METHODS[method]
        sides = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args]
        elements = max((sum(t.numel() for t in side) for side in sides), default=0)
        elements *= kind != "all_to_all"  # there each rank says another size, as agreed before
        dtype = str(next((t.dtype for side in sides for t in side), ""))
        if kind == "send":
            peer, own = ranks[args[1]], ranks[group.rank()]
            ranks = (own, peer) if method == "send" else (peer, own)
        self.log.append(Operation(group.group_name, kind, ranks, elements, dtype))
