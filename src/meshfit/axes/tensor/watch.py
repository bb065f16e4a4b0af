"""What is seen of a model in one forward: which modules are called, with what, and what of it is used.

No backward is run: the graph of the loss says what is used.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.anatomy.calls import watched_calls
from meshfit.anatomy.dataflow import Arguments
from meshfit.axes.prove import tensors_of
from meshfit.axes.tensor.check import ObservedCall
from meshfit.axes.tensor.kinds import blocks_of
from meshfit.axes.tensor.sliced import SlicedTensor
from meshfit.comm.group import CountingGroup, Traffic
from meshfit.errors import JobError
from meshfit.torch_private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten


@dataclass(eq=False)
class Observed:
    """What was seen of ``model``, whose modules are of ``kinds``."""

    model: nn.Module
    kinds: Mapping[str, int] = field(default_factory=dict)
    inputs: Any = None
    """Of the model: a tuple of arguments, or a dict of keyword arguments."""

    within: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of each module that was called, the modules under way at every one of its calls, itself included."""

    times: dict[str, int] = field(default_factory=dict)
    """How often each was called."""

    shapes: dict[str, tuple] = field(default_factory=dict)
    """Of the tensors that it was given at its first call."""

    readers: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of each parameter, the modules under way whenever something read it."""

    calls: dict[str, ObservedCall] = field(default_factory=dict)
    """The first call of each module that was asked for."""

    outputs: dict[str, Any] = field(default_factory=dict)
    """What it returned."""

    uses: dict[int, int] = field(default_factory=dict)
    """How many functions took a parameter, by its id, of those that were asked for."""

    traffic: dict[str, tuple[Traffic, ...]] = field(default_factory=dict)
    """Of each head, the collectives that its logits would need if they were cut."""

    def called(self, path: str) -> bool:
        return path in self.within

    def kind(self, path: str) -> tuple:
        """Equal for modules that are alike and were given tensors of the same shapes."""
        return self.kinds[path], self.shapes.get(path)

    def blocks(self) -> list[list[str]]:
        """Modules that the model repeats, those of a kind together."""
        return list(blocks_of(self.model, {path: self.kind(path) for path in self.kinds}, self.times).values())

    def nearest(self, path: str) -> str:
        """The module at ``path``, or the lowest around it that is called."""
        while path and path not in self.within:
            path = path.rpartition(".")[0]
        return path


def watch(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    paths: Collection[str] = (),
    *,
    kinds: Mapping[str, int] | None = None,
    heads: Collection[str] = (),
    counted: Collection[Tensor] = (),
) -> Observed:
    """Run ``model``, a copy to look into, and keep what the modules at ``paths`` are given; of modules of one of the
    ``kinds``, given tensors of the same shapes, the first."""
    seen = Observed(model, kinds or {})
    under_way: list[str] = []
    given: list[Any] = []
    nodes: dict[str, list[Any]] = {}
    wanted, known = {"", *paths}, set()
    groups = {path: CountingGroup() for path in heads}

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        under_way.append(path)
        seen.within[path] = seen.within.get(path, frozenset(under_way)) & frozenset(under_way)
        seen.times[path] = seen.times.get(path, 0) + 1
        shapes = seen.shapes.setdefault(path, _shapes((args, kwargs)))
        if kinds and seen.times[path] == 1 and (kinds[path], shapes) not in known:
            known.add((kinds[path], shapes))
            wanted.add(path)
        if path == "" and not given:
            given.append(_as_inputs(module, args, kwargs))
        if path in wanted and path not in seen.calls:
            seen.calls[path] = ObservedCall(_kept((args, kwargs)))

    def after(path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        del under_way[len(under_way) - 1 - under_way[::-1].index(path) :]
        if path in wanted:
            out = tree_map(_viewed, out)
            if path not in nodes:
                nodes[path] = [t.grad_fn for t in tensors_of(out)]
                seen.outputs[path] = tree_map(lambda t: t.detach() if type(t) is Tensor else t, out)
        if path in groups and isinstance(out, Tensor):
            return SlicedTensor.of(out, groups[path])  # type: ignore[arg-type]
        return out

    with watched_calls(model, before, after), torch.enable_grad(), Uses(model, counted, under_way) as met:
        loss = run(model)
    if not given:
        raise JobError(
            "the objective never calls the model itself, so there is nothing to split over devices",
            "a step= that calls model(...) can be, and a training_step that calls self(...), not parts or self.forward;"
            " data= works with any step",
        )
    reached = _reached([t.grad_fn for t in tree_leaves(loss) if isinstance(t, Tensor)][:1])
    for path, call in seen.calls.items():
        call.used = tuple(node is None or node in reached for node in nodes[path])
    seen.inputs, seen.readers, seen.uses = given[0], met.readers, met.uses
    seen.traffic = {path: tuple(group.log) for path, group in groups.items()}
    return seen


QUESTIONS = set(
    """
shape dtype device requires_grad ndim is_cuda is_meta grad layout _version size dim numel is_floating_point element_size
__hash__ is_contiguous data_ptr
""".split()  # noqa: SIM905
)


class Uses(TorchFunctionMode):
    """Notes functions that take a parameter, other than to ask what it is like: where; and of some, how many."""

    def __init__(self, model: nn.Module, counted: Collection[Tensor], under_way: list[str]):
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.counted, self.under_way = {id(x) for x in counted}, under_way
        self.readers: dict[str, frozenset[str]] = {}
        self.uses: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = None
        for x in tree_leaves((args, kwargs)):
            if id(x) in self.names and not self._asks(func):
                here = here or frozenset(self.under_way)
                name = self.names[id(x)]
                self.readers[name] = self.readers.get(name, here) & here
                if id(x) in self.counted:
                    self.uses[id(x)] = self.uses.get(id(x), 0) + 1
        return func(*args, **(kwargs or {}))

    def _asks(self, func: Any) -> bool:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        return name in QUESTIONS


def _viewed(x: Any) -> Any:
    """A view of a tensor: a gradient that comes to it came from outside of what made the tensor."""
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x


def _reached(nodes: list[Any]) -> set[Any]:
    """All nodes of the graph that these come from."""
    todo, found = [node for node in nodes if node is not None], set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [before for before, _ in node.next_functions if before is not None]
    return found


def _shapes(inputs: Any) -> tuple:
    return tuple((tuple(x.shape), x.requires_grad) for x in tree_flatten(inputs)[0] if isinstance(x, Tensor))


def _kept(inputs: Any) -> Any:
    leaves, spec = tree_flatten(inputs)
    kept: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in kept:
            kept[id(leaf)] = leaf
            if isinstance(leaf, Tensor):
                kept[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return tree_unflatten([kept[id(leaf)] for leaf in leaves], spec)


def _as_inputs(model: nn.Module, args: tuple, kwargs: dict) -> Any:
    if not kwargs or not args:
        return args or kwargs
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments) if set(bound.arguments) >= set(kwargs) else Arguments(args, kwargs)
