"""What the ranks hold of a model when its training is over: parts, which stay where they are until somebody asks.

All tensors are put together one at a time, over the world of all ranks; the groups of the training are gone by then.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.buffers.watch import named_state
from meshfit.axes.place import Placed
from meshfit.checkpoint.box import Box, inside, sizes, volume, whole
from meshfit.checkpoint.pieces import layout_of
from meshfit.checkpoint.state import saved_tensors
from meshfit.comm.objects import all_gather_object
from meshfit.torch_private.modules import own_buffers
from meshfit.torch_private.tensors import set_data

Described = tuple[tuple[int, ...], torch.dtype, tuple[Box, ...]]
"""A tensor's shape, its dtype, and the boxes of it that a rank holds."""


class WholeModel:
    """A model that is all in this process, as ``Parts`` is one that is not."""

    def __init__(self, model: nn.Module):
        self.ties = tied(model)
        self._tensors = saved_tensors(model)
        self.saved = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name].detach()


class Parts:
    """Of this rank. All ranks call each method together."""

    def __init__(self, placed: Placed):
        self.device = placed.device
        self.mine: dict[str, list[tuple[Box, Tensor]]] = {}
        described: dict[str, Described] = {}
        for name, tensor in named_state(placed.model).items():
            layout = layout_of(placed, tensor)
            pieces = [piece for piece in layout.pieces if all(sizes(piece.box))]
            self.mine[name] = [(piece.box, piece.of(tensor.detach())) for piece in pieces]
            described[name] = layout.shape, tensor.dtype, tuple(piece.box for piece in pieces)
        every = all_gather_object(described)
        self.described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.owners: dict[str, dict[Box, int]] = {}
        """By tensor and box, the first rank that holds it."""
        for rank, each in enumerate(every):
            for name, (shape, dtype, boxes) in each.items():
                self.described.setdefault(name, (shape, dtype))
                for box in boxes:
                    self.owners.setdefault(name, {}).setdefault(box, rank)
        self.ties = tied(placed.shape)
        saved = saved_tensors(placed.shape)
        self.saved = {name: (dtype, shape) for name, (shape, dtype) in self.described.items() if name in saved}
        """Those of a state dict, tied weights once."""

    def tensors(self, names: list[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, on the CPU, one at a time."""
        for name in self.described if names is None else names:
            shape, dtype = self.described[name]
            found = torch.empty(shape, dtype=dtype)
            owners, mine = self.owners.get(name, {}), dict(self.mine.get(name, ()))
            assert sum(map(volume, owners)) == found.numel(), f"parts of {name} are missing"
            for box, owner in owners.items():
                if owner == dist.get_rank():
                    part = mine[box].to(self.device).contiguous()
                else:
                    part = torch.empty(sizes(box), dtype=dtype, device=self.device)
                dist.broadcast(part.view(-1).view(torch.uint8), owner)
                found[inside(whole(shape), box)] = part.cpu()
            yield name, found

    @torch.no_grad()
    def into(self, model: nn.Module) -> nn.Module:
        """``model``, which was built on meta, with all weights."""
        named = named_state(model)
        for name, tensor in self.tensors():
            old = named[name]
            if isinstance(old, nn.Parameter):
                set_data(old, tensor)
            else:
                _put(model, old, tensor)
        return model

    def chunks(self, name: str) -> Iterator[Tensor]:
        """For ``export.write``: all ranks ask for the same ones."""
        for _, tensor in self.tensors([name]):
            yield tensor


def _put(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Let ``new`` be the buffer that ``old`` was."""
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is old:
                own_buffers(module)[name] = new
