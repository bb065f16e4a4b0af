"""Where in a model cutting begins: modules whose output is cut, from where on pieces flow.

Found by trying, once, on one rank and a few samples: of the first modules that return activations, and of the dims of
those that are not of samples, the one from which least is kept for backward. A rank is imagined (shapes are right,
numbers are not). A second beginning, a decoder's embedding say, is added if that keeps still less.

Text is tried in short pieces: what is done to positions does not depend on how many there are, and traffic grows evenly
with them.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshfit.anatomy.calls import watched_calls
from meshfit.axes.context.piece import Piece, attended, gathered, guarded
from meshfit.axes.context.plan import WORTH, Beginning, ContextPlan, begin
from meshfit.axes.context.recurrence import recurrences
from meshfit.axes.forward import unwrap
from meshfit.comm.group import CountingGroup, Traffic
from meshfit.data import tree
from meshfit.torch_private.tensors import storage_id, unbound

Step = Callable[[nn.Module, Any], Tensor]

TRIED = 16
"""Modules, the first that return activations."""

BEGINNINGS = 3
LESS = 0.95
"""Of what is kept without a further beginning."""

SAMPLES = 2, 3
"""Samples to try: what differs between them is a dim of samples."""

POSITIONS = 16
"""Of each rank, at the most, in what is tried."""


def find(
    model: nn.Module, step: Step, batch: Any, degree: int, wholes: Collection[str] = (), attention: str = "auto"
) -> ContextPlan:
    """``model`` is the caller's to spare, and may be left with other buffers. Without beginnings: nothing is gained."""
    plan = ContextPlan(degree=degree, attention=attention)
    length = _enough(model, step, batch, POSITIONS * degree)
    few, more = (some(shortened(batch, length), samples) for samples in SAMPLES)
    whole, _ = _tried(model, step, few, plan)
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
    """``plan`` with the traffic of sequences as long as the data's, from that of short and of shorter ones."""
    less = length // 2
    shorter = some(shortened(batch, less), plan.samples)
    _, lesser = _tried(model, step, shorter, plan, backward=True)
    if [each.op for each in lesser] != [each.op for each in plan.traffic]:
        return replace(plan, length=length)
    more = length_of(batch) - length
    traffic = tuple(
        replace(one, elements=one.elements + (one.elements - other.elements) * more // (length - less))
        for one, other in zip(plan.traffic, lesser, strict=True)
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
    with _meeting(model, group) as meeting:
        kept, traffic = _tried(model, step, few, plan, group, backward=True)
    return replace(
        plan,
        meeting=tuple(meeting),
        kept=kept / whole,
        traffic=tuple(traffic),
        samples=SAMPLES[0],
        gathered=tuple(gathered.most_common()),
        attended=tuple((way, attended[way]) for way in ("gather", "ulysses") if attended[way]),
        carried=attended["carried"],
    )


@contextmanager
def _meeting(model: nn.Module, group: CountingGroup) -> Iterator[Collection[str]]:
    """Modules in whose own code, not that of modules they call, ranks of ``group`` communicate within, or something is
    computed on wholes."""
    found: dict[str, None] = {}
    running: list[list[int]] = []
    """Of each module that runs: the collectives and wholes before it began, and those of modules that it called."""

    def counted() -> int:
        return len(group.log) + sum(gathered.values())

    def entered(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append([counted(), 0])

    def left(path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        before, of_others = running.pop()
        total = counted() - before
        if total > of_others:
            found[path] = None
        if running:
            running[-1][1] += total

    with watched_calls(model, entered, left):
        yield found


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
    seen, other = (_shapes(model, step, batch, plan) for batch in (few, more))
    found = []
    for path, shape in list(seen.items())[:TRIED]:
        if len(other.get(path, ())) != len(shape):
            continue
        for dim, (size, new) in enumerate(zip(shape, other[path], strict=True)):
            if size == new and size >= plan.degree:
                found.append(Beginning(path, dim))
    return found


def _shapes(model: nn.Module, step: Step, batch: Any, plan: ContextPlan) -> dict[str, tuple[int, ...]]:
    """Of activations that modules return whole under ``plan``, first those that are done first."""
    seen: dict[str, tuple[int, ...]] = {}

    def look(path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        made = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(made, Tensor) or isinstance(made, Piece):
            return
        if made.requires_grad and made.is_floating_point():
            seen.setdefault(path, tuple(made.shape))

    with watched_calls(model, after=look):
        _tried(model, step, batch, plan)
    return seen


def _tried(
    model: nn.Module,
    step: Step,
    batch: Any,
    plan: ContextPlan,
    group: CountingGroup | None = None,
    *,
    backward: bool = False,
) -> tuple[int, list[Traffic]]:
    """A step of the last rank of ``plan``: bytes kept for backward, and collectives called."""
    group = group or CountingGroup(plan.degree - 1, plan.degree)
    begin(model, plan, group)
    hooks: list[Any] = []
    if backward:  # nobody asks for the gradients: all of them at once would be another model
        hooks = [p.register_post_accumulate_grad_hook(_dropped) for p in model.parameters() if p.requires_grad]
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
    return kept.bytes, group.log


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
        return unbound(x)

    @property
    def bytes(self) -> int:
        return sum(self._counted.values())
