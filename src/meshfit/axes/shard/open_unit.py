"""A unit at run time: its rows, where its parameters stand in the model, and how far it is gathered."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.comm.flat import Flat
from meshfit.torch_private import own_parameters, refresh_flat_weights


@dataclass(eq=False)
class OpenUnit:
    """Parameters that are gathered together."""

    index: int
    flats: list[Flat]
    places: list[list[tuple[nn.Module, str]]]
    """Where each parameter stands, in the order of the flats."""

    recurrent: list[nn.Module] = field(default_factory=list)
    """Of its modules, those that keep a list of their weights beside: nn.LSTM and its kin."""

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

    @property
    def trained(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trained]

    def put(self, tensors: list[Tensor]) -> None:
        """Let the modules hold ``tensors`` as their parameters, but for those that code around put there itself, as
        ``torch.func.functional_call`` does."""
        self._replace(self.held or [p for flat in self.flats for p in flat.parameters], tensors)
        self.held = tensors

    def close(self) -> None:
        """Let the modules hold the parameters themselves."""
        if self.held:
            self._replace(self.held, [p for flat in self.flats for p in flat.parameters])
            self.held = []

    def _replace(self, old: list[Tensor], new: list[Tensor]) -> None:
        for places, was, tensor in zip(self.places, old, new, strict=True):
            for module, name in places:
                if own_parameters(module)[name] is was:
                    own_parameters(module)[name] = tensor  # type: ignore[assignment]
        self.refresh()

    def refresh(self) -> None:
        """Recurrent layers keep a list of their weights beside."""
        for module in self.recurrent:
            refresh_flat_weights(module)
