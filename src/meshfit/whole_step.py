"""Optimizers that need whole tensors (Muon, Shampoo, Adafactor), of a model that is cut over ranks.

Each cut parameter is dealt to one of the ranks that hold a piece of it. Before a step the pieces of its weight and
gradient travel to that owner; the owner steps it whole, as one device would, and the pieces of the new weight travel
back. Its state is the owner's alone, in its own shape, and every matrix is worked on once.

    memory    state P/n; while it steps, weights and gradients of what a rank owns, whole
    traffic   of P bytes cut over n ranks, a step: 2P/n there and P/n back at most, a rank; nothing for a tensor that
              one rank holds whole

Which optimizers need it is found by a trial (anatomy/probe_optimizer.py): their step is not elementwise. ``tensor``
and ``expert`` cut a parameter along a dim, ``shard`` by its elements in memory order; what a rank holds are boxes,
whatever cut it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshfit.axes.place import Placed
from meshfit.checkpoint.box import Box, volume, whole
from meshfit.checkpoint.pieces import layout_of
from meshfit.comm.group import RankGroup
from meshfit.comm.objects import all_gather_object
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.optimizers import Optimizers
from meshfit.torch_private.tensors import grad_dtype

CUTTING = ("shard", "expert", "tensor")
"""Axes that cut parameters."""


class WholeStep:
    """Of those ``parameters`` that are cut, each is stepped by its owner. All ranks make it together."""

    def __init__(self, placed: Placed, parameters: Sequence[nn.Parameter]):
        group = placed.mesh.over(*CUTTING)
        assert group is not None
        self.group, self.device = RankGroup(group), placed.device
        layouts = {p: layout_of(placed, p) for p in parameters}
        mine = [[piece.box for piece in layout.pieces if volume(piece.box)] for layout in layouts.values()]
        every = all_gather_object(mine, group)
        self.shapes = {p: layout.shape for p, layout in layouts.items()}
        self.pieces = {p: [piece for piece in each.pieces if volume(piece.box)] for p, each in layouts.items()}
        self.boxes: dict[nn.Parameter, list[list[Box]]] = {}
        """Of each cut parameter: those of every rank."""
        for i, p in enumerate(layouts):
            held = [boxes[i] for boxes in every]
            if volume(whole(self.shapes[p])) and any(boxes != [whole(self.shapes[p])] for boxes in held):
                self.boxes[p] = held
        self.owners = deal(list(self.boxes.values()))
        """In the order of ``boxes``."""
        self.owned = [p for p, owner in zip(self.boxes, self.owners, strict=True) if owner == self.group.rank]

    def restrict(self, optimizers: Optimizers) -> None:
        """Let the optimizers hold of the cut parameters those that this rank owns. Groups stay, some maybe empty."""
        left = self.boxes.keys() - set(self.owned)
        for group in optimizers.param_groups:
            kept = [p not in left for p in group["params"]]
            if "param_names" in group:
                group["param_names"] = [n for n, own in zip(group["param_names"], kept, strict=True) if own]
            group["params"] = [p for p, own in zip(group["params"], kept, strict=True) if own]
        for p in left:
            optimizers.state.pop(p, None)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within it the parameters that this rank owns, and their gradients, are whole."""
        held = {p: (p.data, p.grad) for p in self.boxes}
        weights, gradients = self._to_owners()
        for p in self.owned:
            missing, p.grad = p.grad is None, None
            p.data = weights[p]
            p.grad = None if missing else gradients[p]
        try:
            yield
        finally:
            stepped = {p: p.detach() for p in self.owned}
            for p in self.owned:
                p.grad = None
                p.data, p.grad = held[p][0], held[p][1]
        self._to_holders(stepped)

    @torch.no_grad()
    def _to_owners(self) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor]]:
        """Weights and gradients of what this rank owns, whole."""
        weights = {p: p.new_empty(self.shapes[p], requires_grad=False) for p in self.owned}
        gradients = {p: torch.empty_like(weight, dtype=grad_dtype(p)) for p, weight in weights.items()}
        for dtype, kind in self._kinds(grad_dtype):
            sent, wanted = self._by_rank(), self._by_rank()
            for p, owner in kind:
                first = _first_holders(self.boxes[p])
                both = p.detach(), torch.zeros_like(p) if p.grad is None else p.grad
                mine = [piece for piece in self.pieces[p] if first[piece.box] == self.group.rank]
                sent[owner] += [piece.of(tensor).to(dtype) for piece in mine for tensor in both]
                if owner == self.group.rank:
                    for box, rank in first.items():
                        wanted[rank] += [tensor[_slices(box)] for tensor in (weights[p], gradients[p])]
            self._exchange(dtype, sent, wanted)
        return weights, gradients

    @torch.no_grad()
    def _to_holders(self, stepped: dict[nn.Parameter, Tensor]) -> None:
        """New weights to all that hold a piece."""
        for dtype, kind in self._kinds(lambda p: p.dtype):
            sent, wanted = self._by_rank(), self._by_rank()
            for p, owner in kind:
                for rank, boxes in enumerate(self.boxes[p] if owner == self.group.rank else ()):
                    sent[rank] += [stepped[p][_slices(box)] for box in boxes]
                wanted[owner] += [piece.of(p.detach()) for piece in self.pieces[p]]
            self._exchange(dtype, sent, wanted)

    def _kinds(
        self, dtype_of: Callable[[nn.Parameter], torch.dtype]
    ) -> list[tuple[torch.dtype, list[tuple[nn.Parameter, int]]]]:
        """The cut parameters with their owners, by dtype."""
        kinds: dict[torch.dtype, list[tuple[nn.Parameter, int]]] = {}
        for p, owner in zip(self.boxes, self.owners, strict=True):
            kinds.setdefault(dtype_of(p), []).append((p, owner))
        return list(kinds.items())

    def _by_rank(self) -> list[list[Tensor]]:
        return [[] for _ in range(self.group.size)]

    def _exchange(self, dtype: torch.dtype, sent: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
        """Send the tensors of each rank to it, and fill those ``wanted`` of each rank, in order."""
        me = self.group.rank
        for tensor, target in zip(sent[me], wanted[me], strict=True):
            target.copy_(tensor)
        sent[me], wanted[me] = [], []
        sizes = [[sum(tensor.numel() for tensor in some) for some in every] for every in (sent, wanted)]
        parts = [tensor.reshape(-1) for some in sent for tensor in some]
        row = torch.cat(parts).to(self.device) if parts else torch.empty(0, dtype=dtype, device=self.device)
        found, wait = self.group.start_all_to_all(row, *sizes)
        wait()
        found = found.to(next(iter(self.boxes)).device)  # offload=parameters keeps them on the host
        targets = [target for some in wanted for target in some]
        for target, part in zip(targets, found.split([target.numel() for target in targets]), strict=True):
            target.copy_(part.view(target.shape))


def whole_step_cost(held: Sequence[Sequence[Sequence[Box]]], sizes: Sequence[tuple[int, int]], rank: int) -> Cost:
    """What ``rank`` hands to the all-to-alls of a step. ``held``: of each parameter the boxes of every rank; ``sizes``:
    bytes of an element of it, and of its gradient."""
    cut = [i for i, boxes in enumerate(held) if any(sorted(one) != sorted(boxes[0]) for one in boxes)]
    sent = 0
    for i, owner in zip(cut, deal([held[i] for i in cut]), strict=True):
        weight, gradient = sizes[i]
        if owner == rank:
            sent += weight * sum(volume(box) for r, boxes in enumerate(held[i]) if r != rank for box in boxes)
        else:
            sent += 2 * gradient * sum(volume(box) for box, r in _first_holders(held[i]).items() if r == rank)
    kinds = len({sizes[i][1] for i in cut}) + len({sizes[i][0] for i in cut})
    how = {"axis": "step", "dtype": "float32", "phase": "step", "once": True}
    ranks = max(map(len, held), default=1)
    said = [CollectiveCall("all_to_all", sent / kinds, ranks, count=kinds, **how)] if cut else []
    return Cost(collectives=tallied(said))


def deal(held: Sequence[Sequence[Sequence[Box]]]) -> list[int]:
    """The owner of each parameter, of which every rank holds some boxes: largest first, to the rank that has least so
    far, among those that hold something of it."""
    sizes = [sum(volume(box) for box in {box for boxes in ranks for box in boxes}) for ranks in held]
    load = [0] * max((len(ranks) for ranks in held), default=0)
    owners = [0] * len(held)
    for i in sorted(range(len(held)), key=lambda i: -sizes[i]):
        holders = [rank for rank, boxes in enumerate(held[i]) if boxes]
        owners[i] = min(holders, key=lambda rank: load[rank])
        load[owners[i]] += sizes[i]
    return owners


def _first_holders(every: Sequence[Sequence[Box]]) -> dict[Box, int]:
    """The rank that sends each box: the first that holds it; in the same order on all ranks."""
    first: dict[Box, int] = {}
    for rank, boxes in enumerate(every):
        for box in boxes:
            first.setdefault(box, rank)
    return first


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)
