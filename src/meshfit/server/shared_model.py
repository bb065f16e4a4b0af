"""The whole model in memory that the ranks of a worker share, and what of it each of them holds."""

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.copies import copied
from meshfit.axes.data.batchnorm import running_statistics
from meshfit.axes.place import Placed
from meshfit.checkpoint.box import volume
from meshfit.checkpoint.pieces import LocalBox, layout_of
from meshfit.errors import PlanError, RankError


def stand_in(model: nn.Module) -> nn.Module:
    """A copy of what is trained of ``model``, and of its statistics; the rest is left without memory."""
    memo = {id(p): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in model.parameters()}
    try:
        made = copied(model, dict(memo))
    except Exception as error:
        raise PlanError(
            "the model cannot be copied, and a worker of several ranks keeps a copy for its servers",
            f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            "server= and data= alone take the model as it is",
        ) from error
    kept = {id(buffer) for buffer in running_statistics(made).values()}
    for tensor in (*made.parameters(), *made.buffers()):
        if not tensor.requires_grad and id(tensor) not in kept:
            tensor.data = torch.empty(0, dtype=tensor.dtype)
    return made


@dataclass(frozen=True)
class SharedPart:
    """A box of a whole tensor that this rank holds."""

    name: str
    tensor: Tensor
    """Of the rank, a parameter or buffer."""
    piece: LocalBox
    up: Tensor
    """Where it is put to be sent, in the memory of the group."""
    down: Tensor
    """Where it has come to."""
    sends: bool
    """Whether this rank sends it."""

    @property
    def nbytes(self) -> int:
        return self.down.numel() * self.down.element_size()

    @property
    def sent(self) -> Tensor | None:
        """The gradient of a parameter, or a buffer itself."""
        return self.tensor.grad if isinstance(self.tensor, nn.Parameter) else self.tensor


def mine(placed: Placed, tensor: Tensor, whole: Tensor) -> Tensor:
    """What a rank that holds ``tensor``, a parameter, holds of ``whole``, laid out like it: a moment, an average."""
    layout = layout_of(placed, tensor)
    if tuple(whole.shape) != layout.shape or layout.shape == tuple(tensor.shape):
        return whole
    made = torch.empty_like(tensor, dtype=whole.dtype, device="cpu", requires_grad=False)
    for piece in layout.pieces:
        if volume(piece.box):
            piece.of(made).copy_(whole[tuple(slice(*ends) for ends in piece.box)])
    return made


# Descriptors, from the first rank to the others


def hand_out(address: str, fds: list[int], count: int) -> None:
    """From the first rank to ``count`` others. All ranks call this, or ``receive``, together."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(count)
        dist.barrier()
        for _ in range(count):
            with listener.accept()[0] as end:
                socket.send_fds(end, [b"."], fds)
    os.unlink(address)


def receive(address: str, count: int) -> list[int]:
    dist.barrier()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(address)
        _, fds, _, _ = socket.recv_fds(end, 1, count)
    if len(fds) != count:
        raise RankError(f"{len(fds)} descriptors came of {count}", "the first rank of the worker may have ended")
    return fds
