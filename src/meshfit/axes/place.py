"""A model laid out over the ranks: the axes of a plan, applied in their order.

What they need to know of the model is found before: see find.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.axis import Applied, Axis
from meshfit.axes.branch.axis import Branched
from meshfit.axes.buffers import check as check_buffers
from meshfit.axes.buffers.find import Written
from meshfit.axes.buffers.find import find as find_written
from meshfit.axes.buffers.step import Buffers, look_away_from
from meshfit.axes.compile.axis import Blocks
from meshfit.axes.data.axis import Replicated, broadcast
from meshfit.axes.fill import check_alike, fill, rehearsal
from meshfit.axes.find import Findings, find
from meshfit.axes.forward import is_wrapped, unwrap
from meshfit.axes.mesh import Mesh
from meshfit.axes.order import ORDER
from meshfit.axes.partition import Named, Partition
from meshfit.axes.pipeline.staged import Staged
from meshfit.axes.precision import Precision
from meshfit.axes.shard.gather import Shards
from meshfit.axes.tensor.axis import splits_sequence
from meshfit.axes.tensors import check_ties, parameters_to
from meshfit.comm.first import from_first_rank
from meshfit.comm.group import Group
from meshfit.comm.objects import all_gather_object
from meshfit.cpu_threads import cpu_threads
from meshfit.deferred import Deferred
from meshfit.launch import heap
from meshfit.launch.system import cores
from meshfit.plan import Plan
from meshfit.python_state import code_of, python_state_kept
from meshfit.quantised import states_to

L = TypeVar("L", bound=Applied)


@dataclass
class Placed:
    """A model on this rank."""

    plan: Plan
    model: nn.Module
    """All of it; with a pipeline or branches, this rank's part."""
    mesh: Mesh
    device: torch.device
    found: Mapping[str, Any] = field(default_factory=dict)
    """What the axes act on, by their words."""
    layers: dict[str, Applied] = field(default_factory=dict)
    """What each axis did to the model, by the axis' word, from the outside in."""
    groups: dict[str, Group] = field(default_factory=dict)
    """By axis: the ranks over which activations are split."""
    caches: list[Any] = field(default_factory=list)
    """Hugging Face configs in which ``use_cache`` was turned off for the training."""
    notes: list[str] = field(default_factory=list)
    written: Written = field(default_factory=Written)
    """Buffers that a forward writes, but for BatchNorm's."""
    prepared: ExitStack = field(default_factory=ExitStack)
    """What stays as long as the model is laid out."""

    def __post_init__(self) -> None:
        self.prepared.enter_context(Precision(self.plan.precision).prepared(self.device))
        if self.plan.precision == "fp8" and self.device.type == "cpu":
            self.notes.append("precision=fp8: products are emulated on CPUs, which is slow")

    def layer(self, kind: type[L]) -> L | None:
        return next((layer for layer in self.layers.values() if isinstance(layer, kind)), None)

    @property
    def staged(self) -> Staged | None:
        """This rank's stages of a pipeline."""
        return self.layer(Staged)

    @property
    def branched(self) -> Branched | None:
        return self.layer(Branched)

    @property
    def shards(self) -> Shards | None:
        return self.layer(Shards)

    @property
    def compiled(self) -> Blocks | None:
        """Where blocks can be compiled, but not the whole."""
        return self.layer(Blocks)

    @property
    def buffers(self) -> Buffers:
        found = self.layer(Replicated)
        return Buffers() if found is None else found.buffers

    @property
    def partitions(self) -> list[Partition]:
        """Axes along which this rank holds only some of the modules, from the outside in."""
        return [layer for layer in self.layers.values() if isinstance(layer, Partition)]

    @property
    def together(self) -> bool:
        """Whether ranks communicate in every forward: then all must run it, also those without a sample."""
        return any(layer.meets for layer in self.layers.values())

    @property
    def plain(self) -> bool:
        """Whether nothing acts inside the model: only then can it be compiled as a whole."""
        acts = self.shards is not None or any(layer.spreads for layer in self.layers.values())
        acts = acts or self.plan.offloads("activations")
        return not acts and not any(is_wrapped(module) for module in self.model.modules())

    @property
    def inside(self) -> Callable[[], AbstractContextManager[None]]:
        """What goes around every forward and backward of the model."""
        return _nested(layer.inside for layer in self.layers.values() if type(layer).inside is not Applied.inside)

    @property
    def during(self) -> Callable[[], AbstractContextManager[None]]:
        """What goes around all forwards and backwards of a batch."""
        return _nested(layer.during for layer in self.layers.values() if type(layer).during is not Applied.during)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of every parameter."""
        return not self.partitions and self.shards is None and not any(layer.cuts for layer in self.layers.values())

    @property
    def shape(self) -> nn.Module:
        """A model with the names and shapes, not the values, of the whole."""
        return self.partitions[0].skeleton if self.partitions else self.model

    def changed(self) -> None:
        """Call when weights were changed by other means than a step."""
        for layer in self.layers.values():
            layer.changed()

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """All weights and buffers, whole, on the CPU. All ranks call it together; those that do not ``keep`` them get
        none, and hold one at a time."""
        found, seen = {}, {}
        for name, tensor in _named(self.model):
            if tensor not in seen:
                whole = self._whole(tensor, tensor.detach())
                seen[tensor] = whole.cpu().clone() if keep or self.partitions else None
            found[name] = seen[tensor]
        if self.partitions:
            every = self._collected({name: {"": tensor} for name, tensor in found.items()}, keep)
            found = {name: many[""] for name, many in every.items()}
            names = [*_named(self.shape)]  # also those under which no rank holds it
            known = {tensor: found[name] for name, tensor in names if name in found}
            found |= {name: known[tensor] for name, tensor in names if tensor in known}
        return found if keep else {}

    def wholes(self, mine: Named, uncut: Collection[Tensor] = ()) -> Named:
        """Tensors that go with parameters (gradients, optimizer state), whole, on the CPU: by the parameter's name,
        then by a name of their own. A rank without a slice of a parameter may lack them. ``uncut``: parameters whose
        tensors one rank has whole. All ranks call it together."""
        return self._collected(self._wholes(mine, uncut), keep=True)

    def _collected(self, mine: Named, keep: bool) -> Named:
        """``mine`` together with that of the ranks that hold other modules."""
        for partition in reversed(self.partitions):
            mine = partition.collect(mine, keep=keep or partition is not self.partitions[0])
        return mine

    def _wholes(self, mine: Named, uncut: Collection[Tensor]) -> Named:
        """Of the parameters of this rank."""
        named = dict(self.model.named_parameters())
        if self.shards is None and not any(layer.cuts for layer in self.layers.values()):
            return {name: {key: t.detach().cpu().clone() for key, t in many.items()} for name, many in mine.items()}
        said: dict[str, dict[str, Tensor | torch.dtype]] = {}  # a dtype: it is cut as the parameter is
        for name, many in mine.items():
            p = named[name]
            if p.numel() or not (self.shards and p in self.shards.place):  # else no optimizer ever steps it
                alike = {key: p not in uncut and t.dim() and t.numel() == p.numel() for key, t in many.items()}
                said[name] = {key: t.dtype if alike[key] else t.cpu() for key, t in many.items()}
        every = [said] if self.mesh.world is None else all_gather_object(said, self.mesh.world)
        found: Named = {}
        for name, p in named.items():
            for key in dict.fromkeys(key for each in every for key in each.get(name, {})):
                value = next(each[name][key] for each in every if key in each.get(name, {}))
                if isinstance(value, torch.dtype):
                    value = self._whole(p, mine.get(name, {}).get(key), value).cpu().clone()
                found.setdefault(name, {})[key] = value
        return found

    def _whole(self, tensor: Tensor, mine: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor of which this rank has ``mine``, cut as ``tensor``, a parameter or buffer, is."""
        if mine is None:
            mine = torch.zeros_like(tensor, dtype=dtype)
        for layer in reversed(self.layers.values()):
            mine = layer.whole(tensor, mine)
        return mine

    def undo(self) -> None:
        """Restore the model, trained: whole, with its own forwards. All ranks call it together."""
        while self.layers:
            word, layer = next(reversed(self.layers.items()))
            if isinstance(layer, Partition):
                unwrap(self.model)
                layer.give_back(self.tensors())
                self.model = layer.before
            layer.undo()
            del self.layers[word]
        unwrap(self.model)
        self._end()

    def close(self) -> None:
        """End it with the parts that this rank holds. All ranks call it together."""
        for layer in reversed(self.layers.values()):
            layer.close()
        self._end()

    def _end(self) -> None:
        for config in self.caches:
            config.use_cache = True
        self.prepared.close()
        self.mesh.close()


def _nested(contexts: Iterable[Callable[[], AbstractContextManager[None]]]) -> Callable[..., Any]:
    """All of them as one, from the outside in."""
    every = list(contexts)
    if len(every) < 2:
        return every[0] if every else nullcontext

    @contextmanager
    def nested() -> Iterator[None]:
        with ExitStack() as stack:
            for context in every:
                stack.enter_context(context())
            yield

    return nested


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def place(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    *,
    objective: Callable[[nn.Module, Any], Any],
    few: Callable[[], Any],
    same: bool,
    deferred: Deferred | None = None,
    read: Callable[[Placed], Collection[Tensor]] = lambda placed: (),
    before_cut: Callable[[Callable[[], nn.Module]], None] = lambda tried: None,
    trains: bool = True,
    drops: bool = False,
    joins: bool = False,
) -> Placed:
    """Lay ``model`` out under ``plan``, in place. ``few`` gives some samples, for tracing a step.

    ``deferred``: ``model`` is on meta, and its weights come from there, but for those that ``read`` puts in place: it
    returns which, the same on all ranks. ``before_cut`` is called while the parameters
    still have the shapes of the whole, which an optimizer made there sees. It is given what returns a model with
    values, to try things on: the first rank alone calls it where ``model`` has none.
    ``drops``: a step may be dropped after its forward. ``joins``: workers may come later.
    """
    placed = Placed(plan, model, mesh, device, caches=_without_caches(model))
    try:
        used = [axis for axis in ORDER if axis.on(plan, model, device.type)]
        # stays in host memory at first: parts of it go to devices
        stays = plan.cuts or plan.tensor > 1 or plan.expert > 1 or plan.partitions_modules
        rehearsed = cache(partial(rehearsal, deferred))
        tried: Callable[[], nn.Module] = rehearsed if deferred is not None else lambda: model
        if deferred is not None:
            assert mesh.world is not None
            check_alike(deferred, mesh.world)
        elif not stays and plan.context == 1:
            model.to(device)
        if trains and (plan.devices > 1 or plan.server or plan.microbatches > 1 or drops):
            placed.written = _find_written(placed, objective, few, tried, joins=joins)
        found = Findings()
        if any(type(axis).find is not Axis.find for axis in used):
            found = _find(placed, objective, few, tried, on_meta=deferred is not None)
        placed.found = found.values
        placed.notes += [*found.notes, *([CACHES_OFF] if placed.caches else [])]
        placed.notes += check_buffers.notes(plan, placed.written)
        if not stays and deferred is None:
            model.to(device)
        if not same:
            broadcast(model, mesh, device)
        before_cut(tried)
        if rehearsed.cache_info().currsize:  # the model that plans were tried on is let go
            rehearsed.cache_clear()
            heap.give_back()
        _apply(placed, used)
        if deferred is not None:
            fill(placed, deferred, read(placed))
        look_away_from(placed.buffers)
    except BaseException:
        placed.close()
        raise
    return placed


def _find_written(
    placed: Placed,
    objective: Callable[[nn.Module, Any], Any],
    few: Callable[[], Any],
    tried: Callable[[], nn.Module],
    *,
    joins: bool,
) -> Written:
    """The buffers that a forward writes, checked: the plan can keep them as one device would."""
    plan, model, device = placed.plan, placed.model, placed.device
    arithmetic, asks = lambda: Precision(plan.precision).arithmetic(device), plan.buffers == "exact"
    with python_state_kept(model, *code_of(objective)):
        written = from_first_rank(
            lambda: find_written(model, objective, few, device, arithmetic, tries=asks, tried=tried), placed.mesh.world
        )
    check_buffers.check(plan, written, by_rows=splits_sequence(plan, device.type), joins=joins)
    return written


def _find(
    placed: Placed,
    objective: Callable[[nn.Module, Any], Any],
    few: Callable[[], Any],
    tried: Callable[[], nn.Module],
    *,
    on_meta: bool,
) -> Findings:
    """What the axes act on, found by the first rank."""
    plan, model, kind = placed.plan, placed.model, placed.device.type
    kept = [writer.path for writer in placed.written.writers if check_buffers.splits(plan)]
    shapes = on_meta and not (plan.tensor > 1 or plan.expert > 1 or plan.context > 1)
    looked_at = (lambda: model) if shapes and not plan.partitions_modules else tried

    def found() -> Findings:
        with cpu_threads(cores()):  # the other ranks wait
            return find(plan, looked_at(), objective, few(), kind, kept)

    with python_state_kept(model, *code_of(objective)):
        return from_first_rank(found, placed.mesh.world)


def _apply(placed: Placed, used: Iterable[Axis]) -> None:
    """The axes, from the outside in."""
    for axis in used:
        ties = tied(placed.model)
        layer = axis.apply(placed, placed.found.get(axis.word))
        if layer is not None:
            placed.layers[axis.word] = layer
        if isinstance(layer, Partition):
            placed.model = layer.model
        else:
            check_ties(placed.model, ties)
    if placed.shards is None:
        parameters_to(placed.model, placed.device)
        placed.model.to(placed.device)
    states_to(placed.model, placed.device)


CACHES_OFF = (
    "config.use_cache is off while training: a key-value cache serves generation, and hides packed position_ids"
)


def _without_caches(model: nn.Module) -> list[Any]:
    """Turn off the key-value caches that Hugging Face's models make even in training, where they were on; under every
    plan, as transformers' Trainer does. With a cache their masks do not separate packed documents, a block that is
    recomputed fills it twice, and it cannot be sent between ranks."""
    configs: dict[int, Any] = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    return found
