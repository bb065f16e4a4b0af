"""What the ranks hold of a model when its training is over: parts, which stay where they are until somebody asks.

All tensors are put together one at a time, over the world of all ranks; the groups of the training are gone by then.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.place import Placed
from meshfit.checkpoint.box import Box, inside, sizes, volume, whole
from meshfit.checkpoint.files import Files
from meshfit.checkpoint.pieces import layout_of
from meshfit.checkpoint.state import buffers
from meshfit.checkpoint.tensorfile import header
from meshfit.torch_private import own_buffers, set_data

Described = tuple[tuple[int, ...], torch.dtype, tuple[Box, ...]]
"""A tensor's shape, its dtype, and the boxes of it that a rank holds."""


class Parts:
    """Of this rank. All ranks call each method together."""

    def __init__(self, placed: Placed):
        self.device = placed.device
        self.mine: dict[str, list[tuple[Box, Tensor]]] = {}
        described: dict[str, Described] = {}
        for name, tensor in _named(placed.model).items():
            layout = layout_of(placed, tensor)
            pieces = [piece for piece in layout.pieces if all(sizes(piece.box))]
            self.mine[name] = [(piece.box, piece.of(tensor.detach())) for piece in pieces]
            described[name] = layout.shape, tensor.dtype, tuple(piece.box for piece in pieces)
        every: list[dict[str, Described]] = [described] * dist.get_world_size()
        dist.all_gather_object(every, described)
        self.described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.owners: dict[str, dict[Box, int]] = {}
        """By tensor and box, the first rank that holds it."""
        for rank, each in enumerate(every):
            for name, (shape, dtype, boxes) in each.items():
                self.described.setdefault(name, (shape, dtype))
                for box in boxes:
                    self.owners.setdefault(name, {}).setdefault(box, rank)
        saved = {name for kind, name, _ in buffers(placed.shape) if kind == "model"}
        saved |= dict(placed.shape.named_parameters()).keys()
        held = [name for name in self.described if name in saved]
        self.saved = sorted(held, key=lambda name: -self.described[name][1].itemsize)
        """Names in a state dict, without those of tied weights, as a file has them."""

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
        named = _named(model)
        for name, tensor in self.tensors():
            old = named[name]
            if isinstance(old, nn.Parameter):
                set_data(old, tensor)
            else:
                _put(model, old, tensor)
        return model

    def save(self, path: Path | None) -> None:
        """A safetensors file of the weights, written by the rank that gives a ``path``."""
        each = self.tensors(self.saved)
        try:
            if path is not None:
                each_of = {name: (dtype, shape) for name in self.saved for shape, dtype in [self.described[name]]}
                begin, _ = header(each_of, {"format": "pt"})
                Files(path.parent).put(path.name, _bytes(begin, each))
        finally:
            for _ in each:  # the others wait
                pass


def _bytes(begin: bytes, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[memoryview]:
    yield memoryview(begin)
    for _, tensor in tensors:
        if tensor.numel():
            yield memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _put(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Let ``new`` be the buffer that ``old`` was."""
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is old:
                own_buffers(module)[name] = new
