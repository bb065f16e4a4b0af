"""Mixtures of experts in a model, found in one forward on a few samples.

slices    a module that holds all experts as slices of its parameters (as Hugging Face's do): called with rows, the
          experts chosen for each and their weights
listed    modules of one kind in a list, called one by one; with "expert" in its name, or with different numbers of
          rows, as a router gives them
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.calls import watched_calls
from meshfit.anatomy.copies import study
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.expert.check import check
from meshfit.axes.expert.grouped import linears
from meshfit.axes.expert.mixture import ExpertPlan, Mixture
from meshfit.axes.expert.spread import roles
from meshfit.axes.prove import Given, Refused
from meshfit.axes.tensor.kinds import kinds_of
from meshfit.axes.tensor.region import Cut, even_ranges
from meshfit.axes.tensor.watch import Uses
from meshfit.axes.tensors import shared_names
from meshfit.torch_private.modules import has_forward_hooks, own_modules
from meshfit.torch_private.tensors import base_of
from meshfit.torch_private.trees import tree_leaves, tree_map

Step = Callable[[nn.Module], Any]


@dataclass
class _Seen:
    given: dict[str, Given] = field(default_factory=dict)
    """Of the first call of each module."""
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    callers: dict[str, set[str | None]] = field(default_factory=lambda: defaultdict(set))
    """Modules under way, innermost, when it was called."""
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Given to it, of width ``widths``; what it made of them, ``made``."""
    widths: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    inner: dict[str, list[list[tuple[str, bool]]]] = field(default_factory=lambda: defaultdict(list))
    """Of each call of a module: what it called in turn, and whether with just the tensor that it was given first."""
    readers: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of each parameter, the modules under way whenever something read it."""
    batched: dict[str, None] = field(default_factory=dict)
    """Parameters of which one product uses all slices at once, and what product that is."""


class _Batched(TorchFunctionMode):
    """Notes batched products with parameters of three dims."""

    def __init__(self, model: nn.Module, seen: _Seen):
        super().__init__()
        self.names, self.seen = {id(p): name for name, p in model.named_parameters() if p.dim() == 3}, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name in ("bmm", "baddbmm", "matmul", "einsum"):
            for x in tree_leaves((args, kwargs)):
                of = x if id(x) in self.names or not isinstance(x, Tensor) else base_of(x)
                if id(of) in self.names and isinstance(of, Tensor) and isinstance(x, Tensor) and x.dim() >= 3:
                    self.seen.batched[f"{self.names[id(of)]}: {name} takes all of its {len(of)} slices at once"] = None
        return func(*args, **(kwargs or {}))


def plan_experts(model: nn.Module, step: Step, degree: int, samples: int = 0) -> ExpertPlan:
    """How to place the experts of ``model`` on ``degree`` ranks; ``step`` runs it. A mixture whose parts do not compute
    what it does is left whole. Counts that ``degree`` does not divide are in ``why`` too."""
    twin = study(model)
    seen, shared, kinds = _watched(twin, step), shared_names(twin), kinds_of(twin)
    every = (*_slices(twin, seen, degree), *_lists(twin, seen, degree, kinds))
    found: list[Mixture] = []
    why = {
        path: "it holds one module several times"
        for path, module in twin.named_modules()
        if _is_list(module) and _repeats(module) and "expert" in path.rpartition(".")[2]
    }
    tried: dict[tuple[int, int], str] = {}
    """What came of those of a kind: one of them is checked."""
    grouped: dict[tuple[int, int], bool] = {}
    """Whether experts of a kind compute the same as one."""
    for mixture in every:
        path = mixture.module if not mixture.listed else mixture.listed[0].rpartition(".")[0]
        kind = kinds[mixture.module], kinds[path]
        refused = _uncut(twin, mixture, shared, degree) or _read(mixture, seen)
        if not refused and kind not in tried:
            tried[kind] = _refused(twin, mixture, seen.given[mixture.module])
            if not tried[kind] and mixture.listed and linears(twin.get_submodule(mixture.listed[0])):
                as_one = replace(mixture, grouped="always")
                grouped[kind] = not _refused(twin, as_one, seen.given[mixture.module])
        if refused := refused or tried[kind]:
            why[path] = refused
        else:
            found.append(replace(mixture, grouped="fast" if grouped.get(kind) else ""))
    counts = tuple(mixture.count for mixture in every)
    return ExpertPlan(
        degree=degree, mixtures=tuple(found), samples=samples, why=why, counts=counts, batched=tuple(seen.batched)
    )


def _refused(twin: nn.Module, mixture: Mixture, given: Given) -> str:
    """Why a mixture's parts do not compute what it does; nothing if they do."""
    try:
        check(twin, mixture, given)
    except Refused as refused:
        return str(refused)
    return ""


def _watched(twin: nn.Module, step: Step) -> _Seen:
    seen = _Seen()
    under_way: list[str] = []
    firsts: list[Any] = []
    """What each of them was given first."""
    calling = {
        module
        for module in twin.modules()
        if any(len(own_modules(each)) > 1 for each in module.modules() if _is_list(each))
    }

    def before(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.calls[path] += 1
        seen.callers[path].add(under_way[-1] if under_way else None)
        if under_way:
            same = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0] is firsts[-1]
            seen.inner[under_way[-1]][-1].append((path, same))
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() > 1:
            seen.rows[path] += args[0][..., 0].numel()
            seen.widths[path] = args[0].shape[-1]
        if path not in seen.given and (module in calling or roles(args, kwargs)):
            seen.given[path] = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, (args, kwargs))
        under_way.append(path)
        firsts.append(args[0] if args else None)
        seen.inner[path].append([])

    def after(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        under_way.pop()
        firsts.pop()
        if isinstance(result, Tensor) and result.dim() > 1:
            seen.made[path] = result.shape[-1]

    with watched_calls(twin, before, after), torch.no_grad(), Uses(twin, (), under_way) as met, _Batched(twin, seen):
        step(twin)
    seen.readers = met.readers
    return seen


def _slices(twin: nn.Module, seen: _Seen, degree: int) -> list[Mixture]:
    found = []
    for path, module in twin.named_modules():
        if path not in seen.given or (places := roles(*seen.given[path])) is None:
            continue
        args, kwargs = seen.given[path]
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        own = dict(module.named_parameters(recurse=False))
        sizes = {len(p) for p in own.values() if p.dim() > 1}
        numbers = {k: v for k, v in vars(module).items() if type(v) is int and v in sizes and "expert" in k}
        if len(sizes) != 1 or not numbers or any(p.dim() < 2 for p in own.values()):
            continue
        (count,), prefix = sizes, f"{path}." if path else ""
        block, beside = _beside(twin, seen, path)
        found.append(
            Mixture(
                module=path,
                count=count,
                numbers=tuple(numbers),
                cuts=tuple(Cut(f"{prefix}{name}", 0, even_ranges(count, degree)) for name in own),
                rows=given[places[1]].numel(),
                width=given[places[0]].shape[1],
                made=given[places[0]].shape[1],
                calls=seen.calls[path],
                block=block,
                beside=beside,
            )
        )
    return found


def _beside(twin: nn.Module, seen: _Seen, path: str) -> tuple[str, str]:
    """What calls the experts, and what it calls once after them, each time with what it was given: a shared expert."""
    (block, *others) = seen.callers[path]
    if others or block is None:
        return "", ""
    for each in dict.fromkeys(name for called in seen.inner[block] for name, _ in called):
        names = [[name for name, _ in called] for called in seen.inner[block]]
        once = all(called.count(each) == called.count(path) == 1 for called in names)
        after = once and all(called.index(each) > called.index(path) for called in names)
        same = after and all((each, True) in called for called in seen.inner[block])
        if same and seen.callers[each] == {block} and not list(twin.get_submodule(each).buffers()):
            return block, each
    return "", ""


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _repeats(module: nn.Module) -> bool:
    """Whether a list holds one module several times."""
    there = [each for each in own_modules(module).values() if each is not None]
    return len({id(each) for each in there}) < len(there)


def _lists(twin: nn.Module, seen: _Seen, degree: int, kinds: dict[str, int]) -> list[Mixture]:
    found: list[Mixture] = []
    for path, module in twin.named_modules():
        if not _is_list(module):
            continue
        experts = [f"{path}.{name}" if path else name for name, each in own_modules(module).items() if each is not None]
        if _repeats(module):
            continue
        callers = set().union(*(seen.callers[e] for e in experts)) if experts else set()
        trained = [list(twin.get_submodule(e).named_parameters()) for e in experts]
        if len(experts) < 2 or len({kinds[e] for e in experts}) > 1 or len(callers) != 1 or not all(trained):
            continue
        called = [e for e in experts if seen.calls[e]]
        uneven = len({seen.rows[e] for e in called}) > 1 or len(called) < len(experts)
        (caller,) = callers
        if caller is None:
            continue
        if "expert" not in path.rpartition(".")[2] and not uneven:
            continue
        if any(path.startswith(f"{outer}.") for mixture in found for outer in mixture.listed):
            continue  # experts within experts: the outer ones are spread
        cuts = [
            Cut(
                f"{e}.{name}",
                0,
                tuple(((0, len(p)),) if i * degree // len(experts) == r else () for r in range(degree)),
            )
            for i, (e, parameters) in enumerate(zip(experts, trained, strict=True))
            for name, p in parameters
            if p.dim()
        ]
        times = seen.calls[caller]
        found.append(
            Mixture(
                module=caller,
                count=len(experts),
                listed=tuple(experts),
                cuts=tuple(cuts),
                rows=sum(seen.rows[e] for e in experts) // max(times, 1),
                width=max((seen.widths.get(e, 0) for e in called), default=0),
                made=max((seen.made.get(e, 0) for e in called), default=0),
                calls=times,
            )
        )
    return found


def _read(mixture: Mixture, seen: _Seen) -> str:
    """Why a rank must have all of a mixture's parameters: something beside its own calls reads them."""
    for cut in mixture.cuts:
        at = next((path for path in mixture.listed if cut.name.startswith(f"{path}.")), mixture.module)
        if at not in seen.readers.get(cut.name, (at,)):
            return f"{cut.name} is read outside of {at or 'the model'}, as a penalty on weights does"
    return ""


def _uncut(twin: nn.Module, mixture: Mixture, shared: set[str], degree: int) -> str:
    """Why a mixture cannot be cut, whatever it computes."""
    if mixture.count % degree:
        return f"{mixture.count} experts do not divide by {degree}"
    if tied := [cut.name for cut in mixture.cuts if cut.name in shared]:
        return f"{tied[0]} is shared with another module"
    for path in mixture.listed:
        expert = twin.get_submodule(path)
        if mixture.module and not path.startswith(f"{mixture.module}."):
            return f"{mixture.module} calls {path}, which another module holds"
        if any(not p.dim() for p in expert.parameters()):
            return f"{path} has a parameter that is one number"
        if batch_norms(expert):
            return f"{path} has a BatchNorm in it"
        if has_forward_hooks(expert):
            return f"{path} has a hook"
    return ""
