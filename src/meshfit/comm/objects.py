"""Values between ranks: words, numbers, containers, tensors. Nothing is pickled (encoding.py).

torch's own ``all_gather_object`` and its kin unpickle what arrives, which runs whatever it says; and a process group
asks nobody who they are.

    cost    one gather of lengths and one of bytes, padded to the longest; a broadcast of each
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from meshfit.comm.encoding import dumps, loads

R = TypeVar("R")


def all_gather_object(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """What each rank of the group says, by rank. All of them call it together."""
    mine, lengths = _padded(value, group)
    parts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(parts, mine, group=group)
    return [loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def gather_object(value: R, group: dist.ProcessGroup | None = None) -> list[R] | None:
    """What each rank says, on the first one of the group; None on the others."""
    mine, lengths = _padded(value, group)
    parts = [torch.empty_like(mine) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(mine, parts, group=group, group_dst=0)
    return None if parts is None else [loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def broadcast_object(value: R, group: dist.ProcessGroup | None = None) -> R:
    """What the first rank of the group says, on all; that rank's own is ``value`` itself."""
    first = dist.get_rank(group) == 0
    sent = _bytes(value) if first else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([sent.numel()], device="cpu")
    dist.broadcast(length, group=group, group_src=0)
    sent = sent if first else torch.empty(int(length), dtype=torch.uint8, device="cpu")
    dist.broadcast(sent, group=group, group_src=0)
    return value if first else loads(sent)


def _padded(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """``value`` as bytes, as many as the longest of all ranks has; and how many each has."""
    mine = _bytes(value)
    every = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, torch.tensor([mine.numel()], device="cpu"), group=group)
    lengths = [int(length) for length in every]
    return pad(mine, (0, max(lengths) - mine.numel())), lengths


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
