"""A model of whose parameters each rank of an axis holds a part, cut along one dim."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshfit.axes.axis import Applied
from meshfit.axes.forward import unwrap
from meshfit.axes.tensor.region import Cut
from meshfit.comm.group import RankGroup


class CutParameters(Applied):
    """``undo`` is called, last first, when the model is given its whole weights back."""

    spreads = True

    def __init__(self, model: nn.Module, cuts: Mapping[str, Cut], ranks: RankGroup, undo: Sequence[Callable[[], None]]):
        self.model, self.ranks, self.group, self.rank = model, ranks, ranks.group, ranks.rank
        named = dict(model.named_buffers()) | dict(model.named_parameters())
        self.cuts: Mapping[Tensor, Cut] = {named[name]: each for name, each in cuts.items()}
        self.shapes = {tensor: tensor.shape for tensor in self.cuts}
        """Of those parts: a parameter may be cut further."""
        self._undo = undo

    def weight(self, parameter: Tensor) -> float:
        each = self.cuts.get(parameter)
        return 1 / self.ranks.size if each is None else 1 / each.copies

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        each = self.cuts.get(parameter)
        if each is None or tensor.shape != self.shapes[parameter]:
            return tensor
        return each.whole(tensor, self.ranks)

    def part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        each = self.cuts.get(parameter)
        if each is None or tensor.dim() != len(self.shapes[parameter]):
            return tensor
        return each.of(tensor, self.rank)

    def undo(self) -> None:
        """All that was put around forwards comes off."""
        with torch.no_grad():
            for tensor in self.cuts:
                tensor.data = self.whole(tensor, tensor.data)
                tensor.grad = None
        for step in reversed(self._undo):
            step()
        unwrap(self.model)
        self.cuts, self._undo = {}, ()
        self.close()
