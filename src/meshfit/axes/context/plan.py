"""What a context plan says: where in a model cutting begins, and how positions then meet. A value, and ``begin``, which
carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshfit.axes.context import attend, carry, local, mix, shapes  # noqa: F401  # register their rules
from meshfit.axes.context.piece import Piece
from meshfit.axes.context.saved import begin_forward
from meshfit.axes.context.span import SplitDim
from meshfit.axes.forward import wrap
from meshfit.axes.spec import whole_output
from meshfit.comm.group import Group, Traffic

WORTH = 0.8
"""Of what one device keeps: a rank that keeps more gains nothing by its neighbours."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A module whose output is cut along ``dim``."""

    module: str
    dim: int


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How a model is spread over ``degree`` ranks, each with some positions of every sequence."""

    degree: int
    beginnings: tuple[Beginning, ...] = ()
    wholes: tuple[str, ...] = ()
    """Modules that are given all positions: mixtures, whose rows are sent to other ranks as plain tensors."""

    zigzag: bool = False
    """Each rank has two chunks of a sequence, one from either end: causal attention then gives all the same work."""

    attention: str = "auto"
    """How positions meet in attention, as the plan says."""

    attended: tuple[tuple[str, int], ...] = ()
    """How attention is computed, and how often in a forward."""

    carried: int = 0
    """Recurrent layers whose state goes from rank to rank."""

    kept: float = 1.0
    """Of what one device keeps for backward, what a rank keeps."""

    traffic: tuple[Traffic, ...] = ()
    """Of one forward and backward of ``samples``, beside the sum of the gradients."""

    samples: int = 0
    length: int = 0
    """Positions that were tried, if fewer than the data has; if it is not worth cutting, those of the data."""

    gathered: tuple[tuple[str, int], ...] = ()
    """Functions that are computed on all positions by every rank, and how often in a forward."""

    meeting: tuple[str, ...] = ()
    """Modules in whose own code positions meet."""

    why: str = ""
    """What kept it from being cut, if anything raised."""

    nearest: tuple[Beginning, ...] = ()
    """Where least would be kept, of a model that is not worth cutting; ``kept`` and ``gathered`` are of that."""
    recurrences: tuple[str, ...] = ()
    """What carries a state from position to position in such a model."""

    def explain(self) -> list[str]:
        where = ", ".join(f"{b.module or 'the model'} (dim {b.dim})" for b in self.beginnings)
        how = " in zigzag chunks" if self.zigzag else ""
        notes = [f"context: sequences are cut from {where} on{how}; a rank keeps {self.kept:.2f} of the activations"]
        if ways := ", ".join(f"by {way} {times} x" for way, times in self.attended):
            notes.append(f"context: attention {ways}")
        if self.carried:
            notes.append(f"context: {self.carried} recurrent layers hand their state on: ranks compute them in turn")
        if self.gathered:
            notes.append(f"context: computed on whole sequences by every rank: {self._on_wholes}")
        return notes

    @property
    def _on_wholes(self) -> str:
        return ", ".join(f"{name} {times} x" for name, times in self.gathered[:6])

    def refusal(self) -> tuple[str, ...]:
        """Why nothing is gained, in words: a headline and facts."""
        if self.nearest:
            (each,) = self.nearest
            kept = f"cut from {each.module or 'the model'} (dim {each.dim}) on, a device would keep {self.kept:.2f}"
            kept += " of the activations" + (
                f"; computed on whole sequences: {self._on_wholes}" if self.gathered else ""
            )
        else:
            kept = "no module returns activations that could be cut"
        if self.recurrences:
            return (
                "its sequences cannot be cut: the model carries a state from position to position",
                *self.recurrences[:3],
                "a device would need the state of the one before it, one after another;"
                " where it ends is known of nn.LSTM, nn.GRU and nn.RNN",
            )
        if self.length:
            limit = f"it is not worth it above {WORTH:.2f}" if self.nearest else ""
            return "cutting its sequences would save too little", kept, limit, self.why
        none = "whichever dim of its activations is cut, a device would have to keep nearly as much as one alone"
        return "this model has no sequence that could be cut", none, kept, self.why


def begin(model: nn.Module, plan: ContextPlan, group: Group) -> None:
    """Cut what the modules of ``plan.beginnings`` return, from now on; ``unwrap`` undoes it."""
    for each in plan.beginnings:
        wrap(model.get_submodule(each.module), lambda forward, dim=each.dim: _cutting(forward, dim, plan, group))
    for path in plan.wholes:
        wrap(model.get_submodule(path), _on_wholes)


def _on_wholes(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*whole_output(args), **whole_output(kwargs))


def _cutting(forward: Callable[..., Any], dim: int, plan: ContextPlan, group: Group) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        begin_forward(group)
        return _first_cut(forward(*args, **kwargs), dim, plan, group)

    return run


def _first_cut(out: Any, dim: int, plan: ContextPlan, group: Group) -> Any:
    if isinstance(out, Tensor):
        if isinstance(out, Piece) or out.dim() <= dim or out.shape[dim] < group.size:
            return out  # shorter than there are ranks: all compute it whole
        span = SplitDim.even(dim, out.shape[dim], group.size, zigzag=plan.zigzag, attention=plan.attention)
        return Piece(span.of(out, group.rank), span, group)
    if isinstance(out, tuple | list) and out and not hasattr(out, "_fields"):
        return type(out)([_first_cut(out[0], dim, plan, group), *out[1:]])
    return out
