"""Where in a model cutting begins: modules whose output is cut, from where on pieces flow.

Found by trying, once, on one rank and a few samples: of the first modules that return activations, and of the dims of
those that are not of samples, the one from which least is kept for backward. A rank is imagined (shapes are right,
numbers are not). A second beginning, a decoder's embedding say, is added if that keeps still less.

Text is tried in short pieces: what is done to positions does not depend on how many there are, and what ranks say to
each other grows evenly with them.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshfit.axes.context import attend, carry, local, mix, shapes  # noqa: F401  # register their rules
from meshfit.axes.context.meeting import MeetingModules
from meshfit.axes.context.piece import Piece, attended, gathered, guarded
from meshfit.axes.context.recurrence import recurrences
from meshfit.axes.context.saved import begin_forward
from meshfit.axes.context.span import SplitDim
from meshfit.axes.forward import unwrap, wrap
from meshfit.axes.spec import whole_output
from meshfit.comm.group import CountingGroup, Group, Traffic
from meshfit.data import tree
from meshfit.torch_private.tensors import storage_id

Step = Callable[[nn.Module, Any], Tensor]

TRIED = 16
"""Modules, the first that return activations."""

BEGINNINGS = 3
WORTH = 0.8
"""Of what one device keeps: a rank that keeps more gains nothing by its neighbours."""

LESS = 0.95
"""Of what is kept without a further beginning."""

SAMPLES = 2, 3
"""Samples to try: what differs between them is a dim of samples."""


POSITIONS = 16
"""Of each rank, at the most, in what is tried."""


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


def _first_tensor(out: Any) -> Tensor | None:
    out = out[0] if isinstance(out, tuple | list) and out else out
    return out if isinstance(out, Tensor) else None


def find(
    model: nn.Module, step: Step, batch: Any, degree: int, wholes: Collection[str] = (), attention: str = "auto"
) -> ContextPlan:
    """``model`` is the caller's to spare, and may be left with other buffers. Without beginnings: nothing is gained."""
    plan = ContextPlan(degree=degree, attention=attention)
    length = _enough(model, step, batch, POSITIONS * degree)
    few, more = (some(shortened(batch, length), samples) for samples in SAMPLES)
    whole, _, _ = _tried(model, step, few, plan)
    best, why, nearest = whole, "", ()
    for _ in range(BEGINNINGS):
        found: list[tuple[int, Beginning]] = []
        for each in _candidates(model, step, few, more, plan):
            try:
                kept = _tried(model, step, few, _beginning(plan, each))[0]
            except Exception as error:  # code of the model's that takes no pieces
                why = f"cut from {each.module or 'the model'} on: {type(error).__name__}: {error}".splitlines()[0]
                continue
            found.append((kept, each))
            if kept <= whole / degree * 1.1:
                break
        least, each = min(found, key=lambda one: one[0], default=(best, None))
        nearest = nearest or ((each,) if each else ())
        if each is None or least > LESS * best:
            break
        best = least
        plan = _planned(model, step, few, _beginning(plan, each), whole)
        if best <= whole / degree * 1.25:
            break
    if best > WORTH * whole:
        tried = _planned(model, step, few, replace(plan, beginnings=nearest), whole) if nearest else plan
        carried = tuple(recurrences(model, step, few))
        return replace(
            tried,
            beginnings=(),
            nearest=nearest,
            why=why,
            recurrences=carried,
            length=length_of(batch) or _frames_of(batch),
        )
    if wholes or attended["causal"]:
        plan = replace(plan, wholes=tuple(wholes), zigzag=attended["causal"] > 0 and not attended["carried"])
        plan = _planned(model, step, few, plan, whole)
    return _lengthened(plan, model, step, batch, length) if length else plan


def _enough(model: nn.Module, step: Step, batch: Any, length: int) -> int:
    """``length``, if the data has more positions and the model takes so few; else 0."""
    if length_of(batch) <= length:
        return 0
    try:
        with torch.no_grad():
            return length if step(model, some(shortened(batch, length - 1), SAMPLES[0])).isfinite() else 0
    except Exception:  # a model of one length
        return 0


def _lengthened(plan: ContextPlan, model: nn.Module, step: Step, batch: Any, length: int) -> ContextPlan:
    """What ranks say, for sequences as long as the data's: from what they say for short and shorter ones."""
    less = length // 2
    shorter = some(shortened(batch, less), plan.samples)
    _, said, _ = _tried(model, step, shorter, plan, backward=True)
    if [each.op for each in said] != [each.op for each in plan.traffic]:
        return replace(plan, length=length)
    more = length_of(batch) - length
    traffic = tuple(
        replace(one, elements=one.elements + (one.elements - other.elements) * more // (length - less))
        for one, other in zip(plan.traffic, said, strict=True)
    )
    return replace(plan, length=length, traffic=traffic)


def _beginning(plan: ContextPlan, each: Beginning) -> ContextPlan:
    """``plan`` with one more beginning."""
    return replace(plan, beginnings=(*plan.beginnings, each))


def _planned(model: nn.Module, step: Step, few: Any, plan: ContextPlan, whole: int) -> ContextPlan:
    """``plan`` with what its ranks keep and communicate."""
    gathered.clear()
    attended.clear()
    group = CountingGroup(plan.degree - 1, plan.degree)
    with MeetingModules(model, group) as meeting:
        kept, traffic, _ = _tried(model, step, few, plan, group, backward=True)
    return replace(
        plan,
        meeting=tuple(meeting.found),
        kept=kept / whole,
        traffic=tuple(traffic),
        samples=SAMPLES[0],
        gathered=tuple(gathered.most_common()),
        attended=tuple((way, attended[way]) for way in ("gather", "ulysses") if attended[way]),
        carried=attended["carried"],
    )


def some(batch: Any, samples: int) -> Any:
    """So many samples of ``batch``; some of them twice, if it has fewer."""
    there = max((len(t) for t in tree.tensors(batch) if t.dim()), default=0)
    index = torch.arange(samples) % max(there, 1)
    return tree.map_tensors(lambda t: t[index] if t.dim() and len(t) == there else t, batch)


def length_of(batch: Any) -> int:
    """Positions of the text in ``batch``; 0: there is none."""
    sizes = Counter(t.shape[1] for t in tree.tensors(batch) if t.dim() > 1 and not t.is_floating_point())
    return sizes.most_common(1)[0][0] if sizes else 0


def _frames_of(batch: Any) -> int:
    """Positions of series of vectors in ``batch``; 0: there is none."""
    return max((t.shape[1] for t in tree.tensors(batch) if t.dim() == 3 and t.is_floating_point()), default=0)


def shortened(batch: Any, length: int) -> Any:
    """The first and the last positions of the text in ``batch``, and of all that is as long: so padding on either side
    is still there, and positions that are given leap where the two meet. 0: all of them."""
    found = length_of(batch)
    head = (length + 1) // 2
    kept = torch.cat([torch.arange(head), torch.arange(found - (length - head), found)])

    def part(t: Tensor) -> Tensor:
        for dim in range(1, t.dim()):
            t = t.index_select(dim, kept.to(t.device)) if t.shape[dim] == found else t
        return t

    return tree.map_tensors(part, batch) if 0 < length < found else batch


def _candidates(model: nn.Module, step: Step, few: Any, more: Any, plan: ContextPlan) -> list[Beginning]:
    """What could be cut next: dims, not of samples, of what the first modules return whole."""
    seen, other = (_tried(model, step, batch, plan, watch=True)[2] for batch in (few, more))
    found = []
    for path, shape in list(seen.items())[:TRIED]:
        if len(other.get(path, ())) != len(shape):
            continue
        for dim, (size, new) in enumerate(zip(shape, other[path], strict=True)):
            if size == new and size >= plan.degree:
                found.append(Beginning(path, dim))
    return found


def _tried(
    model: nn.Module,
    step: Step,
    batch: Any,
    plan: ContextPlan,
    group: CountingGroup | None = None,
    *,
    backward: bool = False,
    watch: bool = False,
) -> tuple[int, list[Traffic], dict[str, tuple[int, ...]]]:
    """A step of the last rank of ``plan``: bytes kept for backward, collectives called, and what its modules return
    whole, first those that are done first."""
    group = group or CountingGroup(plan.degree - 1, plan.degree)
    begin(model, plan, group)
    seen: dict[str, tuple[int, ...]] = {}
    hooks: list[Any] = []

    def look(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            made = _first_tensor(out)
            if made is not None and not isinstance(made, Piece) and made.requires_grad and made.is_floating_point():
                seen.setdefault(path, tuple(made.shape))

        return hook

    if backward:  # nobody asks for the gradients: all of them at once would be another model
        hooks = [p.register_post_accumulate_grad_hook(_dropped) for p in model.parameters() if p.requires_grad]
    if watch:
        hooks += [module.register_forward_hook(look(path)) for path, module in model.named_modules()]
    kept = SavedBytes(model)
    try:
        with guarded(), kept:
            loss = step(model, copy.copy(batch))
            if backward:
                loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        unwrap(model)
        model.zero_grad(set_to_none=True)
    return kept.bytes, group.log, seen


def _dropped(parameter: Tensor) -> None:
    parameter.grad = None


class SavedBytes(saved_tensors_hooks):
    """Bytes that autograd keeps for backward within, beyond parameters and buffers."""

    def __init__(self, model: nn.Module):
        self._known = {storage_id(t): 0 for t in (*model.parameters(), *model.buffers())}
        self._counted: Counter[int] = Counter()
        self._held: list[Any] = []
        super().__init__(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage_id(storage) not in self._known:
            self._counted[storage_id(storage)] = storage.nbytes()
            self._held.append(storage)  # its number must not be given away meanwhile
        return x.detach()  # a result's node would hold itself

    @property
    def bytes(self) -> int:
        return sum(self._counted.values())
