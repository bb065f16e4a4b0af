"""Modules whose experts are spread over ranks: their forward is put around in place.

Experts that are slices of one module's parameters, given rows, an expert's number and its weight for each choice: the
choices are sorted by expert and sent off, the module's own code runs on those that came, with numbers that count from
zero and weights of one, and what comes back is weighed and summed where the tokens are.

Experts that are modules of their own, called one by one by whatever code: that code runs twice. The first time every
call is noted and answered with zeros; then all rows travel at once; the second time each call gets what came back. So
the code must ask the same both times, and must not ask for what depends on an answer: the check sees to it. Other
modules that it calls before the first expert (a router, a shared expert) run once: the second time they answer with
what they made.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.cut_parameters import Undo
from meshfit.axes.expert.grouped import Grouped
from meshfit.axes.expert.mixture import Mixture
from meshfit.axes.expert.shared import SharedExpert
from meshfit.axes.expert.travel import Journey, Travel
from meshfit.axes.forward import wrap
from meshfit.errors import JobError
from meshfit.generators import Generators
from meshfit.torch_private.tensors import version
from meshfit.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten


def spread(model: nn.Module, mixture: Mixture, travel: Travel) -> list[Undo]:
    """Cut the parameters of ``mixture`` to the rank's own, and let its rows travel. Returns what undoes the rest."""
    undo: list[Undo] = []
    module, rank = model.get_submodule(mixture.module), travel.group.rank
    named = dict(model.named_parameters())
    for cut in mixture.cuts:
        parameter = named[cut.name]
        parameter.data = cut.of(parameter.data, rank)
        parameter.grad = None
    for name in mixture.numbers:
        undo.append(partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, travel.share)
    if mixture.listed:
        Listed(model, mixture, travel)
    else:
        own = [named[cut.name] for cut in mixture.cuts]
        paths = dict(model.named_modules()) if mixture.beside else {}
        there = mixture.block in paths and mixture.beside in paths
        meanwhile = SharedExpert(paths[mixture.block], paths[mixture.beside]) if there else lambda: None
        around = lambda forward: partial(_fused, forward, travel, own, meanwhile)
        wrap(module, around, innermost=True)  # where channels are cut too, sums over those ranks are of fewer rows
    return undo


# Slices of one module


def roles(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """Where a call holds rows, the experts chosen for each, and their weights; None if it is another kind of call."""
    given = [*enumerate(args), *kwargs.items()]
    tensors = [(at, value) for at, value in given if isinstance(value, Tensor)]
    if len(tensors) != 3 or any(value.dim() != 2 for _, value in tensors):
        return None
    chosen = [at for at, value in tensors if value.dtype in (torch.int64, torch.int32)]
    real = [(at, value) for at, value in tensors if value.is_floating_point()]
    if len(chosen) != 1 or len(real) != 2:
        return None
    (rows, x), (weights, w) = real
    shape = dict(tensors)[chosen[0]].shape
    return (rows, chosen[0], weights) if w.shape == shape and len(x) == len(w) else None


def _fused(
    forward: Callable[..., Any],
    travel: Travel,
    own: list[nn.Parameter],
    meanwhile: Callable[[], None],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    found = roles(args, kwargs)
    if found is None:
        raise JobError("experts were called in another way than when they were found", f"with {len(args)} arguments")
    given: dict[Any, Any] = dict(enumerate(args)) | kwargs
    x, chosen, weights = (given[at] for at in found)
    choices, flat = chosen.shape[1], chosen.flatten()
    by_expert, order = flat.masked_fill(flat < 0, travel.count).sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(travel.count + 1, device=flat.device, dtype=flat.dtype))
    send = travel.announce(x, ends.diff())  # what lies beyond the last end is nobody's
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = _Taken.apply(x, order, inverse, choices)
    journey = send(rows, meanwhile)  # type: ignore[arg-type]
    arrived = journey.arrived
    if len(arrived):
        new = {found[0]: arrived, found[1]: journey.experts()[:, None].to(chosen.dtype)}
        given |= new | {found[2]: weights.new_ones(len(arrived), 1)}
        made = forward(*(given[i] for i in range(len(args))), **{key: given[key] for key in kwargs})
    else:  # no row for the experts here: a gradient of zero, not none, as on one device
        made = arrived + sum(p[:0].sum() for p in own if p.requires_grad)
    back = journey.back(made.to(arrived.dtype))
    if missing := len(order) - len(back):
        back = torch.cat([back, back.new_zeros(missing, back.shape[1])])
    each: Any = _Taken.apply(back, inverse, order, 1)
    summed = (each.view(*chosen.shape, each.shape[1]) * weights[..., None]).sum(1)
    return summed.to(x.dtype)


class _Taken(torch.autograd.Function):
    """Rows in another order, each ``times`` times. Their gradients are summed in order: an index's own backward would
    sort them, or add them in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return x.index_select(0, order if times == 1 else order // times)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        each = grad.index_select(0, inverse)
        if ctx.times > 1:
            each = each.unflatten(0, (len(each) // ctx.times, ctx.times)).sum(1)
        return each, None, None, None


# Modules of their own


class Listed:
    """Experts that some module's code calls one by one."""

    def __init__(self, model: nn.Module, mixture: Mixture, travel: Travel):
        self.travel = travel
        experts = [model.get_submodule(path) for path in mixture.listed]
        self._forwards = [expert.forward for expert in experts]
        """Their own."""
        self._grouped: Grouped | None = None
        if mixture.grouped:
            own = slice(travel.own.start, travel.own.stop)
            first = self._forwards[travel.own.start]
            self._grouped = Grouped(experts[own], first, always=mixture.grouped == "always")
        self._asked: list[tuple[int, Tensor]] | None = None
        """Calls that are noted; None: they are answered."""
        self._answers: list[tuple[int, Tensor]] = []
        self._made: dict[Any, Tensor] = {}
        """What experts make of no rows, by the kind of rows."""
        self._kept: deque[_Call] = deque()
        """Of the first time: calls of other modules before that of any expert."""
        for number, expert in enumerate(experts):
            wrap(expert, lambda forward, number=number: partial(self._expert, number))
        module = model.get_submodule(mixture.module)
        for child in module.children():
            if not any(each in experts for each in child.modules()):
                wrap(child, lambda forward, child=child: partial(self._other, child, forward))
        wrap(module, lambda forward: partial(self._run, forward))

    def _expert(self, number: int, x: Tensor) -> Tensor:
        if self._asked is not None:
            self._asked.append((number, x))
            like = self._made_of_none(x)
            return like.new_zeros(*x.shape[:-1], like.shape[-1])
        expected, answer = self._answers.pop(0) if self._answers else (-1, x)
        if expected != number or answer.shape[:-1] != x.shape[:-1]:
            raise JobError(
                f"expert {number} was called with {tuple(x.shape)}, which it was not a moment ago",
                "what calls the experts ran twice, and asked for something else the second time",
            )
        return answer

    def _other(self, child: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._asked is None and self._kept:
            call = self._kept.popleft()
            if call.module is child and call.made_of == _shapes((args, kwargs)) and call.is_as_it_was:
                call.after.restore()
                return call.made
            self._kept.clear()
        made = forward(*args, **kwargs)
        if self._asked is not None and not self._asked:
            tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            after = Generators(tensors[0].device if tensors else torch.device("cpu"))
            self._kept.append(_Call(child, _shapes((args, kwargs)), made, [(t, version(t)) for t in tensors], after))
        return made

    def _made_of_none(self, x: Tensor) -> Tensor:
        kind = x.dtype, x.device, torch.is_autocast_enabled(x.device.type), x.shape[-1]
        if kind not in self._made:
            with torch.no_grad():
                self._made[kind] = self._forwards[self.travel.own.start](x.reshape(-1, x.shape[-1])[:0])
        return self._made[kind]

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        before = Generators(next((leaf.device for leaf in leaves if leaf.is_cuda), torch.device("cpu")))
        self._asked = []
        try:
            forward(*args, **kwargs)
            asked, self._asked = self._asked, None
            back = self._answered(asked, leaves[0].device)
            before.restore()
            result = forward(*args, **kwargs)
            if self._answers:
                raise JobError("what calls the experts ran twice, and asked for less the second time")
        finally:
            self._asked, self._answers = None, []
            self._kept.clear()
        return result if back is None else _depending(result, back)

    def _answered(self, asked: list[tuple[int, Tensor]], device: torch.device) -> Tensor | None:
        """Answers to what was asked, in that order; all that came back, as one."""
        count = self.travel.count
        counts, calls = [0] * count, [0] * count
        for number, x in asked:
            counts[number] += x[..., 0].numel()
            calls[number] += 1
        order = sorted(range(len(asked)), key=lambda i: asked[i][0])
        rows = [asked[i][1].reshape(-1, asked[i][1].shape[-1]) for i in order]
        journey = self.travel.meet(torch.cat(rows) if rows else None, counts, calls, device)
        if journey is None:
            self._answers = []
            return None
        back = journey.back(self._made_by_own(journey))
        parts = back.split([len(each) for each in rows])
        answers: list[Any] = [None] * len(asked)
        for place, part in zip(order, parts, strict=True):
            number, x = asked[place]
            answers[place] = number, part.view(*x.shape[:-1], part.shape[1])
        self._answers = answers
        return back

    def _made_by_own(self, journey: Journey) -> Tensor:
        """What the experts that are here make of the rows that came."""
        if self._grouped is not None and any(journey.called) and self._grouped.fits(journey.arrived):
            order, inverse = journey.by_expert_order()
            rows: Any = _Taken.apply(journey.arrived, order, inverse, 1)
            counts = [sum(each) for each in zip(*journey.counts, strict=True)]
            return _Taken.apply(self._grouped(rows, counts, journey.called), inverse, order, 1)  # type: ignore
        own = self._forwards[self.travel.own.start : self.travel.own.stop]
        made = [
            forward(given) if called else None
            for forward, given, called in zip(own, journey.by_expert(), journey.called, strict=True)
        ]
        real = next((each for each in made if each is not None), None)
        if real is None:
            real = self._made_of_none(journey.arrived)
        return journey.in_order([real[:0] if each is None else each for each in made])


@dataclass(frozen=True, slots=True)
class _Call:
    """Of a module that is no expert."""

    module: nn.Module
    made_of: list[Any]
    made: Any
    tensors: list[tuple[Tensor, int]]
    """In ``made``, and how often each had been changed in place."""
    after: Generators
    """Random numbers, as it left them."""

    @property
    def is_as_it_was(self) -> bool:
        return all(version(tensor) == before for tensor, before in self.tensors)


def _shapes(given: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(given)]


def _depending(result: Any, back: Tensor) -> Any:
    """``result``, so that a gradient that comes to it comes to ``back``: all ranks must go back together."""
    leaves, spec = tree_flatten(result)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[i] = leaf + back[:0].sum().to(leaf.dtype)
            break
    return tree_unflatten(leaves, spec)
