"""A model of whose parameters each rank of an axis holds a part, cut along one dim."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshfit.axes.axis import Applied
from meshfit.axes.forward import unwrap
from meshfit.axes.tensor.region import Cut
from meshfit.comm.group import RankGroup, destroy

Undo = Callable[[], None]


class CutParameters(Applied):
    """``undo`` is called, last first, when the model is given its whole weights back. ``shared``: parameters of whose
    gradient several ranks hold a term; None: there are none on any rank. After ``after_backward`` a gradient is
    complete on every rank that holds the parameter, or the same part of it: it is not summed over them again."""

    spreads = True

    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, Cut],
        ranks: RankGroup,
        undo: Sequence[Undo],
        shared: Sequence[str] | None = None,
    ):
        self.model, self.ranks, self.group, self.rank = model, ranks, ranks.group, ranks.rank
        named = dict(model.named_buffers()) | dict(model.named_parameters())
        self.cuts: Mapping[Tensor, Cut] = {named[name]: each for name, each in cuts.items()}
        self.shapes = {tensor: tensor.shape for tensor in self.cuts}
        """Of those parts: a parameter may be cut further."""
        self._undo = undo
        everyone = tuple(range(ranks.size))
        self._terms = {named[name]: cuts[name].peers(ranks.rank) if name in cuts else everyone for name in shared or ()}
        """Those, and the ranks that hold a term of their gradient."""
        self._lines = {} if shared is None else ranks.among(dict.fromkeys(self._terms.values()))

    @torch.no_grad()
    def after_backward(self) -> None:
        """In one collective for each dtype and set of ranks."""
        kinds: dict[tuple, list[Tensor]] = defaultdict(list)
        for parameter, peers in self._terms.items():
            if parameter.grad is not None:
                kinds[peers, parameter.grad.dtype].append(parameter.grad)
        for (peers, _), grads in kinds.items():
            total = self._lines[peers].all_reduce_(torch.cat([grad.flatten() for grad in grads]))
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

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

    def close(self) -> None:
        destroy(line.group for members, line in sorted(self._lines.items()) if len(members) < self.ranks.size)
        self._lines = {}
