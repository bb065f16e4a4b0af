"""A unit at run time: its rows, where its parameters stand in the model, how far it is gathered; and what autograd sees
of it: ``Gather``, whose backward sends its gradients off; ``Again``, for what backward itself computes once more; and
in place of weights that autograd saves, notes of where to find them again.

With zero=3 a unit is dropped after its call, but autograd saves weights. Hooks on saved tensors put a note in their
place (which unit, where in its row), and gather the unit again when backward asks for one. Nothing has to be foreseen:
a weight is never stale, whatever is done to the outputs of a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from meshfit.comm.flat import Flat
from meshfit.torch_private.autograd import saved_tensors_hooks_now, will_run
from meshfit.torch_private.modules import own_parameters, refresh_flat_weights
from meshfit.torch_private.tensors import KeptTensor, storage_id

if TYPE_CHECKING:
    from meshfit.axes.shard.gather import Shards


Place = tuple[nn.Module, str]
"""A module, and the name by which it holds a parameter."""


def places_of(model: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Every place of each parameter."""
    found: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        for name, p in own_parameters(module).items():
            if p is not None:
                found.setdefault(p, []).append((module, name))
    return found


class ParameterPlaces:
    """The places of some parameters, at which other tensors can stand for a while."""

    def __init__(self, places: Sequence[Sequence[Place]]):
        self._holders = [[(own_parameters(module), name) for module, name in each] for each in places]
        holders = dict.fromkeys(module for each in places for module, _ in each)
        self._recurrent = [module for module in holders if isinstance(module, nn.RNNBase)]

    def replace(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Put ``new`` in the place of ``old``, but not of what code around put there itself, as
        ``torch.func.functional_call`` does."""
        for holders, was, tensor in zip(self._holders, old, new, strict=True):
            for held, name in holders:
                if held[name] is was:
                    held[name] = tensor
        self.refresh()

    def refresh(self) -> None:
        """Recurrent layers keep a list of their weights beside."""
        for module in self._recurrent:
            refresh_flat_weights(module)


@dataclass(eq=False)
class OpenUnit:
    """Parameters that are gathered together."""

    index: int
    flats: list[Flat]
    places: list[list[Place]]
    """Where each parameter stands, in the order of the flats."""

    stays: bool = False
    """While a forward runs: see units.py."""
    open: int = 0
    """Calls under way in it."""
    unsharded: bool = False
    """Whether ``whole`` of its flats is there and right."""
    prefetch: Any = None
    """What to wait for before it is here."""
    pending_backward: int = 0
    """Uses that backward has not come back from."""
    uses: list[Any] = field(default_factory=list)
    """Their nodes of autograd."""
    held: list[Tensor] = field(default_factory=list)
    """What stands in the modules while it is open."""
    gather_dtype: torch.dtype | None = None
    """What the weights that autocast rounds are gathered as; None: as they are."""

    def __post_init__(self) -> None:
        self.parameters = [p for flat in self.flats for p in flat.parameters]
        self.trained = [flat for flat in self.flats if flat.trained]
        self.in_modules = ParameterPlaces(self.places)

    def put(self, tensors: list[Tensor]) -> None:
        """Let the modules hold ``tensors`` as their parameters."""
        self.in_modules.replace(self.held or self.parameters, tensors)
        self.held = tensors

    def close(self) -> None:
        """Let the modules hold the parameters themselves."""
        if self.held:
            self.in_modules.replace(self.held, self.parameters)
            self.held = []


# What autograd sees


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """In place of a saved weight."""

    unit: OpenUnit
    flat: Flat
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedWeights:
    """Notes on the weights that autograd saves; ``unshard`` gathers a unit."""

    def __init__(self, unshard: Callable[[OpenUnit], None]):
        self._unshard = unshard
        self._storages: dict[int, tuple[OpenUnit, Flat]] = {}
        """Of gathered rows."""

    def watched(self) -> saved_tensors_hooks:
        """Around the forwards whose saved tensors are meant. What is no weight is left to the hooks around these."""
        keep, fetch = saved_tensors_hooks_now() or (KeptTensor.of, KeptTensor.get)

        def pack(tensor: Tensor) -> Any:
            return self._noted(tensor) or keep(tensor)

        def unpack(packed: Any) -> Tensor:
            return self._fetched(packed) if isinstance(packed, _SavedWeight) else fetch(packed)

        return saved_tensors_hooks(pack, unpack)

    def know(self, unit: OpenUnit, flat: Flat) -> None:
        """``flat`` is gathered."""
        assert flat.whole is not None
        self._storages[storage_id(flat.whole)] = (unit, flat)

    def forget(self, flat: Flat) -> None:
        """It will be dropped: its memory may come to hold anything."""
        if flat.whole is not None:
            self._storages.pop(storage_id(flat.whole), None)

    def _noted(self, tensor: Tensor) -> _SavedWeight | None:
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            found = self._storages.get(storage_id(tensor))
            if found is not None:
                return _SavedWeight(*found, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return None

    def _fetched(self, packed: _SavedWeight) -> Tensor:
        self._unshard(packed.unit)
        assert packed.flat.whole is not None
        return packed.flat.whole.as_strided(packed.size, packed.stride, packed.offset).to(packed.dtype)


class Gather(torch.autograd.Function):
    """The whole parameters of a unit; backward sends their gradients off.

    Not a function of the slices: a parameter remembers the shape that it had in a graph for as long as that lives.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shards: "Shards", unit: OpenUnit) -> tuple[Tensor, ...]:
        ctx.shards, ctx.unit = shards, unit
        ctx.set_materialize_grads(False)
        whole = _whole(unit)
        ctx.save_for_backward(*whole)  # as what autograd.grad may be asked for: see Edge
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        shards, unit = ctx.shards, ctx.unit
        unit.pending_backward -= 1
        if ctx in unit.uses:
            unit.uses.remove(ctx)
        shards.exchange.returned(unit, gradients, False)
        _reshard_if_done(shards, unit)
        return None, None, None


class Again(torch.autograd.Function):
    """The whole parameters of a unit that is opened in backward; ``given`` are those of the uses that backward has not
    come back from. ``asked`` has a node that only a ``backward()`` of all of the graph would go on to."""

    @staticmethod
    def forward(ctx: Any, asked: Tensor, shards: "Shards", unit: OpenUnit, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.unit, ctx.all, ctx.given = shards, unit, asked.grad_fn, len(given)
        ctx.set_materialize_grads(False)
        return _whole(unit)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        shards, unit = ctx.shards, ctx.unit
        if not will_run(ctx.all):
            return None, None, None, *(gradients * (ctx.given // len(gradients)))
        shards.exchange.returned(unit, gradients, True)
        _reshard_if_done(shards, unit)
        return (None,) * (3 + ctx.given)


class Edge:
    """In place of a tensor that a node saves: autograd remembers where it comes from, which is all that is needed."""

    def __init__(self, tensor: Tensor):
        self.size, self.options = tensor.size(), {"dtype": tensor.dtype, "device": tensor.device}

    def tensor(self) -> Tensor:
        return torch.empty((), **self.options).expand(self.size)


def _whole(unit: OpenUnit) -> tuple[Tensor, ...]:
    return tuple(view for flat in unit.trained for view in flat.views(flat.whole))  # type: ignore[arg-type]


def _reshard_if_done(shards: "Shards", unit: OpenUnit) -> None:
    if shards.zero == 3 and not unit.open and unit.pending_backward <= 0 and len(unit.trained) == len(unit.flats):
        shards.reshard(unit)
